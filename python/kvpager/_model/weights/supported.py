"""Weights that an engine takes: their dtypes, quantised kinds that can be read, devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvpager._model.weights.held import held_by, is_quantised

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
    """Reason and remedy for quantised weights, of any library, that cannot be covered."""
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


_HOOKS = "accelerate.hooks"
# Of a dispatched model, replaced by ones that refuse to move it.
_MOVING = frozenset({"to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"})
_MOST_NAMED = 3  # modules that a message names, of each place


def placement_problems(model: Any) -> Iterator[tuple[str, str]]:
    """Reason and remedy where weights are not all in the memory of one device."""
    places: dict[str, list[str]] = {}
    for name, tensor in held_by(model).tensors:
        places.setdefault(str(tensor.device), []).append(name.rpartition(".")[0])
    if "meta" in places:
        offloaded = _offloaded(model) or _named(places["meta"])
        yield (
            f"some of its weights are not in memory (meta tensors, or offloaded ones): {offloaded}",
            'load it whole, to the CPU or to one GPU: device_map="cpu" or {"": 0}',
        )
    elif len(places) != 1:
        where = " and ".join(f"{place} ({_named(places[place])})" for place in sorted(places))
        yield (
            f"its parameters are on {where}, and rows of one forward are computed on one device",
            'load it with device_map="cpu" or {"": 0}, or without one and call model.to("cuda")',
        )
    else:
        (place,) = places
        if torch.device(place).type not in ("cpu", "cuda"):
            yield f"its parameters are on {place}", 'call model.to("cuda") or model.to("cpu")'
        yield from _hook_problems(model, torch.device(place))


def only_aligns(module: torch.nn.Module) -> bool:
    """Whether a module's forward is replaced by one of accelerate that moves nothing.

    It is, where all weights are on the device that its hook moves arguments to.
    """
    own = vars(module)
    hook = own.get("_hf_hook")
    return (
        hook is not None
        and "forward" in own
        and f"{type(hook).__module__}.{type(hook).__name__}" == f"{_HOOKS}.AlignDevicesHook"
        and not hook.offload
        and getattr(own.get("_old_forward"), "__func__", None) is type(module).forward
    )


def replaced_to_place(module: torch.nn.Module, name: str) -> bool:
    """Whether accelerate has replaced a method of a module to keep it where it is."""
    if name == "forward":
        return only_aligns(module)
    return name in _MOVING and "hf_device_map" in vars(module)


def _hook_problems(model: Any, place: torch.device) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        moves_to = getattr(hook, "execution_device", None)
        if getattr(hook, "offload", False) or (moves_to is not None and _device(moves_to) != place):
            yield (
                f"a hook of accelerate moves what its module {name or '(the model)'} is given to "
                f"{moves_to}, and its weights are on {place}",
                "call accelerate.hooks.remove_hook_from_submodules(model)",
            )
            return


def _device(place: Any) -> torch.device:
    """A device as accelerate writes one: the number of a GPU, or a name."""
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    index: int | None = device.index  # declared as never None
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _offloaded(model: Any) -> str:
    """The modules that a device map has put on a disk, or beside another device."""
    placed: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    names = [name or "(the model)" for name, place in placed.items() if str(place) == "disk"]
    return f"{_named(names)} on disk, by its device_map" if names else ""


def _named(modules: list[str]) -> str:
    names = list(dict.fromkeys(name or "(the model)" for name in modules))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
