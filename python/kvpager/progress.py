"""Progress reports of long calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from kvpager._support.arguments import refusal, takes

Progress: TypeAlias = Callable[[int, int], object] | bool | None


@contextmanager
def reporting(progress: Progress, label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes the tokens done: it updates a bar, calls `progress`, or nothing.

    progress: True for the bar, a callable (done, total), None or False for silence.
    """
    with reporting_work(progress, label) as report:
        yield lambda done: report(done, total)


@contextmanager
def reporting_work(progress: Progress, label: str) -> Iterator[Callable[[int, int], object]]:
    """Like `reporting`, but the function takes (done, in all); the latter may change."""
    with _reporting(progress, label, in_bytes=False) as report:
        yield report


@contextmanager
def reporting_bytes(progress: Progress, label: str) -> Iterator[Callable[[int, int], object]]:
    """Like `reporting`, but the function takes (bytes done, bytes in all)."""
    with _reporting(progress, label, in_bytes=True) as report:
        yield report


def check_progress(progress: Progress) -> None:
    """Raises InvalidArgumentError unless it is True, False, None, or takes two numbers."""
    if progress is None or isinstance(progress, bool):
        return
    if not takes(progress, 2):
        raise refusal("progress", progress, "True, None or a callable (done, total)")


@contextmanager
def _reporting(
    progress: Progress, label: str, *, in_bytes: bool
) -> Iterator[Callable[[int, int], object]]:
    check_progress(progress)
    if progress is None or progress is False:
        yield lambda done, total: None
    elif progress is True:
        with _bar(label, in_bytes=in_bytes) as update:
            yield update
    else:
        yield progress


@contextmanager
def _bar(label: str, *, in_bytes: bool) -> Iterator[Callable[[int, int], object]]:
    from tqdm.auto import tqdm  # in a notebook a widget, where ipywidgets is installed

    amount: dict[str, Any] = {"unit": ""}
    if in_bytes:
        amount = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(desc=label, **amount) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
        bar.refresh()
