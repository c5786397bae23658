"""Answers the attention calls of a model that was given a cache."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from kvpager.errors import InvalidArgumentError
from kvpager.hf.attention import RowAttention, WholeCalls
from kvpager.hf.mask_windows import mask_window


class Asked(Protocol):
    """Who has such calls answered: a call of the model.

    Attributes:
        configs: ids of the configurations of its model.
    """

    configs: frozenset[int]

    @property
    def forward(self) -> RowAttention | None:
        """The pager's, while the decoder runs."""

    def runs(self) -> bool:
        """Whether the call goes on."""

    def undo(self) -> None:
        """Makes everything as it was before the call."""


class CacheAttention(WholeCalls):
    """Attention of [batch, columns] rows over a pager's chunks.

    It outlives its call where an interrupt left it as the running one; then it concerns nobody.
    """

    def __init__(self, call: Asked, outer: RowAttention | WholeCalls | None) -> None:
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
        """Of [batch, heads, columns, dim] tensors: [batch, columns, q_heads, v_dim]."""
        call = self.call()
        forward = None if call is None else call.forward
        if forward is None:
            raise InvalidArgumentError(
                f"{type(module).__name__} attends in a call that has ended; call the model again"
            )
        scaling = options.get("scaling")
        window = options.get("sliding_window")
        sinks = options.get("s_aux")
        out = forward.attend(
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
    """Of [batch, heads, columns, dim]: [batch * columns, heads, dim], a view if batch is 1."""
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
