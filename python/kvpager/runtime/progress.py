"""How far a long call has come, told to whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvpager.errors import InvalidArgumentError

Progress: TypeAlias = Callable[[int, int], object] | bool | None


@contextmanager
def reporting(progress: Progress, label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function of the tokens done so far: a bar on stderr, the caller's own, or nothing.

    progress: True for the bar, a callable (done, total), None or False for silence.
    """
    if progress is None or progress is False:
        yield lambda done: None
    elif progress is True:
        with _bar(label, total) as update:
            yield update
    elif callable(progress):
        call = progress
        yield lambda done: call(done, total)
    else:
        raise InvalidArgumentError(
            f"progress is {progress!r}; expected True, None or a callable (done, total)"
        )


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    from rich.console import Console  # a bar is rare, and importing rich is not free
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
