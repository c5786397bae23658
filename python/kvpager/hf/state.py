"""The state of recurrent layers: a value that a forward starts from, and the one it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvpager.errors import NonFiniteError


@dataclass(frozen=True)
class RecurrentState:
    """The state of recurrent layers after the first `position` tokens. Immutable.

    Attributes:
        position: tokens behind it.
        tensors: of all layers, in the order of `StateShape.slots`; none at position 0.
        hidden: [hidden_size], the decoder's output for the last token; none at position 0.
    """

    position: int
    tensors: tuple[torch.Tensor, ...] = ()
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors, self.hidden))

    def to(self, device: torch.device | str) -> RecurrentState:
        """The same on a device; itself if it is there already."""
        return RecurrentState(
            self.position,
            tuple(tensor.to(device) for tensor in self.tensors),
            self.hidden.to(device),
        )


EMPTY = RecurrentState(0)


@dataclass(frozen=True)
class Slot:
    """One tensor of a state: which cache layer it is of, its name there, its shape and dtype."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class StateShape:
    """What one state is made of, as a forward left it.

    Attributes:
        slots: its tensors, layer by layer.
        hidden: of the decoder's output, the last slot of what is saved.
    """

    slots: tuple[Slot, ...]
    hidden: Slot

    @property
    def nbytes(self) -> int:
        """Bytes of a state."""
        return sum(slot.nbytes for slot in (*self.slots, self.hidden))

    def to_json(self) -> list[list[Any]]:
        """[layer, name, shape, dtype] of each tensor, `hidden` last."""
        return [
            [slot.layer, slot.name, list(slot.shape), str(slot.dtype).removeprefix("torch.")]
            for slot in (*self.slots, self.hidden)
        ]


def require_finite(state: RecurrentState, shape: StateShape) -> None:
    """Raises NonFiniteError, naming the layer, if a state has a NaN or an infinity."""
    checks = [torch.isfinite(tensor).all() for tensor in (*state.tensors, state.hidden)]
    sound = torch.stack(checks)
    if not bool(sound.all()):
        slot = (*shape.slots, shape.hidden)[int(torch.nonzero(~sound)[0])]
        where = "the hidden states" if slot.layer < 0 else f"layer {slot.layer} ({slot.name})"
        raise NonFiniteError(
            f"the state of {where} after position {state.position - 1} has a NaN or an infinity; "
            "nothing was committed: look at the model's weights and dtype"
        )
