"""Signals that stop a conversation only where stopping is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While entered, SIGINT, SIGTERM and SIGHUP raise within `heard` alone.

    One that comes elsewhere waits for the next `heard`. SIGINT raises KeyboardInterrupt; a closed
    terminal (SIGHUP) ends the process as SIGTERM does.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._heard = False

    def __enter__(self) -> Signals:
        for number in _NUMBERS:
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_DFL:
                before = signal.getsignal(signal.SIGTERM)
            if callable(before):  # else it is ignored, or kills
                self._before[number] = before
        self._installed = {number: signal.signal(number, self._come) for number in self._before}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._installed.items():
            signal.signal(number, before)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within, a signal raises: one that has waited at once, and no more than one."""
        self._heard = True
        try:
            if self._waiting:
                self._raise(self._waiting.pop(0), None)
            yield
        finally:
            self._heard = False

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            self._raise(number, frame)
        else:
            self._waiting.append(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._heard = False  # what handles it is not stopped by another one
        self._before[number](number, frame)
