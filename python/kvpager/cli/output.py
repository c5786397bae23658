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
from kvpager.errors import InvalidArgumentError
from kvpager.paths import usable_path

_LONGEST_NAME = 200  # of the file systems' 255, which a temporary file's has to keep, too
# Names of arguments that are files.
_FILES = (
    *("save", "restore", "snapshot", "snapshots", "file", "first", "second", "against"),
    *("messages", "prompt_file", "json_schema", "config", "api_keys"),
)


def emit(args: argparse.Namespace, text: str) -> None:
    """Writes a command's whole result to stdout, or to the file that --output names."""
    if args.output is None:
        write_stdout(text)
    else:
        write_file(Path(args.output), text.encode(errors="backslashreplace"))


def write_stdout(text: str) -> None:
    """Writes text to stdout; characters that its encoding has not, as Python escapes them.

    Raises:
        CliError: it is closed.
    """
    stream = sys.stdout
    if stream is None:  # the process was started without
        raise CliError("stdout is closed; give --output FILE")
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


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


def check_output(args: argparse.Namespace) -> None:
    """Raises CliError if --output, or --plot, cannot be written or is a file of the command's."""
    used = [(name, path) for name in _FILES for path in _paths(getattr(args, name, None))]
    for name in ("output", "plot"):
        for path in _paths(getattr(args, name, None)):
            check_writable(f"--{name}", path, regular=False)
            real = Path(path).resolve()
            if not _is_special(real) and any(
                other != name and Path(given).resolve() == real for other, given in used
            ):
                raise CliError(
                    f"--{name} {path}: the command uses that file otherwise; expected one of its "
                    "own"
                )
            used.append((name, path))


def _paths(value: object) -> list[str]:
    """The paths of an option that has one, several or none, and may be a switch."""
    values = value if isinstance(value, list) else [value]
    return [path for path in values if isinstance(path, str)]


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; a link's target; a device or pipe as it is.

    Raises:
        CliError: it cannot be written; nothing is left of it.
    """
    path = path.resolve()
    if _is_special(path):
        try:
            path.write_bytes(data)
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror}") from error
        return
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


def check_writable(option: str, path: str | None, *, regular: bool = True) -> None:
    """Raises CliError now rather than after minutes, if a file of this name cannot be made.

    regular: whether a device or a pipe will not do.
    """
    if path is None:
        return
    try:
        usable_path(path, option)
    except InvalidArgumentError as error:
        raise CliError(str(error)) from error
    if len(os.fsencode(Path(path).name)) > _LONGEST_NAME:
        raise CliError(f"{option} {path}: its name has more than {_LONGEST_NAME} bytes")
    folder = Path(path).parent
    if path.endswith(os.sep) or Path(path).is_dir():
        raise CliError(f"{option} {path}: it is a folder; expected the name of a file")
    if not folder.is_dir():
        raise CliError(f"{option} {path}: there is no folder {folder}")
    if _is_special(Path(path)):
        if regular:
            raise CliError(f"{option} {path}: it is no regular file; expected the name of one")
        return
    if not os.access(folder, os.W_OK):
        raise CliError(f"{option} {path}: the folder {folder} is not writable")


def _is_special(path: Path) -> bool:
    """Whether there is a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()
