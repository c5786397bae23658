"""Whether a model is still the one that an engine was made for."""

from __future__ import annotations

import operator
from typing import Any

import torch

from kvpager.errors import ModelChangedError
from kvpager.held import held_by, hold_too
from kvpager.hf.contents import Contents
from kvpager.hf.reach import Reach
from kvpager.hf.structure import Structure, kind_of

_VERSION = operator.attrgetter("_version")  # bumped by every change in place that torch sees
_ADDRESS = torch.Tensor.data_ptr
_STRIDES = torch.Tensor.stride


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
        self._each = [0 if one.is_inference() else one._version for one in self._tensors]  # noqa: SLF001
        self._addresses = list(map(_ADDRESS, self._tensors))
        self._strides = list(map(_STRIDES, self._tensors))
        self._kinds = [kind_of(one) for one in self._tensors]
        self._contents = Contents(model, named)

    @property
    def reach(self) -> Reach:
        """What the model's code reads."""
        return self._structure.reach

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

    def check(self, *, thorough: bool = False) -> None:
        """Raises ModelChangedError, saying what changed.

        thorough: reads more of the weights again; before something is taken or kept that has been
        computed before.
        """
        what = self._objects_changed()
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

    def _objects_changed(self) -> str | None:
        what = self._structure.changed()
        if what is not None:
            return what
        # A library's own kind of tensor may have a say in functions of it; these ask torch alone.
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no public name
            return self._tensors_changed()

    def _tensors_changed(self) -> str | None:
        if list(map(_ADDRESS, self._tensors)) != self._addresses:
            return self._moved()
        if sum(map(_VERSION, self._counted)) != self._versions:
            for name, tensor, before in zip(self._names, self._tensors, self._each):
                if not tensor.is_inference() and tensor._version != before:  # noqa: SLF001
                    return f"{name} was changed in place"
        if list(map(_STRIDES, self._tensors)) != self._strides:
            return self._reshaped()
        return None

    def _moved(self) -> str:
        for name, tensor, address, before in zip(
            self._names, self._tensors, self._addresses, self._kinds
        ):
            if tensor.data_ptr() != address:
                if kind_of(tensor) != before:
                    return f"{name} is {kind_of(tensor)}, and was {before}"
                return f"{name} lies elsewhere in memory: its data were replaced"
        raise AssertionError("unreachable: an address differs")

    def _reshaped(self) -> str:
        for name, tensor, before in zip(self._names, self._tensors, self._strides):
            if tensor.stride() != before:
                return f"{name} has strides {tensor.stride()}, and had {before}"
        raise AssertionError("unreachable: strides differ")
