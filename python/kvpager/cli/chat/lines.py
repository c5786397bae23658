"""The lines that a user types, with editing and a history, or those of a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvpager.cli.failure import CliError

_MOST_LINES = 1000  # of the history
_PROMPT, _MORE = "> ", "... "


def is_interactive() -> bool:
    """Whether a person types, and sees what is written."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_message() -> str:
    """The next line, which a backslash at its end continues.

    Raises:
        EOFError: there is none.
        CliError: it is not UTF-8.
    """
    message = ""
    while True:
        try:
            line = _line(_MORE if message else _PROMPT)
        except UnicodeDecodeError as error:
            raise CliError(f"stdin: not UTF-8 ({error.reason})") from error
        if not is_interactive() or not line.endswith("\\"):
            return message + line
        message += line[:-1] + "\n"


def _line(prompt: str) -> str:
    if not is_interactive():
        line = "" if sys.stdin is None else sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # `input` writes it to stdout
    return input()


@contextmanager
def editing(history: Path, words: Sequence[str]) -> Iterator[None]:
    """Within, typed lines are edited, and remembered in a file that others cannot read.

    Does nothing where stdin is no terminal or Python was built without readline.

    Args:
        history: the file, made if need be. One that cannot be used is left alone.
        words: completions of what a line begins with.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    if not is_interactive():
        yield
        return

    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if word.startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims("\n")
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(_MOST_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(history, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(history)
