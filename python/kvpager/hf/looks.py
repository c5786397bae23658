"""Hooks that only look, which an open engine lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_MARK = "_kvpager_only_looks"

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def only_looks(hook: _Hook) -> _Hook:
    """Says that a module hook changes nothing that a forward computes, and returns it.

    A hook that is added while an engine is open may change what the model computes, so that the
    engine refuses to go on. One that only looks, to collect activations or to count calls, is let
    pass by this word for it; nobody checks it.

    Example:
        >>> handle = module.register_forward_hook(kvpager.only_looks(collect))
    """
    setattr(hook, _MARK, True)
    return hook


def changes_nothing(hook: Any) -> bool:
    """Whether a hook is known to change nothing: by its owner's word, or because it is our own."""
    module = getattr(hook, "__module__", None) or ""
    return getattr(hook, _MARK, False) or module.partition(".")[0] == "kvpager"
