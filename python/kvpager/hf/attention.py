"""The seam: what transformers calls instead of its own attention, for models nobody had to change.

transformers gives an attention function its module, queries, keys and values, but no word of which
sequence a row belongs to. The running forward knows; it is found through a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvpager.errors import InvalidArgumentError, UnsupportedModelError

NAME = "kvpager"

# Keyword arguments that say nothing about which keys a row sees.
_HARMLESS = frozenset(
    {"attention_mask", "cache_position", "is_causal", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "past_key_values", "position_embeddings", "position_ids"}
    | {"return_dict", "use_cache"}
)


class RowAttention(Protocol):
    """What answers for the rows of a forward: a `kvpager.pager.Forward`, or a probe."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of q [M, Hq, Dk], k [M, Hkv, Dk] and v [M, Hkv, Dv]: [M, Hq, Dv] in q's dtype."""


_running: ContextVar[RowAttention | None] = ContextVar("kvpager_forward", default=None)


@contextmanager
def running(forward: RowAttention) -> Iterator[None]:
    """Makes `forward` the one that attention calls in this context belong to."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def is_running() -> bool:
    """Whether attention calls in this context belong to a forward of an engine, or to a probe."""
    return _running.get() is not None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of M packed rows; a function as transformers registers it.

    Takes query [1, Hq, M, Dk], key [1, Hkv, M, Dk] and value [1, Hkv, M, Dv]; returns
    ([1, M, Hq, Dv], None).

    The mask is not read: the running forward knows every row's sequence and position. Window, soft
    cap and sinks are what this call says, never what the configuration says (some configurations
    name a soft cap that their model does not apply).

    Raises:
        InvalidArgumentError: no engine is running a forward.
        UnsupportedModelError: the call asks for an attention that is not a function of causal K/V
            alone.
    """
    forward = _running.get()
    if forward is None:
        raise InvalidArgumentError(
            f'the configuration of {_name(module)} names attention implementation "{NAME}", which '
            "works inside an engine's forward alone and needs no such name; call "
            'model.set_attn_implementation("sdpa")'
        )
    _check_call(module, query, dropout, kwargs)
    out = forward.attend(
        module.layer_idx,  # type: ignore[arg-type]  # an int, by transformers' convention
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _check_call(
    module: torch.nn.Module, query: torch.Tensor, dropout: float, kwargs: dict[str, Any]
) -> None:
    if query.shape[0] != 1:
        raise InvalidArgumentError(
            f"{_name(module)} was given a batch of {query.shape[0]}; "
            "a forward is one batch entry of M rows"
        )
    if dropout:
        raise UnsupportedModelError(
            f"{_name(module)} applies attention dropout {dropout}; call model.eval() first"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{_name(module)} attends to later tokens (is_causal=False), so that its K/V are no "
            "function of the tokens before; use a causal decoder"
        )
    unknown = sorted(key for key in kwargs.keys() - _HARMLESS if kwargs[key] is not None)
    if unknown:
        raise UnsupportedModelError(
            f"{_name(module)} passes {', '.join(unknown)} to its attention, which is not "
            "implemented here; use a model with plain, windowed, soft-capped or sink attention"
        )


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask over the positions of one batch entry exists where it packs many sequences."""


def register() -> None:
    """Registers attention and mask together; one without the other gives silently wrong results."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
