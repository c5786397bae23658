"""Hooks on a live model that only record calls of the thread that added them.

Other threads may run the same modules meanwhile; the hooks ignore their calls. A `with` block
removes its hooks at its end, even after an interrupt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from typing import Any, TypeAlias

import torch

# (module, args, kwargs) before a call; (module, args, output) after it.
Note: TypeAlias = Callable[[torch.nn.Module, Any, Any], None]

_watching: ContextVar[object] = ContextVar("kvpager_watching", default=None)
# Where torch keeps a module's hooks and what it knows of them, by a number of each hook.
_PLACES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks of its own, of a forward or a backward pass."""
    return any(getattr(module, name, None) for name in (*_PLACES, *_OF_BACKWARD))


class OwnHook:
    """A hook of kvpager for one forward; comparisons of a model's hooks ignore it."""

    def __init__(self, watch: object, note: Note) -> None:
        self._watch = watch
        self._note = note

    def __call__(self, module: torch.nn.Module, args: Any, rest: Any = None) -> None:
        """`rest` is missing where a thread was about to call the hook as it was removed."""
        if _watching.get() is self._watch:
            self._note(module, args, rest)


class Watch:
    """While entered, notes calls of modules in this thread (context).

    before: called with the arguments of each call of `modules`. after: called with each output of
    `whole`. ended: called with each output of `modules`.
    """

    def __init__(
        self,
        whole: torch.nn.Module,
        after: Note,
        modules: Iterable[torch.nn.Module] = (),
        before: Note | None = None,
        ended: Note | None = None,
    ) -> None:
        self._whole = whole
        self._modules = list(modules)
        mark = object()  # hooks are kept by modules, and must not keep this alive
        self._mark = mark
        self._after = OwnHook(mark, after)
        self._before = None if before is None else OwnHook(mark, before)
        self._token: Token[object] | None = None
        self._ended = None if ended is None else OwnHook(mark, ended)
        hooks = [hook for hook in (self._after, self._before, self._ended) if hook is not None]
        # An interruption may strike in the middle of entering or of leaving.
        self._removal = weakref.finalize(self, remove_hooks, [whole, *self._modules], hooks)
        self._removal.atexit = False

    def __enter__(self) -> Watch:
        try:
            self._token = _watching.set(self._mark)
            self._whole.register_forward_hook(self._after)
            for module in self._modules:
                if self._before is not None:
                    module.register_forward_pre_hook(self._before, with_kwargs=True)
                if self._ended is not None:
                    module.register_forward_hook(self._ended)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._token is not None:
            _watching.reset(self._token)
            self._token = None
        self._removal()


def remove_hooks(modules: Iterable[torch.nn.Module], hooks: Iterable[Any]) -> None:
    """Takes forward hooks off, wherever registering them had come."""
    for module in modules:
        places: list[dict[int, Any]] = [getattr(module, place) for place in _PLACES]
        for number in [n for place in places for n, hook in list(place.items()) if hook in hooks]:
            for place in places:
                place.pop(number, None)
