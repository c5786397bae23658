"""Seconds inside modules of a model that an engine runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvpager._model.watch.looks import only_looks


class Clock:
    """Seconds inside the calls of some modules, between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    @only_looks
    def begin(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    @only_looks
    def end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._begun


@contextmanager
def clocked(modules: Sequence[torch.nn.Module]) -> Iterator[Clock]:
    """Modules none of which calls another of them."""
    clock = Clock()
    handles = [module.register_forward_pre_hook(clock.begin) for module in modules]
    handles += [module.register_forward_hook(clock.end) for module in modules]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()
