"""Modes of torch, which may compute something else in the place of any operation of a thread."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvpager.errors import InvalidArgumentError
from kvpager.hf.looks import changes_nothing


def active_modes() -> list[Any]:
    """Those that this thread has entered, but for torch's own of a default device.

    And kvpager's own, which an interrupt may have left there, and which do nothing then.
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
                "`with` block, or mark it by kvpager.hf.only_looks if it changes nothing"
            )
