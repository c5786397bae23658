"""All that the bits of K/V and logits depend on, as a flat mapping, and how two are compared.

Where chunks live (pool, host, disk, policy) is not in it: that never changes a bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
import xxhash

from kvpager import _core, numerics
from kvpager.config import PagerConfig, describe_selection
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError
from kvpager.hf import RowCounts
from kvpager.hf.additions import additions_digest
from kvpager.pager import Layout
from kvpager.salts import salt_digest, stretched
from kvpager.weights import weights_digest


@dataclass(frozen=True)
class Rule:
    """What one field of a fingerprint is, and what becomes of a snapshot in which it differs.

    Attributes:
        meaning: what the field holds.
        waivable: False: the K/V mean something else, and the snapshot is refused always. True: only
            last bits may differ, so `on_mismatch="approximate"` accepts it, and then nothing of it
            is ever shared as exact.
        remedy: what to do about a mismatch.
        only_on: the kind of device whose fingerprints have it; empty: all.
        follows: it differs as soon as a waivable field does, and is waived with that; alone, never.
    """

    meaning: str
    waivable: bool = False
    remedy: str = "load the model and settings it was saved with"
    only_on: str = ""
    follows: bool = False

    @property
    def on_mismatch(self) -> str:
        """In one word: "refuse", or "waivable"."""
        return "waivable" if self.waivable else "refuse"


_MODEL = "load the model it was saved with"
_KV_DTYPE = "set PagerConfig.kv_dtype to the value it was saved with"
_SAME_BUILD = "use the release it was saved with"

# Every field of `describe`, in its order. A field that is not here is refused where it differs.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "architecture": Rule("class of the model", remedy=_MODEL),
        "weights": Rule(
            "digest of every parameter and buffer as it is in memory, adapters included",
            remedy="load the weights (and adapters) it was saved with",
        ),
        "additions": Rule(
            "digest of what was added to the model: adapters and their settings, custom modules, "
            "hooks, replaced methods; empty for none",
            remedy="activate the adapters it was saved with, as they were, without other hooks",
        ),
        "model_config": Rule("digest of what the model's configuration changes", remedy=_MODEL),
        "model_dtype": Rule("dtype the model computes in", remedy=_MODEL),
        "rope": Rule("parameters of the rotary embedding", remedy=_MODEL),
        "layers": Rule("layers of a chunk", remedy=_MODEL),
        "kv_heads": Rule("key/value heads of a layer", remedy=_MODEL),
        "k_dim": Rule("head_dim of keys", remedy=_MODEL),
        "v_dim": Rule("head_dim of values", remedy=_MODEL),
        "k_dtype": Rule("dtype keys are kept in", remedy=_KV_DTYPE),
        "v_dtype": Rule("dtype values are kept in", remedy=_KV_DTYPE),
        "chunk_tokens": Rule(
            "tokens per chunk",
            remedy="set PagerConfig.chunk_tokens to the value it was saved with",
        ),
        "exact": Rule(
            'what decided the row count of a forward: "rows" (one of those proven), "aligned" (a '
            'chunk of one sequence, of a model with recurrent layers), or "none"',
            waivable=True,
            remedy="set PagerConfig.exact to the mode it was saved with",
        ),
        "rows": Rule(
            "class of row counts that forwards have, by the smallest that was proven to be of it",
            waivable=True,
            remedy="set PagerConfig.rows and PagerConfig.small_rows to what it was saved with",
        ),
        "head_rows": Rule(
            "the same, of the output head",
            waivable=True,
            remedy="set PagerConfig.small_rows to what it was saved with",
        ),
        "selection": Rule(
            "what a row attends to",
            remedy="set PagerConfig.selection to the one it was saved with",
        ),
        "scorer": Rule("what made the summaries", remedy="set the scorer it was saved with"),
        "salt": Rule(
            "digest of the tenant's salt, made slowly; empty for none",
            remedy="use the salt it was saved under",
        ),
        "behaviour": Rule(
            "digest of what a forward of made-up tokens gives",
            follows=True,
            remedy="load the model as it was, with its adapters, hooks and patches",
        ),
        "device": Rule(
            "kind of device that computed it",
            waivable=True,
            remedy="use the device it was saved on",
        ),
        "chunks_per_split": Rule("chunks per partial sum of attention", remedy=_SAME_BUILD),
        "kernel_version": Rule(
            "version of our own arithmetic; of tensor cores with that word",
            waivable=True,
            remedy="use the kvpager it was saved by, and PagerConfig.attention as it was",
        ),
        "torch_version": Rule("release of torch", waivable=True, remedy=_SAME_BUILD),
        "transformers_version": Rule("release of transformers", waivable=True, remedy=_SAME_BUILD),
        "processor": Rule(
            "instruction sets, or the GPU, that torch's matrix products choose by; with recurrent "
            "layers on the CPU also where weights begin within a cache line",
            waivable=True,
            remedy="use a processor or GPU like the one it was saved on, and load the model alike",
        ),
        "threads": Rule(
            "threads of torch, on the CPU",
            waivable=True,
            remedy="call torch.set_num_threads with the value it was saved with",
        ),
        "mkl_cbwr": Rule(
            "MKL_CBWR in the environment",
            waivable=True,
            remedy="start the process with the value it was saved with",
        ),
        "matmul_precision": Rule(
            "torch's float32 matmul precision",
            waivable=True,
            remedy="call torch.set_float32_matmul_precision with the value it was saved with",
        ),
        "cuda": Rule(
            "releases of CUDA and cuBLAS, on a GPU",
            waivable=True,
            remedy=_SAME_BUILD,
            only_on="cuda",
        ),
        "cuda_settings": Rule(
            "switches of torch's matrix products, on a GPU",
            waivable=True,
            remedy="set them, and CUBLAS_WORKSPACE_CONFIG, as they were when it was saved",
            only_on="cuda",
        ),
    }
)
# Numerics: another value may change last bits, and a caller may accept that.
WAIVABLE = tuple(name for name, rule in RULES.items() if rule.waivable)
_FOLLOWING = tuple(name for name, rule in RULES.items() if rule.follows)

_WAIVE = 'or pass on_mismatch="approximate" to accept results that may differ in their last bits'
_UNKNOWN = Rule("a field this release does not know")
# Of a model's configuration: says where it came from or how it is used, not what it computes.
_INCIDENTAL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
_ROPE = ("rope_parameters", "rope_theta", "no_rope_layers", "partial_rotary_factor")


def describe(
    model: Any,
    config: PagerConfig,
    layout: Layout,
    *,
    row_counts: RowCounts,
    kernel_version: int | str = _core.KERNEL_VERSION,
    salt: str,
    behaviour: str,
    aligned: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """The fingerprint of an engine: JSON-able, flat, and the same in every process.

    Its fields are those of RULES that the model's device has.

    Args:
        model: the model.
        config: of the engine.
        layout: of its chunks.
        row_counts: of its forwards.
        kernel_version: of the attention that the pager runs; see `attention_version`.
        salt: the tenant's.
        behaviour: digest of what a forward of it gives; see kvpager.hf.behaviour.
        aligned: a forward is a chunk of one sequence, from the state before it.
        progress: told the bytes of weights hashed, and of all.
    """
    device = model.device
    on_cpu = device.type == "cpu"
    values = model.config.to_dict()
    # Only what differs from the class's defaults: a release that adds an option changes nothing.
    given = model.config.to_diff_dict()
    plain = {key: given[key] for key in given if key not in _INCIDENTAL and key not in _ROPE}
    return {
        "architecture": type(model).__name__,
        "weights": weights_digest(model, progress),
        "additions": additions_digest(model),
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
        "exact": "none" if config.exact is False else "aligned" if aligned else "rows",
        "rows": row_counts.ladder[0],
        "head_rows": row_counts.head[0],
        "selection": describe_selection(config.selection),
        "scorer": config.scorer_name,
        "salt": salt_digest(stretched(salt)),
        "behaviour": behaviour,
        "device": device.type,
        "chunks_per_split": _core.CHUNKS_PER_SPLIT,
        "kernel_version": kernel_version,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "processor": numerics.describe_processor(device)
        + (_placement(model) if aligned and on_cpu else ""),
        # What the host computes with does not matter to a GPU.
        "threads": torch.get_num_threads() if on_cpu else 0,
        "mkl_cbwr": os.environ.get("MKL_CBWR", "") if on_cpu else "",
        "matmul_precision": torch.get_float32_matmul_precision() if on_cpu else "",
        **({} if on_cpu else _of_cuda(device)),
    }


def _placement(model: Any) -> str:
    """A digest of where weights begin within a cache line; empty where all begin with one.

    Products of a single row in float32 differ by it, and a chunk that is computed alone may have
    them: in experts that one token chose, or in every layer where forwards have one row.
    """
    line = 64
    offsets = [
        f"{name}\0{parameter.data_ptr() % line}"
        for name, parameter in sorted(model.named_parameters())
        if parameter.data_ptr() % line
    ]
    digest = xxhash.xxh3_64_hexdigest("\0".join(offsets).encode())
    return f", weights at {digest}" if offsets else ""


def _of_cuda(device: torch.device) -> dict[str, str]:
    return {
        "cuda": numerics.describe_cuda(),
        "cuda_settings": numerics.describe_settings(device),
    }


def compare(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    on_mismatch: str = "refuse",
    can_waive: bool = True,
    source: str = "the snapshot",
) -> str:
    """What K/V computed under `found` are worth under `expected`: "exact" or "approximate".

    Args:
        expected: the running engine's.
        found: the snapshot's.
        on_mismatch: "refuse", or "approximate" to waive the fields in WAIVABLE.
        can_waive: whether whoever asks could have said so, for the message.
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
    numerics = any(name in WAIVABLE for name in different)
    if numerics:
        different.sort(key=lambda name: 2 if name in _FOLLOWING else name in WAIVABLE)
    for name in different:
        waivable = name in WAIVABLE or (numerics and name in _FOLLOWING)
        if waivable and on_mismatch == "approximate":
            continue
        advice = f", {_WAIVE}" if can_waive and waivable else ""
        raise _mismatch(name, expected.get(name), found.get(name), source, advice)
    return "approximate" if different else "exact"


def _mismatch(
    name: str, expected: Any, found: Any, source: str, advice: str
) -> FingerprintMismatchError:
    remedy = RULES.get(name, _UNKNOWN).remedy + advice
    return FingerprintMismatchError(
        f"{source} was saved with {name} {found!r}, and this engine has {expected!r}; {remedy}",
        field=name,
        expected=expected,
        found=found,
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(value).encode())
