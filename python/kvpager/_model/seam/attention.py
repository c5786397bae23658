"""The seam: the function that transformers calls instead of its own attention.

transformers passes it the module, queries, keys and values, but not the sequence of each row. The
running forward knows that; a context variable finds it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvpager import _core
from kvpager.errors import InvalidArgumentError, UnsupportedModelError

# Windows that attention modules have in their masks alone, and pass to no attention call. They are
# not written to the modules, so that copies of a model and saved ones know nothing of it.
_mask_windows: WeakKeyDictionary[torch.nn.Module, int | None] = WeakKeyDictionary()


def note_mask_window(module: torch.nn.Module, window: int | None) -> None:
    """Later calls of the module without a `sliding_window` are answered with this one.

    window: positions that a row sees, itself among them; None: all up to its own.
    """
    _mask_windows[module] = window


def mask_window(module: torch.nn.Module) -> int | None:
    """The window that was noted of a module; None also where nothing was."""
    return _mask_windows.get(module)


def mask_windows(model: torch.nn.Module) -> dict[str, int | None]:
    """The windows that were noted, by the names of the modules in a model."""
    return {
        name: _mask_windows[module]
        for name, module in model.named_modules()
        if module in _mask_windows
    }


NAME = "kvpager"

# Keyword arguments without influence on the keys a row attends to.
_HARMLESS = frozenset(
    {"attention_mask", "cache", "cache_position", "is_causal", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings"}
    | {"position_ids", "return_dict", "use_cache"}
)


class RowAttention(Protocol):
    """Computes attention for the rows of a forward: a `kvpager.pager.Forward`, or a probe."""

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
        """Maps q [M, Hq, Dk], k [M, Hkv, Dk] and v [M, Hkv, Dv] to [M, Hq, Dv] in q's dtype."""


class WholeCalls:
    """Answers attention calls as they are: any batch, the mask and every keyword.

    A probe does, with masks that the model builds (own_attention.py), and a transformers cache.
    """

    def concerns(self, config: Any) -> bool:
        """Whether attention of modules with this configuration is answered here."""
        return True

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """A mask, as transformers asks an implementation of attention for one."""
        raise NotImplementedError

    def called(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Maps [batch, heads, n, dim] tensors and all keywords to [batch, n, q_heads, v_dim]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Owner:
    """The model whose forward runs: a hook may run another one within it, which attends as it does.

    Attributes:
        modules: ids of its modules.
        configs: ids of their configurations.
    """

    modules: frozenset[int]
    configs: frozenset[int]


class _Owned:
    """A forward of one model alone, of which each layer attends once.

    directed: the forward is told its layers by a cache (state.py), where it sees them too;
    modules that layers share have no layer of their own.
    """

    def __init__(self, owner: Owner, *, directed: bool) -> None:
        self.configs = owner.configs
        self._directed = directed
        self._modules = owner.modules
        self._attended: set[Any] = set()

    def attends(self, module: torch.nn.Module) -> None:
        """Raises InvalidArgumentError if a module cannot attend, or not again."""
        if id(module) not in self._modules:
            raise InvalidArgumentError(
                f"{_name(module)} is of another model that is run within a forward of an engine, "
                "and shares the configuration of the engine's; give it one of its own, "
                "copy.deepcopy(model.config)"
            )
        if not self._directed:
            require_first(module.layer_idx, self._attended)


def require_first(layer: Any, attended: set[Any]) -> None:
    """Notes that a layer attends; raises InvalidArgumentError if it has in this forward."""
    if layer in attended:
        raise InvalidArgumentError(
            f"layer {layer} attends twice in one forward of an engine: the model was called within "
            "it, from a hook or a signal handler; call it outside"
        )
    attended.add(layer)


_running: ContextVar[RowAttention | WholeCalls | None] = ContextVar("kvpager_forward", default=None)
_owned: ContextVar[_Owned | None] = ContextVar("kvpager_owned", default=None)


def running(forward: RowAttention | WholeCalls) -> _core.ContextValue:
    """Makes `forward` the one that attention calls in this context belong to, within a `with`."""
    return _core.ContextValue(_running, forward)


def owned_by(owner: Owner, *, directed: bool = False) -> _core.ContextValue:
    """Has forwards in this context concern one model alone, within a `with`.

    directed: they get their layers from a cache.
    """
    return _core.ContextValue(_owned, _Owned(owner, directed=directed))


def current() -> RowAttention | WholeCalls | None:
    """The forward that attention calls in this context belong to."""
    return _running.get()


def replace(forward: RowAttention | WholeCalls | None) -> None:
    """Sets the current forward without a context manager; the caller restores it."""
    _running.set(forward)


def is_running(config: Any = None) -> bool:
    """Whether attention calls in this context belong to a forward of an engine, or to a probe.

    config: of the modules that ask; None: of any.
    """
    forward = _running.get()
    if isinstance(forward, WholeCalls):
        return forward.concerns(config)
    owned = _owned.get()
    return forward is not None and (owned is None or config is None or id(config) in owned.configs)


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
    cap and sinks come from this call, never from the configuration (some configurations name a soft
    cap that their model does not apply); a window that only the mask has was found when the engine
    started (own_attention.py).

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
    whole = isinstance(forward, WholeCalls)
    owned = _owned.get()
    if owned is not None and not whole:
        owned.attends(module)
    _check_call(module, query, dropout, kwargs, whole=whole)
    if isinstance(forward, WholeCalls):
        options: dict[str, Any] = {
            "scaling": scaling,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "s_aux": s_aux,
        }
        given = {name: option for name, option in options.items() if option is not None}
        return forward.called(module, query, key, value, attention_mask, {**given, **kwargs}), None
    if sliding_window is None:
        sliding_window = mask_window(module)
    if (note_call := getattr(forward, "note_call", None)) is not None:
        note_call(
            {
                **kwargs,
                "scaling": scaling,
                "sliding_window": sliding_window,
                "softcap": softcap,
                "s_aux": s_aux,
                "attention_mask": attention_mask,
                "is_causal of the module": getattr(module, "is_causal", None),
            }
        )
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
    module: torch.nn.Module,
    query: torch.Tensor,
    dropout: float,
    kwargs: dict[str, Any],
    *,
    whole: bool,
) -> None:
    if query.shape[0] != 1 and not whole:
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


def _no_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask over the positions of one batch entry exists where it packs many sequences."""
    forward = _running.get()
    return forward.mask(*args, **kwargs) if isinstance(forward, WholeCalls) else None


def register() -> None:
    """Registers attention and mask together; one without the other gives silently wrong results."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
