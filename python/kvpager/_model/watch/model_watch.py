"""Whether a model is still the one that an engine was made for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from kvpager._model.watch.contents import Contents
from kvpager._model.watch.reach import Reach
from kvpager._model.watch.structure import Structure, kind_of
from kvpager._model.weights.held import held_by, hold_too
from kvpager.errors import ModelChangedError

_VERSION = operator.attrgetter("_version")  # bumped by every change in place that torch sees
_ADDRESS = torch.Tensor.data_ptr
_STRIDES = torch.Tensor.stride
_MODE = frozenset({"training"})


class ModelWatch:
    """Made when an engine is, of a model that is not running; asked at every forward.

    What is seen at the next call: another object in any place of the module tree (modules,
    parameters, buffers, hooks, adapters' settings, methods, configuration) or in what its code
    reads (attributes of objects, closures, defaults, globals; see reach.py), tensors with other
    memory, and changes in place that torch counts. Changes of bytes that nothing counts (through
    `.data`): those of a whole tensor at the next call; of a part of one, with the part's share of
    it as probability, and on the CPU after `contents.ROUND` calls for certain.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._dtype = model.dtype
        held = held_by(model)
        self._structure = Structure(model, held)
        hold_too(held, self._structure.reach.tensors)
        # A tensor that several weights are made of counts once.
        named = [*{id(one): (name, one) for name, one in held.tensors}.values()]
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._counted = [one for one in self._tensors if not one.is_inference()]
        self._versions = sum(map(_VERSION, self._counted))
        self._each = list(map(_version_of, self._tensors))
        self._addresses = list(map(_ADDRESS, self._tensors))
        self._strides = list(map(_STRIDES, self._tensors))
        self._kinds = [kind_of(one) for one in self._tensors]
        self._contents = Contents(model, named)

    @property
    def reach(self) -> Reach:
        """What the model's code reads."""
        return self._structure.reach

    def digests(self, tensor: torch.Tensor, seed: int) -> bytes | None:
        """Of the bytes that a tensor held when this was made; None: they are not known."""
        return self._contents.digests(tensor, seed)

    def learn(self) -> bool:
        """To be called after the first forward: takes the model as it has set itself up.

        Returns whether it has. What it changes in the next forward too is a change.
        """
        if not self._structure.has_settled():
            return False
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no public name
            what = self._tensors_changed() or self._contents.changed(thorough=True)
        if what is None:  # else the next check says so
            ModelWatch.__init__(self, self._model)
        return what is None

    def check(self, *, thorough: bool = False, training: bool = False) -> None:
        """Raises ModelChangedError, saying what changed.

        thorough: reads more of the weights again; before something is taken or kept that has been
        computed before.
        training: whether modules may be in another mode than they were.
        """
        what = self._objects_changed(_MODE if training else frozenset())
        if what is None:
            name = self._contents.changed(thorough=thorough)
            what = None if name is None else f"the values of {name} were changed"
        if what is not None and self._model.dtype != self._dtype:
            what = f"its dtype is {self._model.dtype}, but was {self._dtype}"
        if what is not None:
            raise ModelChangedError(
                f"the model's weights were changed since the engine was made, or what it computes "
                f"with them: {what}. What the engine holds is of the model as it was: call "
                "engine.weights_changed() to go on with the model as it is, or put it back",
                what=what,
            )

    def same_places(self) -> bool:
        """Whether nothing but the values of weights can have changed."""
        return (
            self._structure.changed() is None
            and list(map(_ADDRESS, self._tensors)) == self._addresses
            and list(map(_STRIDES, self._tensors)) == self._strides
            and list(map(kind_of, self._tensors)) == self._kinds
        )

    def _objects_changed(self, ignored: frozenset[str]) -> str | None:
        what = self._structure.changed(ignored)
        if what is not None:
            return what
        # A library's own kind of tensor may have a say in functions of it; these ask torch alone.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no public name
            return self._tensors_changed()

    def _tensors_changed(self) -> str | None:
        """What changed of a tensor; the first look is cheap enough for every forward."""
        if list(map(_ADDRESS, self._tensors)) != self._addresses:
            return self._different(self._addresses, _ADDRESS)
        if sum(map(_VERSION, self._counted)) != self._versions:
            return self._different(self._each, _version_of)
        if list(map(_STRIDES, self._tensors)) != self._strides:
            return self._different(self._strides, _STRIDES)
        return None

    def _different(self, before: list[Any], read: Callable[[torch.Tensor], Any]) -> str:
        """What changed of the first tensor of which something is no longer as it was."""
        at = next(i for i, one in enumerate(self._tensors) if read(one) != before[i])
        name, tensor = self._names[at], self._tensors[at]
        if (now := kind_of(tensor)) != self._kinds[at]:
            return f"{name} is {now}, and was {self._kinds[at]}"
        if read is _ADDRESS:
            return f"{name} lies elsewhere in memory: its data were replaced"
        if read is _STRIDES:
            return f"{name} has strides {tensor.stride()}, and had {before[at]}"
        return f"{name} was changed in place"


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
