"""Marks hooks and modes of torch that change nothing; an open engine refuses others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvpager.errors import InvalidArgumentError

_MARK = "_kvpager_only_looks"
# Whose hooks collect and nothing else. transformers leaves its own on every layer of a model that
# was once asked for hidden states.
_COLLECTORS = ("transformers.utils.output_capturing",)
# Ask for gradients of embeddings, so that a frozen model's checkpoints have some to compute.
_ASKING = frozenset({"make_inputs_require_grads", "make_inputs_require_grad"})
_TRAINERS = ("transformers.modeling_utils", "peft.peft_model", "peft.mixed_model")

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
        >>> handle = module.register_forward_hook(kvpager.only_looks(collect))

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
    """Whether a hook is marked by `only_looks`, is kvpager's own, or a library's that is known."""
    module = getattr(hook, "__module__", None) or ""
    return (
        getattr(hook, _MARK, False)
        or module.partition(".")[0] == "kvpager"
        or is_known_to_look(hook)
    )


def hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    """The functions and objects that a module's hooks call."""
    for name, value in [*vars(module).items()]:
        for hook in [*value.values()] if "hooks" in name and isinstance(value, dict) else ():
            yield called_by(hook)


def called_by(hook: Any) -> Any:
    """The function or object of a hook, which some modules keep in a pair with a reference."""
    return hook[1] if isinstance(hook, tuple) else hook


def is_known_to_look(hook: Any) -> bool:
    """Whether a hook is a library's own, for outputs or gradients that no forward asks for."""
    module = getattr(hook, "__module__", None)
    asks = module in _TRAINERS and getattr(hook, "__name__", None) in _ASKING
    return asks or module in _COLLECTORS


def active_modes() -> list[Any]:
    """The modes of torch that this thread has entered.

    Without torch's own for a default device, and kvpager's own: an interrupt may have left one
    there, which then does nothing.
    """
    counts = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack  # noqa: SLF001  # no public name
    if not any(count() for count in counts):
        return []
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*modes, *_get_current_dispatch_mode_stack()]
    return [mode for mode in modes if not isinstance(mode, DeviceContext) and not _is_own(mode)]


def _is_own(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] == "kvpager"


def refuse_modes() -> None:
    """Raises InvalidArgumentError for one that is not marked by `only_looks`."""
    for mode in active_modes():
        if not changes_nothing(mode):
            raise InvalidArgumentError(
                f"a mode of torch is active on this thread, {type(mode).__name__} of "
                f"{type(mode).__module__}, which may change what any operation computes; leave its "
                "`with` block, or mark it by kvpager.only_looks if it changes nothing"
            )
