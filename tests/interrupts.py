"""Ctrl-C at every instant of an operation.

Python raises KeyboardInterrupt between two of its instructions. Whatever native code has just
returned may then be lost: these helpers raise at each return from C, and at each return of a
function of kvpager's, one after the other, each in a fresh run of the operation.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import kvpager
from kvpager.stores.names import INDEX_FILE

State = TypeVar("State")

# What runs in the frames of these files is ours, or is done for us between two calls of ours.
OURS = (str(Path(kvpager.__file__).parent), str(Path(__file__).parent.parent))
BETWEEN = {contextlib.__file__, threading.__file__, weakref.__file__}


def is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (file.startswith(OURS) and file != __file__) or (
        file in BETWEEN and frame.f_back is not None and is_ours(frame.f_back)
    )


def is_dropped_from(frame: FrameType) -> bool:
    """Whether what is raised in a frame is passed on to nobody: Python calls it for its own ends.

    That is so in finalizers and in callbacks of weak references, and in what these call.
    """
    if frame.f_code.co_name == "<module>":
        return True
    link: FrameType | None = frame
    while link is not None and link.f_code.co_filename != __file__:
        code = link.f_code
        called = code.co_name in ("remove", "__call__") and code.co_filename == weakref.__file__
        if called or code.co_name == "__del__":
            return True
        link = link.f_back
    return False


class Tried(NamedTuple):
    """How many instants an operation has, and at how many of them it was interrupted."""

    instants: int
    interrupted: int


class Interrupter:
    """Counts instants; raises KeyboardInterrupt at number `at` (None: never)."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen = 0
        self.where = "nowhere"
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("c_return", "return") or not is_ours(frame):
            return
        if is_dropped_from(frame):
            return
        if event == "return" and frame.f_code.co_name == "<genexpr>":
            return  # it may be one that any() needs no more, which passes nothing on
        number, self.seen = self.seen, self.seen + 1
        if number == self.at:
            name = getattr(argument, "__qualname__", argument) if event == "c_return" else ""
            self.raised = True
            del argument  # what a function has returned: nobody holds it but we
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.where = f"{event} {name} in {frame.f_code.co_name}, {place}"
            raise KeyboardInterrupt(self.where)

    def run(self, operation: Callable[[], object]) -> KeyboardInterrupt | None:
        """Runs the operation; returns the interrupt, with all its frames, or None."""
        gc.collect()
        gc.disable()  # its callbacks come at any time, and pass nothing on
        sys.setprofile(self)
        try:
            operation()
        except KeyboardInterrupt as interrupt:
            return interrupt
        finally:
            sys.setprofile(None)
            gc.enable()
        return None


def count_instants(operation: Callable[[], object]) -> int:
    """How many instants one run of the operation has."""
    counter = Interrupter()
    counter.run(operation)
    return counter.seen


def some(count: int, most: int | None, seed: int = 0) -> Iterable[int]:
    """All of `count` instants, or a sample of `most` of them: the first, the last and others."""
    if most is None or count <= most:
        return range(count)
    others = random.Random(seed).sample(range(1, count - 1), most - 2)
    return sorted({0, count - 1, *others})


def at_every_instant(
    prepare: Callable[[], State],
    operate: Callable[[State], object],
    check: Callable[[State, bool], object],
    finish: Callable[[State], object],
    *,
    most: int | None = None,
) -> Tried:
    """Interrupts an operation at each of its instants. AssertionError: at the first wrong one.

    Args:
        prepare: makes what is operated on, anew for each instant.
        operate: the operation.
        check: (state, interrupted); called while somebody still holds the interrupt and with it
            every frame it went through, as a notebook does.
        finish: called when nobody does any more: closes the state and looks for leaks.
        most: instants to try, a sample of all; None: all.
    """
    state = prepare()
    count = count_instants(lambda: operate(state))
    check(state, False)
    finish(state)
    gc.collect()
    gc.freeze()  # what is here already costs no time
    interrupted = 0
    lost = []
    for instant in some(count, most):
        state = prepare()
        interrupter = Interrupter(instant)
        interrupt = interrupter.run(partial(operate, state))
        if interrupter.raised and interrupt is None:
            lost.append(f"instant {instant} of {count}: {interrupter.where}")
        try:
            check(state, interrupt is not None)
            interrupted += interrupt is not None
            del interrupt
            gc.collect()  # frames of contextlib and the exceptions that pass them hold each other
            finish(state)
        except Exception as error:
            where = f"instant {instant} of {count}: {interrupter.where}"
            raise AssertionError(f"{where}: {error!r}") from error
    gc.unfreeze()
    assert not lost, "not passed on:\n" + "\n".join(lost)
    return Tried(count, interrupted)


def open_files() -> set[str]:
    """What this process has open: files and sockets by their names, not by their numbers.

    Without the index that a store keeps open as long as it lives.
    """
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return {name for name in found if not name.startswith("/proc/") and INDEX_FILE not in name}
