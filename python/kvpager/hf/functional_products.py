"""Products of an engine's forwards that modules compute by `torch.nn.functional.linear`.

Routers of mixtures of experts do, with a parameter of theirs and often in float32. The forward of
such a class asks, as that of torch.nn.Linear does (linear.py): while an engine runs its model, and
only in its thread (context), the function is kvpager's product within it.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as transformers calls it
from torch.overrides import TorchFunctionMode

from kvpager.hf.linear import LinearLayers, running_layers

_MARK = "_asks_kvpager"
_COPY_OF = "_kvpager_copy_of"


def exchange_callers(model: torch.nn.Module) -> frozenset[int]:
    """Ids of a model's modules that call `torch.nn.functional.linear`; their classes ask here now.

    Those are classes of transformers, but for kinds of torch.nn.Linear.
    """
    asking = {kind for kind in set(map(type, model.modules())) if _asks(kind)}
    return frozenset(id(module) for module in model.modules() if type(module) in asking)


def stand_in(copy: torch.nn.Module, module: torch.nn.Module) -> None:
    """Has a copy of a module computed as the module is."""
    vars(copy)[_COPY_OF] = id(module)


def _asks(kind: type[Any]) -> bool:
    if issubclass(kind, torch.nn.Linear):
        return False
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    own = vars(owner)["forward"]
    if hasattr(own, _MARK):
        return True
    if owner.__module__.partition(".")[0] != "transformers" or not _calls_linear(own):
        return False
    setattr(owner, "forward", _asking(own))  # noqa: B010  # mypy knows no forward of a type
    return True


def _calls_linear(forward: Any) -> bool:
    """Whether the code of a forward has `F.linear`, or `torch.nn.functional.linear`.

    Not of one that another function stands before, as before those of experts.
    """
    if not isinstance(forward, FunctionType) or "linear" not in forward.__code__.co_names:
        return False
    names = [each.argval for each in dis.get_instructions(forward) if each.argval is not None]
    return any(
        name == "linear"
        and (before == "functional" or (before == "F" and forward.__globals__.get("F") is F))
        for before, name in pairwise(names)
    )


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the caller's own graph, which no engine runs
            return own(self, *args, **kwargs)
        layers = running_layers()
        if layers is None or vars(self).get(_COPY_OF, id(self)) not in layers.callers:
            return own(self, *args, **kwargs)
        products = _Products(layers)
        try:
            with products:
                return own(self, *args, **kwargs)
        finally:
            products.layers = None  # an interrupt may have left it on the stack

    setattr(forward, _MARK, True)
    return forward


class _Products(TorchFunctionMode):
    """Has `torch.nn.functional.linear` computed by these layers; None: by torch."""

    def __init__(self, layers: LinearLayers) -> None:
        super().__init__()
        self.layers: LinearLayers | None = layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        layers, kwargs = self.layers, kwargs or {}
        if (
            func is F.linear
            and layers is not None
            and not torch.is_autocast_enabled(layers.device_type)
        ):
            made = _product(layers, *args, **kwargs)
            if made is not None:
                return made
        return func(*args, **kwargs)


def _product(
    layers: LinearLayers,
    input: torch.Tensor,  # noqa: A002  # as torch names it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    return layers.product(input, weight, bias)
