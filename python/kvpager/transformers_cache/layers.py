"""The layers of a cache pass K/V through; the pager's forward computes the model's attention."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils

from kvpager._model.seam.attention import RowAttention, WholeCalls, mask_window
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.transformers_cache.call import CacheCall
    from kvpager.transformers_cache.host import Host
    from kvpager.transformers_cache.rows import Texts

_kinds: Any = cache_utils  # as a release has them; types of another one do not matter


class PagedLayer(_kinds.CacheLayerMixin):  # type: ignore[misc]
    """A layer whose K/V are in a pager. `update` returns the new ones alone.

    Attention is answered by the pager's forward, which has the earlier ones.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, host: Host, texts: Texts, *, is_sliding: bool) -> None:
        """`texts`: of the cache, which it does not refer to."""
        super().__init__()
        self._host = host
        self._texts = texts
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys and values."""
        self._host.require_running(self._texts)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, from the first one on."""
        return self._host.columns(self._texts) + query_length, 0

    def get_seq_length(self) -> int:
        """Columns of the cache, padding included."""
        return self._host.columns(self._texts)

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases

    def offload(self) -> None:
        """Nothing: the pager decides where chunks are."""

    prefetch = offload


class CacheAttention(WholeCalls):
    """Attention of [batch, columns] rows over a pager's chunks.

    It outlives its call where an interrupt left it as the running one; then it concerns nobody.
    """

    def __init__(self, call: CacheCall, outer: RowAttention | WholeCalls | None) -> None:
        """`outer`: what was running before it."""
        self.call = weakref.ref(call)
        self.outer = outer

    def concerns(self, config: Any) -> bool:
        """Whether a forward runs, of the model with this configuration."""
        call = self.call()
        if call is None or call.forward is None:
            return False
        return config is None or id(config) in call.configs

    def mask(self, *args: Any, **kwargs: Any) -> None:
        """None is needed: the pager's forward knows each row's text and position."""

    def called(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Maps [batch, heads, columns, dim] tensors to [batch, columns, q_heads, v_dim]."""
        call = self.call()
        forward = None if call is None else call.forward
        if forward is None:
            raise InvalidArgumentError(
                f"{type(module).__name__} attends in a call that has ended; call the model again"
            )
        scaling = options.get("scaling")
        window = options.get("sliding_window")
        sinks = options.get("s_aux")
        out: torch.Tensor = forward.attend(
            module.layer_idx,  # type: ignore[arg-type]  # an int, by transformers' convention
            _rows(query),
            _rows(key),
            _rows(value),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=mask_window(module) if window is None else window,
            softcap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach(),
        )
        out = out.view(query.shape[0], query.shape[2], *out.shape[1:])
        if torch.is_grad_enabled() and query.requires_grad:
            out = _NoGradient.apply(query, out)  # type: ignore[no-untyped-call]
        return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Merges batch and columns: [batch * columns, heads, dim]; a view if batch is 1."""
    x = x.detach()
    if x.shape[0] == 1:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


class _NoGradient(torch.autograd.Function):
    """Hands `out` through; a gradient that arrives at it is an error rather than 0."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InvalidArgumentError(
            "backward: attention over a kvpager cache has no gradient; run the model with "
            "another cache, or with use_cache=False"
        )
