"""The state of recurrent layers: a value that a forward starts from, and the one it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import cache_utils

from kvpager._model.seam.attention import RowAttention, require_first
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
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors, self.hidden))

    def to(self, device: torch.device | str) -> RecurrentState:
        """Copies it to a device; returns itself if it is there already."""
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
    """Shapes of the tensors of a state, as a forward left it.

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


_kinds: Any = cache_utils  # as a release has them; types of another one do not matter


@dataclass
class Place:
    """Where a forward is: behind how many tokens, and in which layer it has last attended."""

    position: int
    layer: int = -1


class _NothingKept:
    """A cache layer of attention that hands keys and values through, and notes its index."""

    place: Place
    index: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.place.layer = self.index
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.position + query_length, 0

    def get_seq_length(self) -> int:
        return self.place.position

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases


class AttentionLayer(_NothingKept, _kinds.CacheLayerMixin):  # type: ignore[misc]
    """A layer of attention, of which nothing is kept here."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""


class AttentionAndStateLayer(
    _NothingKept,
    _kinds.LinearAttentionLayer,  # type: ignore[misc]
    _kinds.CacheLayerMixin,  # type: ignore[misc]
):
    """A layer that has both."""


class DirectedAttention:
    """Attention that gets its layer from the cache, because modules shared by layers lack it."""

    def __init__(self, forward: RowAttention, place: Place, layers: Mapping[int, int]) -> None:
        self._forward = forward
        self._place = place
        self._layers = layers
        self._attended: set[int] = set()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        """As RowAttention; ignores `layer`."""
        at = self._place.layer
        require_first(at, self._attended)
        return self._forward.attend(self._layers.get(at, at), q, k, v, **call)

    def note_call(self, arguments: dict[str, Any]) -> None:
        """Passes a call's arguments on to a forward that notes them."""
        if (note_call := getattr(self._forward, "note_call", None)) is not None:
            note_call(arguments)
