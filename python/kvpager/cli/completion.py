"""Completion scripts for shells: `kvpager --print-completion bash`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kvpager.cli.output import write_stdout

SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("FILE", "PATH", "MODEL", "SNAPSHOT", "STORE", "STORE/NAME", "A", "B")
_FOLDERS = ("DIR",)


class PrintCompletion(argparse.Action):
    """Prints a shell's script of all commands and options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *more: Any) -> None:
        """Prints it."""
        import shtab

        for action in _actions(parser):
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        write_stdout(shtab.complete(parser, shell) + "\n")
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every action of a parser and of its commands."""
    for action in parser._actions:  # noqa: SLF001  # there is no public list
        yield action
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                yield from _actions(command)
