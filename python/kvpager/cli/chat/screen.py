"""Answers as they come: Markdown on a terminal, else plain text."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvpager.cli.output import write_stdout

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment

Show = Callable[[str], None]

_SECONDS = 0.06  # between two drawings of a block that grows
# Control characters would let an answer move the cursor, or more.
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")
del _CONTROL[ord("\n")], _CONTROL[ord("\t")]


def shows_markdown() -> bool:
    """Whether stdout is a terminal that can redraw lines, and rich is installed."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    return terminal and not dumb and importlib.util.find_spec("rich") is not None


@contextmanager
def showing() -> Iterator[Show]:
    """A callable for the pieces of an answer. At the end its last line is complete."""
    if shows_markdown():
        from rich.console import Console

        with showing_markdown(Console(highlight=False)) as show:
            yield show
        return
    terminal = sys.stdout is not None and sys.stdout.isatty()
    try:
        yield lambda piece: write_stdout(printable(piece) if terminal else piece)
    finally:
        write_stdout("\n")


def show_whole(text: str) -> None:
    """Writes a text as `showing` leaves an answer."""
    with showing() as show:
        show(text)


def printable(text: str) -> str:
    """The text without control characters that a terminal would follow."""
    return text.translate(_CONTROL)


@contextmanager
def showing_markdown(console: Console) -> Iterator[Show]:
    """Writes blocks of Markdown once they are complete, and redraws the last one as it grows."""
    from rich.live import Live

    growing, drawn_at = Block("", fits=True), 0.0

    def show(piece: str) -> None:
        nonlocal drawn_at
        *complete, growing.text = blocks(growing.text + printable(piece))
        for block in complete:
            console.print(Block(block))
            console.print()
        if time.monotonic() - drawn_at > _SECONDS:
            live.refresh()
            drawn_at = time.monotonic()

    with Live(growing, console=console, auto_refresh=False) as live:
        try:
            yield show
        finally:
            growing.fits = False


def blocks(text: str) -> list[str]:
    """The blocks of Markdown that make up the text, of which only the last one may change."""
    lines = text.split("\n")
    whole = "\n".join(lines[:-1])  # the beginning of a line may turn out to be of another block
    starts = [
        token.map[0]
        for token in _parser().parse(whole)
        if token.level == 0 and token.map and token.nesting >= 0
    ]
    cuts = [0, *starts[1:], len(lines)]
    parts = ["\n".join(lines[start:stop]) for start, stop in itertools.pairwise(cuts)]
    return [f"{part}\n" for part in parts[:-1]] + parts[-1:]


class Block:
    """Markdown for a console, in which HTML is text and addresses are shown.

    Attributes:
        text: may change from one drawing to the next.
        fits: whether it is cut to as many of its last lines as the terminal has.
    """

    def __init__(self, text: str, *, fits: bool = False) -> None:
        self.text = text
        self.fits = fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields its lines, without the empty ones that rich puts around some blocks."""
        from rich.markdown import Markdown
        from rich.segment import Segment

        made = Markdown("", hyperlinks=False)
        made.parsed = _parser().parse(self.text)
        lines = console.render_lines(made, options, pad=False)
        while lines and not _has_text(lines[0]):
            del lines[0]
        while lines and not _has_text(lines[-1]):
            del lines[-1]
        if self.fits:
            lines = lines[-max(1, options.size.height - 1) :]
        for line in lines:
            yield from line
            yield Segment.line()


def _has_text(line: list[Segment]) -> bool:
    return any(segment.text.strip() for segment in line)


def _parser() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
