"""All that the bits of K/V and logits depend on, as a flat mapping, and how two are compared.

Where chunks live (pool, host, disk, policy) is not in it: that never changes a bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
import xxhash

from kvpager import _core
from kvpager.config import PagerConfig, describe_selection
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError
from kvpager.hf import HEAD_ROWS
from kvpager.pager import Layout

# Numerics: another value may change last bits, and a caller may accept that. All other fields say
# what the K/V mean; with another value they are simply wrong.
WAIVABLE = (
    "torch_version",
    "transformers_version",
    "processor",
    "threads",
    "mkl_cbwr",
    "matmul_precision",
    "kernel_version",
)

_REMEDIES = {
    "weights": "load the weights (and adapters) it was saved with",
    "salt": "use the salt it was saved under",
    "rows": "set PagerConfig.rows to the value it was saved with",
    "chunk_tokens": "set PagerConfig.chunk_tokens to the value it was saved with",
    "selection": "set PagerConfig.selection to the one it was saved with",
    "scorer": "set the scorer it was saved with",
    "k_dtype": "set PagerConfig.kv_dtype to the value it was saved with",
    "v_dtype": "set PagerConfig.kv_dtype to the value it was saved with",
    "threads": "call torch.set_num_threads with the value it was saved with",
}
_WAIVE = 'or pass on_mismatch="approximate" to accept results that may differ in their last bits'
_DIGEST_BLOCK = 64 << 20  # bytes per task, so that one large embedding keeps all threads busy
# Of a model's configuration: says where it came from or how it is used, not what it computes.
_INCIDENTAL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
_ROPE = ("rope_parameters", "rope_theta", "no_rope_layers", "partial_rotary_factor")


def describe(
    model: Any, config: PagerConfig, layout: Layout, *, rows: int, salt: str
) -> dict[str, Any]:
    """The fingerprint of an engine: JSON-able, flat, and the same in every process."""
    values = model.config.to_dict()
    # Only what differs from the class's defaults: a release that adds an option changes nothing.
    given = model.config.to_diff_dict()
    plain = {key: given[key] for key in given if key not in _INCIDENTAL and key not in _ROPE}
    return {
        "architecture": type(model).__name__,
        "weights": weights_digest(model),
        "model_config": _digest_json(plain),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "rope": _canonical({key: values[key] for key in _ROPE if key in values}),
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "k_dim": layout.k_dim,
        "v_dim": layout.v_dim,
        "k_dtype": layout.k_dtype,
        "v_dtype": layout.v_dtype,
        "chunk_tokens": layout.chunk_tokens,
        "rows": rows,
        "head_rows": HEAD_ROWS,
        "selection": describe_selection(config.selection),
        "scorer": config.scorer_name,
        "salt": xxhash.xxh3_128_hexdigest(b"kvpager salt\0" + salt.encode()),
        "device": model.device.type,
        "chunks_per_split": _core.CHUNKS_PER_SPLIT,
        "kernel_version": _core.KERNEL_VERSION,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def compare(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    on_mismatch: str = "refuse",
    source: str = "the snapshot",
) -> str:
    """What K/V computed under `found` are worth under `expected`: "exact" or "approximate".

    Args:
        expected: the running engine's.
        found: the snapshot's.
        on_mismatch: "refuse", or "approximate" to waive the fields in WAIVABLE.
        source: what `found` is of, for the message.

    Raises:
        FingerprintMismatchError: with `.field`, `.expected` and `.found` of the first field that
            differs and is not waived; fields that never are come first.
    """
    if on_mismatch not in ("refuse", "approximate"):
        raise InvalidArgumentError(
            f'on_mismatch is {on_mismatch!r}; expected "refuse" or "approximate"'
        )
    names = [*expected, *(name for name in found if name not in expected)]
    different = [name for name in names if expected.get(name) != found.get(name)]
    different.sort(key=lambda name: name in WAIVABLE)
    for name in different:
        if name in WAIVABLE and on_mismatch == "approximate":
            continue
        raise _mismatch(name, expected.get(name), found.get(name), source)
    return "approximate" if different else "exact"


def _mismatch(name: str, expected: Any, found: Any, source: str) -> FingerprintMismatchError:
    remedy = _REMEDIES.get(name, "load the model and settings it was saved with")
    if name in WAIVABLE:
        remedy = f"{remedy}, {_WAIVE}"
    return FingerprintMismatchError(
        f"{source} was saved with {name} {found!r}, and this engine has {expected!r}; {remedy}",
        field=name,
        expected=expected,
        found=found,
    )


def weights_digest(model: Any) -> str:
    """XXH3-128 over name, shape, dtype and bytes of every live parameter and buffer, in hex.

    Live tensors, not files: an adapter that is active in memory is part of it. Several GB/s.
    """
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    summary = xxhash.xxh3_128()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        hashed = [
            (name, tensor, [pool.submit(xxhash.xxh3_128_digest, part) for part in _blocks(tensor)])
            for name, tensor in tensors
        ]
        for name, tensor, parts in hashed:
            summary.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
            for part in parts:
                summary.update(part.result())
    return summary.hexdigest()


def _blocks(tensor: torch.Tensor) -> Iterator[Any]:
    """A tensor's bytes in logical order, in blocks; copied only if it is not contiguous."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, max(1, len(raw)), _DIGEST_BLOCK):
        yield raw[start : start + _DIGEST_BLOCK]


def _processor() -> str:
    """What torch's matrix kernels choose by. Our own kernels give the same bits on every one."""
    amx = ["amx"] if torch.cpu._is_amx_tile_supported() else []  # noqa: SLF001  # no public way
    return "+".join([torch.backends.cpu.get_cpu_capability(), *amx])


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(value).encode())
