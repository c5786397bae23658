"""Marks hooks that change nothing, which an open engine accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvpager.errors import InvalidArgumentError

_MARK = "_kvpager_only_looks"
# Whose hooks collect and nothing else. transformers leaves its own on every layer of a model that
# was once asked for hidden states.
_COLLECTORS = ("transformers.utils.output_capturing",)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def only_looks(hook: _Hook) -> _Hook:
    """Marks a hook, or a mode of torch, as one that changes no computation, and returns it.

    A function or an object that a model's modules hold may be marked too, if what it keeps between
    calls changes no result: it may then change under an open engine.

    If a hook is added while an engine is open, it may change what the model computes, so the engine
    refuses to go on. Mark a hook that only collects activations or counts calls, and the engine
    accepts it. The engine does not check this. Of a method, that of all objects is marked. Forwards
    run with modes of torch, such as those that count operations, only if these are marked, too.

    Example:
        >>> handle = module.register_forward_hook(kvpager.hf.only_looks(collect))

    Raises:
        InvalidArgumentError: the hook takes no attribute, as a builtin does not.
    """
    try:
        setattr(getattr(hook, "__func__", hook), _MARK, True)
    except AttributeError:
        raise InvalidArgumentError(
            f"hook is {hook!r}, which takes no attribute to mark it by; expected a function, a "
            "method, or an object that does"
        ) from None
    return hook


def changes_nothing(hook: Any) -> bool:
    """Whether a hook is marked by `only_looks`, is kvpager's own, or collects for transformers."""
    module = getattr(hook, "__module__", None) or ""
    return (
        getattr(hook, _MARK, False)
        or module.partition(".")[0] == "kvpager"
        or collects_for_transformers(hook)
    )


def collects_for_transformers(hook: Any) -> bool:
    """Whether a hook is transformers' own, for outputs that no forward of an engine asks for."""
    return getattr(hook, "__module__", None) in _COLLECTORS
