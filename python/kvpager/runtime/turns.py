"""Forwards of one engine take turns, until the engine is closed."""

from __future__ import annotations

import threading
from types import TracebackType

from kvpager.errors import InvalidArgumentError


class Turns:
    """A lock that knows who holds it, and that nobody gets any more once it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._ended = False

    @property
    def held_here(self) -> bool:
        """Whether this thread is inside a forward."""
        return self._holder == threading.get_ident()

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def end(self) -> None:
        """Waits for the forward that runs; later ones are refused. Twice is harmless.

        REQUIRES: this thread runs none.
        """
        with self._lock:
            self._ended = True

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._ended:
            self._lock.release()
            raise InvalidArgumentError("the engine is closed; make a new Engine(model, ...)")
        self._holder = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._holder = None
        self._lock.release()
