"""Weights an engine can take: plain floating-point tensors of the dtypes that have kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LOAD = "load it with dtype=torch.float32, torch.bfloat16 or torch.float16"
_QUANTISED = "torch.ao.nn.quantized"  # modules that hold their weights packed, not as parameters


def weight_problems(model: Any) -> Iterator[tuple[str, str]]:
    """Reason and remedy for every kind of weight that is not taken; names the first of a kind."""
    yield from _quantised(model)
    if model.dtype not in DTYPES:
        yield f"its dtype is {_name(model.dtype)}", _LOAD
    for name, parameter in model.named_parameters():
        if parameter.dtype not in DTYPES:
            yield f"its weight {name} is {_name(parameter.dtype)}", _LOAD
            return


def compiled_part(model: Any) -> str:
    """The first module that runs through torch.compile, in words; empty if none does."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if (
            getattr(module, "_compiled_call_impl", None) is not None
            or "_orig_mod" in vars(module)["_modules"]
            or hasattr(forward, "_torchdynamo_orig_callable")
        ):
            return f"its module {name}" if name else "it"
    return ""


def _quantised(model: Any) -> Iterator[tuple[str, str]]:
    """Weights of fewer bits, by whatever library."""
    remedy = "load it without quantising its weights (no quantization_config, no quantize_())"
    for name, parameter in model.named_parameters():
        kind = type(parameter)
        plain = kind is torch.nn.Parameter and type(parameter.data) is torch.Tensor
        if not plain or not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            what = _name(parameter.dtype) if plain else f"a {kind.__name__}"
            yield (
                f"its weight {name} is {what}: quantised weights are covered neither by the "
                "weights digest nor by the checks of rows",
                remedy,
            )
            return
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED):
            yield f"its module {name} ({type(module).__name__}) holds quantised weights", remedy
            return
    if getattr(model.config, "quantization_config", None) is not None:
        yield (
            "its weights are quantised, which neither the weights digest nor the row checks cover",
            "load it without quantization_config",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
