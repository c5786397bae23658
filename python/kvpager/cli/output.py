"""Writes a command's result, and notes on stderr."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError


def emit(args: argparse.Namespace, text: str) -> None:
    """Writes a command's whole result to stdout, or to the file that --output names."""
    if args.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_file(Path(args.output), text.encode())


def emit_result(
    args: argparse.Namespace, values: Mapping[str, Any], text: Callable[[], str]
) -> None:
    """A command's whole result in the --format that is asked for: one JSON object, or `text`."""
    if args.format == "json":
        emit(args, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    else:
        emit(args, text())


def note(args: argparse.Namespace, text: str) -> None:
    """A line on stderr, unless --quiet."""
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether progress bars are wanted and stderr is a terminal."""
    return not args.quiet and sys.stderr.isatty()


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all.

    Raises:
        CliError: it cannot be written; nothing is left of it.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if path.exists():  # a new file stays private: it may hold prompts and answers
            Path(name).chmod(stat.S_IMODE(path.stat().st_mode))
        Path(name).replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def check_writable(option: str, path: str | None) -> None:
    """Raises CliError now rather than after minutes, if a file of this name cannot be made."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise CliError(f"{option} {path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise CliError(f"{option} {path}: it is a folder; expected the name of a file")
    if not os.access(folder, os.W_OK):
        raise CliError(f"{option} {path}: the folder {folder} is not writable")
