"""The layers of a cache as transformers sees them: they hand keys and values through."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import cache_utils

_kinds: Any = cache_utils  # as a release has them; types of another one do not matter


class Whole(Protocol):
    """The cache, as far as a layer asks."""

    def columns(self) -> int:
        """The number that transformers calls the length."""

    def require_running(self) -> None:
        """Raises InvalidArgumentError unless attention is answered by a forward with the cache."""


class PagedLayer(_kinds.CacheLayerMixin):  # type: ignore[misc]
    """A layer whose K/V are in a pager. `update` returns the new ones alone.

    Attention is answered by the pager's forward, which has the earlier ones.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Whole, *, is_sliding: bool) -> None:
        super().__init__()
        self._cache = cache
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys and values."""
        self._cache.require_running()
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, from the first one on."""
        return self._cache.columns() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns of the cache, padding included."""
        return self._cache.columns()

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases

    def offload(self) -> None:
        """Nothing: the pager decides where chunks are."""

    prefetch = offload
