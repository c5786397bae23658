"""Windows that modules of attention have in their masks alone, and pass to no attention call."""

from __future__ import annotations

import weakref

import torch

# By the module's id: looked up by every layer of every forward. Nothing is written to a module, so
# that copies of a model and saved ones know nothing of it.
_found: dict[int, tuple[weakref.ref[torch.nn.Module], int | None]] = {}


def note_mask_window(module: torch.nn.Module, window: int | None) -> None:
    """Later calls of the module without a `sliding_window` are answered with this one.

    window: positions that a row sees, itself among them; None: all up to its own.
    """
    key = id(module)

    def forget(reference: weakref.ref[torch.nn.Module]) -> None:
        if key in _found and _found[key][0] is reference:
            del _found[key]

    _found[key] = weakref.ref(module, forget), window


def mask_window(module: torch.nn.Module) -> int | None:
    """What was noted of a module; None also where nothing was."""
    found = _found.get(id(module))
    return None if found is None else found[1]


def mask_windows_by_name(model: torch.nn.Module) -> list[tuple[str, int | None]]:
    """What was noted, with the modules' names in a model."""
    return [
        (name, _found[id(module)][1])
        for name, module in model.named_modules()
        if id(module) in _found
    ]


def mask_windows(model: torch.nn.Module) -> list[int | None]:
    """What was noted of the modules of a model, in their order."""
    return [_found[id(module)][1] for module in model.modules() if id(module) in _found]
