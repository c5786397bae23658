"""Weights an engine can take: of dtypes that have kernels, or quantised ones that can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvpager.held import held_by, is_quantised

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LOAD = "load it with dtype=torch.float32, torch.bfloat16 or torch.float16"
_UNQUANTISED = "load it without quantising its weights (no quantization_config, no quantize_())"
_SEEN = ("torch", "transformers", "peft")  # whose modules keep weights in parameters and buffers
_WRITERS = {  # modules of torch whose hooks write weights: what ends it
    "torch.nn.utils.prune": 'torch.nn.utils.prune.remove(module, "weight")',
    "torch.nn.utils.weight_norm": "torch.nn.utils.remove_weight_norm(module)",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.remove_spectral_norm(module)",
}


def weight_problems(model: Any) -> Iterator[tuple[str, str]]:
    """Reason and remedy for every kind of weight that is not taken; names the first of a kind.

    Quantised weights are taken where all that they are made of can be read: then the weights digest
    and the watch cover them, and the checks of rows decide.
    """
    yield from _quantised(model)
    yield from _rewritten(model)
    if model.dtype not in DTYPES:
        yield f"its dtype is {_name(model.dtype)}", _LOAD
    for prefix, module in model.named_modules():
        if is_quantised(module):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.dtype not in DTYPES:
                yield f"its weight {name} is {_name(parameter.dtype)}", _LOAD
                return


def _rewritten(model: Any) -> Iterator[tuple[str, str]]:
    """The first weight that a hook of torch's makes anew before every call of its module."""
    for name, module in model.named_modules():
        for hook in vars(module)["_forward_pre_hooks"].values():
            kind = next((each for each in type(hook).__mro__ if each.__module__ in _WRITERS), None)
            if kind is not None:
                yield (
                    f"a hook of {kind.__module__} writes a weight of its module {name} anew before "
                    "every call",
                    f"call {_WRITERS[kind.__module__]} first, which keeps the numbers",
                )
                return


def compiled_part(model: Any) -> str:
    """The first module that runs through torch.compile, in words; empty if none does."""
    for name, module in model.named_modules():
        # Libraries of quantisation compile other methods, such as one that decodes a weight.
        compiled = any(
            callable(value) and hasattr(value, "_torchdynamo_orig_callable")
            for value in vars(module).values()
        )
        if (
            getattr(module, "_compiled_call_impl", None) is not None
            or "_orig_mod" in vars(module)["_modules"]
            or compiled
        ):
            return f"its module {name}" if name else "it"
    return ""


def _quantised(model: Any) -> Iterator[tuple[str, str]]:
    """What of quantised weights cannot be covered, by whatever library they are."""
    for name, what in held_by(model).opaque:
        yield (
            f"its weight {name} {what}: neither the weights digest nor the watch over changed "
            "weights can read what it holds",
            _UNQUANTISED,
        )
        return
    packed = [(name, module) for name, module in model.named_modules() if is_quantised(module)]
    for name, module in packed:
        if has_expert_weights(module):
            yield (
                f"its experts {name} are quantised, and their trial would exchange their weights",
                "quantise the other layers alone, or " + _UNQUANTISED,
            )
            return
    sizes = {"input embeddings": model.get_input_embeddings()}
    sizes["language-model head"] = model.get_output_embeddings()
    for what, module in sizes.items():
        vocab = getattr(model.config, "vocab_size", None)
        if module is not None and is_quantised(module) and _rows_of(module) != vocab:
            yield (
                f"the weights of its {what} ({type(module).__name__}) are packed, so that they do "
                "not say how many tokens there are",
                f"leave the {what} out of the quantisation",
            )
            return
    hidden = next((x for x in model.named_modules() if _hides_weights(x[1])), None)
    if hidden is not None and getattr(model.config, "quantization_config", None) is not None:
        yield (
            f"its weights are quantised, and its module {hidden[0]} ({type(hidden[1]).__name__}) "
            "holds none that the weights digest and the watch over changed weights can read",
            _UNQUANTISED,
        )


def _rows_of(module: Any) -> int | None:
    """Rows of a module's weight, if it has one that says so."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if weight is not None and weight.dtype in DTYPES else None


def _hides_weights(module: torch.nn.Module) -> bool:
    """Whether a library's own kind of module, without children, has no weights to be seen."""
    return (
        not any(module.children())
        and not any(True for _ in module.parameters())
        and not any(True for _ in module.buffers())
        and type(module).__module__.partition(".")[0] not in _SEEN
        and "Linear" in type(module).__name__
    )


def has_expert_weights(module: torch.nn.Module) -> bool:
    """Whether a module holds matrices of several experts."""
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
