"""Layers of a transformers cache that keep states, but neither keys nor values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils

from kvpager.hf.attention import RowAttention, require_first

_kinds: Any = cache_utils  # as a release has them; types of another one do not matter


@dataclass
class Place:
    """Where a forward is: behind how many tokens, and in which layer it has last attended."""

    position: int
    layer: int = -1


class _NothingKept:
    """Of a cache layer of attention: hands keys and values through, and notes that it did."""

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
