#!/usr/bin/env python3
"""Records docs/screens/chat.svg: a conversation in a terminal, killed, and continued.

    .venv/bin/python scripts/record_chat.py

A real run, in a shell of its own, with the model that `kvpager chat` takes: what the terminal shows
at the end is what is drawn. Needs pyte, of the extra `dev`.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from pseudo_terminal import CTRL_D, Terminal  # noqa: E402

FILE = ROOT / "docs" / "screens" / "chat.svg"
COLUMNS, ROWS = 92, 60
COMMAND = "kvpager chat --temperature 0"
FIRST = ("What is the capital of France?", "Name three things to see there.")
KILLED = "Tell me a story about the river there."
LAST = "Which of them is the tallest?"


def record(data: Path) -> str:
    """What the terminal has written, all of it. `data`: the user's data folder."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_DATA_HOME": str(data),
        "PS1": "$ ",
        "TERM": "xterm-256color",
        "BASH_SILENCE_DEPRECATION_WARNING": "1",
    }
    shell = ["/bin/bash", "--norc", "--noprofile", "-i"]
    with Terminal(shell, environment, rows=ROWS, columns=COLUMNS) as terminal:

        def say(message: str, until: str) -> None:
            terminal.wait_for("> ")
            terminal.type(f"{message}\r")
            terminal.wait_for(until)

        terminal.wait_for(r"\$ ")
        terminal.type(f"{COMMAND}\r")
        for message in FIRST:
            say(message, "first token after")
        say(KILLED, r"(\w+ ){8}.*(\w+ ){8}")
        os.kill(child_of(terminal.process.pid), signal.SIGKILL)
        terminal.wait_for("Killed")
        terminal.wait_for(r"\$ ")
        terminal.type(f"{COMMAND}\r")
        terminal.wait_for("goes on with")
        terminal.wait_for(r"> .*\n")  # its last turn
        say(LAST, "first token after")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        terminal.wait_for(r"\$ ")
        return str(terminal.text)


def child_of(process: int) -> int:
    """The number of the one child of a process."""
    (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def screen_of(written: str) -> Text:
    """The lines of a terminal that has got all of it."""
    screen = pyte.Screen(COLUMNS, ROWS)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(written)
    text = Text()
    for number in range(max(n for n, line in enumerate(screen.display) if line.strip()) + 1):
        cells = [screen.buffer[number][column] for column in range(COLUMNS)]
        while cells and cells[-1].data == " ":
            cells.pop()
        for (colour, bold), run in itertools.groupby(cells, lambda cell: (cell.fg, cell.bold)):
            style = Style(color=_colour(colour), bold=bold)
            text.append("".join(cell.data for cell in run), style)
        text.append("\n")
    return text


def _colour(name: str) -> str | None:
    """A colour of pyte's as rich calls it."""
    if name == "default":
        return None
    if len(name) == 6 and set(name) <= set("0123456789abcdef"):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, name.replace("bright", "bright_"))


def main() -> None:
    """Records and draws."""
    with tempfile.TemporaryDirectory(prefix="kvpager-recording-") as folder:
        shown = screen_of(record(Path(folder)))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(shown, end="")
    FILE.parent.mkdir(exist_ok=True)
    drawn = console.export_svg(title="kvpager chat", theme=MONOKAI, unique_id="chat")
    FILE.write_text(drawn, encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(drawn):,} characters")


if __name__ == "__main__":
    main()
