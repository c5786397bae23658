"""What the place a result is shown at can show: tables, and bars on stderr."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvpager.stores.base import ProgressCallback


_WIDTH_WITHOUT_TERMINAL = 100
_LEAST_WIDTH = 40


@dataclass(frozen=True)
class Look:
    """Columns there are, and whether colours and fine characters will be seen as such."""

    width: int
    colour: bool
    unicode: bool

    def field(self, name: str, value: object, *, wide: int, indent: str = "") -> str:
        """A line that names a value; a long one goes on below, in its own column."""
        return textwrap.fill(
            str(value) or '""',
            width=max(self.width, _LEAST_WIDTH),
            initial_indent=f"{indent}{name:<{wide}} ",
            subsequent_indent=" " * (len(indent) + wide + 1),
            break_on_hyphens=False,
            break_long_words=False,  # paths and digests are there to be copied
        )

    def table(self, title: str) -> Table:
        """An empty table in the one style of this command line."""
        from rich import box
        from rich.table import Table

        return Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD if self.unicode else box.ASCII2,
            pad_edge=False,
            collapse_padding=True,
        )

    def render(self, *parts: RenderableType) -> str:
        """The parts as text, one below the other."""
        from rich.console import Console

        file = io.StringIO()
        console = Console(
            file=file,
            width=self.width,
            force_terminal=self.colour,
            color_system="256" if self.colour else None,
            no_color=not self.colour,
            highlight=False,
            markup=False,
        )
        for part in parts:
            console.print(part)
        return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def look(args: argparse.Namespace) -> Look:
    """Of stdout, or of the file that --output names: no colour there, but any character."""
    stdout = None if args.output else sys.stdout  # None, too, in a process without
    terminal = stdout is not None and stdout.isatty()
    encoding = "utf-8" if stdout is None else (stdout.encoding or "ascii")
    return Look(
        width=shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns,
        colour=terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb",
        unicode=encoding.lower().replace("-", "") == "utf8",
    )


@contextmanager
def byte_progress(args: argparse.Namespace, label: str) -> Iterator[ProgressCallback | None]:
    """A callable (bytes done, bytes in all) that draws a bar, or None if no one would see it."""
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
