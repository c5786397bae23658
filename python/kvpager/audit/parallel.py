"""Runs jobs in threads that a Ctrl-C leaves behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_parallel(jobs: Sequence[Callable[[], T]], threads: int, done: Callable[[], None]) -> list[T]:
    """The results of the jobs, in order; `done` is called after each.

    After an error or an interrupt no further job begins. Threads do not keep the process alive.

    Raises:
        Exception: of the first job that failed.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Future[T]]] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            outcome: Future[T] = Future()
            try:
                outcome.set_result(jobs[number]())
            except Exception as error:  # raised below, in the caller's thread
                outcome.set_exception(error)
            finished.put((number, outcome))

    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=work, daemon=True, name="audit").start()
    results: dict[int, T] = {}
    try:
        for _ in jobs:
            number, outcome = finished.get()
            results[number] = outcome.result()
            done()
    finally:
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
    return [results[number] for number in range(len(jobs))]
