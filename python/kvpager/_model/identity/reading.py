"""Refuses code that reads numbers of tensors, or chance: it may do something else next time.

A branch on a token, a length that numbers decide, a random choice: what such code computes for a
text depends on more than a row's tokens, or differs from run to run, and no trial at the start can
meet every case. Recordings of forwards (_runtime/execution/recordings.py) refuse the same. Code of
torch, transformers and their like is let pass, for it is known by its release.
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from kvpager._model.watch.looks import changes_nothing, hooks_of
from kvpager._model.watch.reach import KNOWN, state_of
from kvpager._support.process import without_collections
from kvpager.errors import UnsupportedModelError

# Methods that read numbers of a tensor without an operation of torch.
READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__dlpack__,
}
_MORE_READS = {
    *(torch.Tensor.storage, torch.Tensor._typed_storage, torch.Tensor.apply_, torch.Tensor.map_),  # noqa: SLF001
    *(torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__reduce_ex__),
    *(torch.Tensor.__deepcopy__, torch.Tensor.__contains__),
}
_READ = "reads a number of a tensor"
_UNFIT = {
    torch.Tag.data_dependent_output: _READ,
    torch.Tag.nondeterministic_seeded: "draws random numbers",
}
# What other code calls in the name of its caller.
_BETWEEN = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy"}
_ENTROPY = frozenset({"urandom", "getrandom"})
_TRIES = 3  # of a forward that leaves a shared generator otherwise, which other threads may do


@cache
def unfit(operation: Any) -> str:
    """Why an operation of torch may be otherwise next time; empty: it is not."""
    return next((_UNFIT[tag] for tag in operation.tags if tag in _UNFIT), "")


def has_shape_by_numbers(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the shape of what an operation makes depends on numbers of a tensor."""
    if torch.Tag.dynamic_output_shape not in operation.tags:
        return False
    if operation is not torch.ops.aten.index.Tensor:
        return True
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@cache
def is_made_of_others(operation: Any) -> bool:
    """Whether an operation is made of others that run instead of it."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  # no public name
    return bool(operation.has_kernel_for_dispatch_key(implicit))


def require_no_reading(model: torch.nn.Module, run: Callable[[], object]) -> None:
    """Runs a function that calls a model, whose code may read no numbers and no chance.

    Raises:
        UnsupportedModelError: code of no library does. Names the function and its line.
    """
    reading = _Reading(type(model).__name__, frozenset(_marked(model)))
    for _ in range(_TRIES):
        before = _shared_states()
        with reading.watched():
            run()
        now = _shared_states()
        changed = [name for name in now if now[name] != before.get(name)]
        if not changed:
            return
    raise UnsupportedModelError(
        f"{type(model).__name__}: a forward draws random numbers from {changed[0]}, so that no "
        "two of them need be alike; compute without chance, as after model.eval()"
    )


class _Reading:
    """Refuses what foreign code does in a forward of this thread."""

    def __init__(self, name: str, marked: frozenset[CodeType]) -> None:
        """marked: code that changes nothing by its owner's word."""
        self._name = name
        self._marked = marked
        self._refused: list[UnsupportedModelError] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, calls of torch, of the clock and of the system's chance are looked at."""
        with without_collections():  # also while the profile is set and put back
            before = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                with _Functions(self), _Operations(self):
                    yield
            except Exception:
                if not self._refused:
                    raise
            finally:
                sys.setprofile(before)
        if self._refused:  # which other code may have caught, or made another error of
            raise self._refused[0]

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and (what := _of_the_world(called)):
            self._note(what, frame)

    def refuse(self, what: str) -> None:
        """Raises UnsupportedModelError if code of no library does this."""
        self._note(what, sys._getframe(1))  # noqa: SLF001  # as inspect does
        if self._refused:
            raise self._refused[0]

    def _note(self, what: str, frame: FrameType) -> None:
        culprit = _culprit(frame)
        if culprit is None or self._is_marked(frame):
            return
        code = culprit.f_code
        self._refused.append(
            UnsupportedModelError(
                f"{self._name}: {getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}, "
                f"line {culprit.f_lineno}) {what}, so that what it computes may differ where "
                "nothing at the start has tried; compute with tensors alone, as torch.where does, "
                "or if nothing that is computed depends on it, mark the hook by "
                "kvpager.only_looks"
            )
        )

    def _is_marked(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._marked:
                return True
            frame = frame.f_back
        return False


def _culprit(frame: FrameType | None) -> FrameType | None:
    """The code that acts: the innermost that is not torch's or Python's; None: a library's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN and frame.f_globals is not globals():
            return None if package in KNOWN else frame
        frame = frame.f_back
    return None


def _of_the_world(called: Any) -> str:
    """Names what a builtin function reads beyond its arguments: chance, the clock, a file."""
    name, home = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in _ENTROPY and getattr(os, name, None) is called:
        return f"draws random numbers ({name})"
    if home is time and name != "sleep":
        return f"reads the clock ({name})"
    if isinstance(home, type) and home.__module__ == "datetime" and name in ("now", "today"):
        return f"reads the clock ({name})"
    if called is io.open or called is os.open:
        return "opens a file"
    return _READ if name.startswith("_to_dlpack") else ""


class _Functions(TorchFunctionMode):
    """Looks at the functions of torch that read without an operation."""

    def __init__(self, reading: _Reading) -> None:
        super().__init__()
        self._reading = reading

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READS or func in _MORE_READS:
            self._reading.refuse(f"{_READ} ({resolve_name(func)})")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation."""

    def __init__(self, reading: _Reading) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reading = reading

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (why := unfit(func)) and not _is_without_chance(func, args, kwargs):
            self._reading.refuse(f"{why} ({func})")
        if has_shape_by_numbers(func, args, kwargs):
            self._reading.refuse(f"lets numbers of a tensor decide a shape ({func})")
        if is_made_of_others(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)


def _is_without_chance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may drop numbers out drops none."""
    for place, each in enumerate(func._schema.arguments):  # noqa: SLF001  # no public name
        if each.name in ("dropout_p", "p"):
            given = args[place] if place < len(args) else kwargs.get(each.name, each.default_value)
            return bool(given == 0)
    return False


def _shared_states() -> dict[str, Any]:
    """States of the generators of random numbers that every program shares."""
    states = {
        "random": random.getstate(),
        "numpy.random": state_of(np.random.mtrand._rand),  # noqa: SLF001  # no public name
        "torch's generator": state_of(torch.default_generator),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["the GPU's generator"] = bytes(torch.cuda.get_rng_state().numpy())
    return states


def _marked(model: torch.nn.Module) -> Iterator[CodeType]:
    """Code of hooks and functions of a model that change nothing by their owner's word."""
    for module in model.modules():
        for called in (*hooks_of(module), *vars(module).values()):
            if callable(called) and not isinstance(called, torch.nn.Module):
                code = _code_of(called)
                if code is not None and changes_nothing(called):
                    yield code


def _code_of(called: Any) -> CodeType | None:
    """Code that runs where a function, a method or an object is called; None: not of Python."""
    function = getattr(called, "__func__", called)
    if not hasattr(function, "__code__"):
        function = vars(type(called)).get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
