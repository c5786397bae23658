"""Where a model's weights are, and what accelerate's hooks do with them.

A `device_map` that puts everything on one device is no placement at all: transformers leaves the
model as it is, and hooks that `dispatch_model` was told to add move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvpager.held import held_by

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
