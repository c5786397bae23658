"""The process: which one made an object, and its garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvpager.errors import InvalidArgumentError


class MadeIn:
    """The process in which it was made. A forked child has neither its threads nor their locks."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child, forked since."""
        return os.getpid() != self._number

    def require(self, what: str) -> None:
        """Raises InvalidArgumentError in a forked child; `what` names the object."""
        if os.getpid() != self._number:
            raise InvalidArgumentError(
                f"{what} was made by process {self._number}, and this is process {os.getpid()}, "
                "forked from it, which has neither its threads nor a share in its files; make an "
                'Engine of its own after the fork, or start the process by "spawn" '
                "(multiprocessing)"
            )


@contextmanager
def without_collections() -> Iterator[None]:
    """Within, the garbage collector runs by itself nowhere in the process, nor do its callbacks.

    What watches the code that runs in a thread would take these for code of its caller.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
