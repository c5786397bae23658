"""What the place a result is shown at can show: tables, and bars on stderr."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import ProgressColumn
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

    def fields(
        self, facts: Iterable[tuple[str, object]], wide: int, indent: str = ""
    ) -> Iterator[str]:
        """A line for each name and value; a long value goes on below, in its own column."""
        for name, value in facts:
            yield textwrap.fill(
                str(value) or '""',
                width=max(self.width, _LEAST_WIDTH),
                initial_indent=f"{indent}{name:<{wide}} ",
                subsequent_indent=" " * (len(indent) + wide + 1),
                break_on_hyphens=False,
                break_long_words=False,  # paths and digests are there to be copied
            )

    def table(self, title: str, *columns: str) -> Table:
        """An empty table in the style of this command line; ">tokens" is a column of numbers."""
        from rich import box
        from rich.table import Table

        table = Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD if self.unicode else box.ASCII2,
            pad_edge=False,
            collapse_padding=True,
        )
        for name in columns:
            if name.startswith(">"):
                table.add_column(name[1:], justify="right", no_wrap=True)
            else:
                table.add_column(name, overflow="fold")
        return table

    def render(self, *parts: RenderableType) -> Iterator[str]:
        """Lines of the parts, one part below the other."""
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
        return (line.rstrip() for line in file.getvalue().splitlines())


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


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether progress bars are wanted and stderr is a terminal."""
    return not args.quiet and sys.stderr.isatty()


@contextmanager
def bar(label: str, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A bar on stderr with these columns after it; the callable is rich's `Progress.update`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    first = TextColumn("{task.description}"), BarColumn()
    with Progress(*first, *columns, console=Console(stderr=True), transient=True) as shown:
        yield partial(shown.update, shown.add_task(label, total=None))


@contextmanager
def work_progress(
    args: argparse.Namespace, label: str, *, in_bytes: bool = True
) -> Iterator[ProgressCallback | None]:
    """A callable (done, in all) that draws a bar, or None if no one would see it."""
    if not shows_progress(args):
        yield None
        return
    from rich.progress import (
        DownloadColumn,
        MofNCompleteColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: list[ProgressColumn] = [MofNCompleteColumn()]
    if in_bytes:
        amount = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with bar(label, *amount, TimeRemainingColumn()) as update:
        yield lambda done, total: update(completed=done, total=total)
