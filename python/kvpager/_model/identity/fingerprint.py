"""The fingerprint: everything the bits of K/V and logits depend on, as a flat mapping.

The place of chunks (pool, host, disk, policy) is not part of it, because it never changes a bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
import xxhash

from kvpager import _core
from kvpager._model.fingerprint_rules import (
    CONVERTIBLE,
    FOLLOWING,
    ON_MISMATCH,
    RULES,
    WAIVABLE,
    Rule,
)
from kvpager._model.layout import Layout
from kvpager._model.seam.rows import RowCounts
from kvpager._model.weights import numerics
from kvpager._support.arguments import is_one_of
from kvpager.config import PagerConfig, describe_selection
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError

_WAIVE = 'or pass on_mismatch="approximate" to accept results that may differ in their last bits'
_CONVERT = 'or pass on_mismatch="convert" to go on with K/V rounded to this engine\'s dtype'
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
    weights: str,
    additions: str,
    row_counts: RowCounts,
    kernel_version: int | str = _core.KERNEL_VERSION,
    linear: str = "",
    behaviour: str,
    aligned: bool = False,
) -> dict[str, Any]:
    """The fingerprint of an engine: JSON-able, flat, and the same in every process.

    Its fields are those of RULES that the model's device has.

    Args:
        model: the model.
        config: of the engine.
        layout: of its chunks.
        weights: digest of its weights; see `kvpager._model.weights.digests`.
        additions: digest of what was added to it; see `Additions`.
        row_counts: of its forwards.
        kernel_version: of the pager's attention; see `attention_version`.
        linear: whose products linear layers are, with their version; empty: torch's.
        behaviour: digest of what the model does; see kvpager._model.identity.behaviour.
        aligned: True for recurrent models: a forward is a chunk of one sequence.
    """
    device = model.device
    on_cpu = device.type == "cpu"
    values = model.config.to_dict()
    # Only what differs from the class's defaults: a release that adds an option changes nothing.
    given = model.config.to_diff_dict()
    plain = {key: given[key] for key in given if key not in _INCIDENTAL and key not in _ROPE}
    described = {
        "architecture": type(model).__name__,
        "weights": weights,
        "additions": additions,
        "model_config": _digest_json(plain),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "rope": _canonical({key: values[key] for key in _ROPE if key in values}),
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "k_dim": layout.k_dim,
        "v_dim": layout.v_dim,
        **dtypes_of(layout),
        "chunk_tokens": layout.chunk_tokens,
        "exact": "none" if config.exact is False else "aligned" if aligned else "rows",
        **({"linear": linear} if linear else {}),
        "rows": row_counts.ladder[0],
        "head_rows": row_counts.head[0],
        "selection": describe_selection(config.selection),
        "scorer": "bits2",  # earlier versions had others
        # Each snapshot's own section has the digest: no bits depend on it, and an engine has many.
        "salt": "",
        "behaviour": behaviour,
        "device": device.type,
        "chunks_per_split": _core.CHUNKS_PER_SPLIT,
        "kernel_version": kernel_version,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "processor": numerics.describe_processor(device)
        + (_placement(model) if aligned and on_cpu else ""),
        # The host's threads do not affect bits on a GPU.
        "threads": torch.get_num_threads() if on_cpu else 0,
        "mkl_cbwr": os.environ.get("MKL_CBWR", "") if on_cpu else "",
        "matmul_precision": numerics.precision_on_cpu() if on_cpu else "",
    }
    if not on_cpu:
        described["cuda"] = numerics.describe_cuda()
        described["cuda_settings"] = numerics.describe_settings(device)
    return described


def _placement(model: Any) -> str:
    """A digest of the weights' offsets within a cache line; empty if all are 0.

    The bits of single-row products in float32 depend on it. A recurrent model may have such
    products: in experts that one token chose, or in every layer if forwards have one row.
    """
    line = 64
    offsets = [
        f"{name}\0{parameter.data_ptr() % line}"
        for name, parameter in sorted(model.named_parameters())
        if parameter.data_ptr() % line
    ]
    digest = xxhash.xxh3_64_hexdigest("\0".join(offsets).encode())
    return f", weights at {digest}" if offsets else ""


def dtypes_of(layout: Layout) -> dict[str, str]:
    """The fields that say what K/V are kept in, as in CONVERTIBLE.

    What q8 has had from the first, nothing rotated and no float layer, needs no field.
    """
    said = {"k_dtype": layout.k_dtype, "v_dtype": layout.v_dtype}
    if layout.k_rotated or layout.v_rotated:
        said["kv_rotation"] = layout.rotation
    if layout.float_layers:
        layers = ", ".join(map(str, layout.float_layers))
        said["float_layers"] = f"{layers} in {layout.float_dtype}"
    return said


def compare(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    on_mismatch: str = "refuse",
    can_waive: bool = True,
    source: str = "the snapshot",
) -> str:
    """Whether K/V computed under `found` are "exact" or "approximate" under `expected`.

    Args:
        expected: the running engine's.
        found: the snapshot's.
        on_mismatch: "refuse"; "approximate" to waive the fields in WAIVABLE; or "convert" to waive
            those in CONVERTIBLE too, which the caller then converts.
        can_waive: whether the message may suggest `on_mismatch`.
        source: names the owner of `found` in the message.

    Raises:
        FingerprintMismatchError: with `.field`, `.expected` and `.found` of the first field that
            differs and is not waived; non-waivable fields come first.
    """
    if not is_one_of(on_mismatch, ON_MISMATCH):
        raise InvalidArgumentError(
            f'on_mismatch is {on_mismatch!r}; expected "refuse", "approximate" or "convert"'
        )
    converts = on_mismatch == "convert"
    names = [*expected, *(name for name in found if name not in expected)]
    different = [name for name in names if expected.get(name) != found.get(name)]
    numerics = any(name in WAIVABLE or (converts and name in CONVERTIBLE) for name in different)
    if numerics:
        different.sort(key=lambda name: 2 if name in FOLLOWING else name in WAIVABLE)
    for name in different:
        waivable = name in WAIVABLE or (numerics and name in FOLLOWING)
        if waivable and on_mismatch != "refuse":
            continue
        if converts and name in CONVERTIBLE:
            continue
        advice = _CONVERT if name in CONVERTIBLE else _WAIVE if waivable else ""
        advice = f", {advice}" if can_waive and advice else ""
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
