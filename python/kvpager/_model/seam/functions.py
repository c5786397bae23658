"""Functions that modules call in an engine's forwards, and that kvpager computes.

Routers of mixtures of experts multiply by `torch.nn.functional.linear`, with a parameter of theirs
and often in float32; routers and gates take a sigmoid of few numbers for a row. The forward of such
a class asks, as that of torch.nn.Linear does (linear.py): while an engine runs its model, and only
in its thread (context), these functions are kvpager's within it.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as transformers calls it
from torch.overrides import TorchFunctionMode

from kvpager._model.seam.linear import Callers, LinearLayers, running_layers

_OWN = "_asks_kvpager"  # of a forward that asks: the class's own
_COPY_OF = "_kvpager_copy_of"
_SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid)


def exchange_callers(model: torch.nn.Module) -> Callers:
    """The modules of a model that call such a function; their classes ask here now.

    Those are classes of transformers, but for kinds of torch.nn.Linear.
    """
    asking = {kind: called for kind in set(map(type, model.modules())) if (called := _asks(kind))}
    ids = frozenset(id(module) for module in model.modules() if type(module) in asking)
    return Callers(ids, multiply=any("linear" in called for called in asking.values()))


def stand_in(copy: torch.nn.Module, module: torch.nn.Module) -> None:
    """Has a copy of a module computed as the module is."""
    vars(copy)[_COPY_OF] = id(module)


def _asks(kind: type[Any]) -> set[str]:
    """Which of the functions a class calls; its forward asks then."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    if issubclass(kind, torch.nn.Linear) or owner.__module__.partition(".")[0] != "transformers":
        return set()
    forward = vars(owner)["forward"]
    own = getattr(forward, _OWN, forward)
    if not isinstance(own, FunctionType) or hasattr(own, "__wrapped__"):
        return set()  # another function stands before it, as before those of experts
    called = {"linear"} if _calls_linear(own) else set()
    if any(map(_names_sigmoid, [own, *_methods(kind)])):
        called.add("sigmoid")
    if called and forward is own:
        setattr(owner, "forward", _asking(own))  # noqa: B010  # mypy knows no forward of a type
    return called


def _methods(kind: type[Any]) -> Iterator[Any]:
    """Members of a class and of its bases that belong to one of transformers' models."""
    for each in kind.__mro__:
        if each.__module__.startswith("transformers.models."):
            yield from vars(each).values()


def _names_sigmoid(method: Any) -> bool:
    method = inspect.unwrap(method) if isinstance(method, FunctionType) else None
    return method is not None and "sigmoid" in method.__code__.co_names


def _calls_linear(forward: FunctionType) -> bool:
    """Whether the code of a forward has `F.linear`, or `torch.nn.functional.linear`."""
    if "linear" not in forward.__code__.co_names:
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
        if layers is None or vars(self).get(_COPY_OF, id(self)) not in layers.callers.modules:
            return own(self, *args, **kwargs)
        functions = _Functions(layers)
        try:
            with functions:
                return own(self, *args, **kwargs)
        finally:
            functions.layers = None  # an interrupt may have left it on the stack

    setattr(forward, _OWN, own)
    return forward


class _Functions(TorchFunctionMode):
    """Has the functions computed by these layers; None: by torch."""

    def __init__(self, layers: LinearLayers) -> None:
        super().__init__()
        self.layers: LinearLayers | None = layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        layers, kwargs = self.layers, kwargs or {}
        made = None
        if layers is not None and not torch.is_autocast_enabled(layers.device_type):
            if func is F.linear:
                made = _product(layers, *args, **kwargs)
            elif func in _SIGMOIDS and len(args) == 1 and not kwargs:
                made = layers.sigmoid(*args)
        return func(*args, **kwargs) if made is None else made


def _product(
    layers: LinearLayers,
    input: torch.Tensor,  # noqa: A002  # as torch names it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    return layers.product(input, weight, bias)
