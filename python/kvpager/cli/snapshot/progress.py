"""How far a long read or write has come, on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.stores.base import ProgressCallback


@contextmanager
def byte_progress(args: argparse.Namespace, label: str) -> Iterator[ProgressCallback | None]:
    """A callable (bytes done, bytes in all) that draws a bar, or None where nobody would see it."""
    if args.quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def shifted(progress: ProgressCallback | None, before: int, total: int) -> ProgressCallback | None:
    """For one part of several: `before` bytes were done by earlier parts, of `total` in all."""
    if progress is None:
        return None
    call = progress
    return lambda done, _: call(before + done, total)
