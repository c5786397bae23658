"""Writes a command's result, and notes on stderr."""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpager._support.arguments import usable_path
from kvpager.cli.failure import CliError
from kvpager.cli.terminal import Look, look
from kvpager.errors import InvalidArgumentError

_LONGEST_NAME = 200  # of the file systems' 255, which a temporary file's has to keep, too
# Names of arguments that are files.
_FILES = (
    *("save", "restore", "snapshot", "snapshots", "file", "first", "second", "against"),
    *("messages", "prompt_file", "json_schema", "config", "api_keys"),
)


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
    args: argparse.Namespace, values: Mapping[str, Any], lines: Callable[[Look], Iterable[str]]
) -> None:
    """Writes a command's whole result to stdout, or to the file that --output names.

    Args:
        args: the command line; --format json asks for one object.
        values: that object.
        lines: make of it what a person reads.
    """
    if args.format == "json":
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{line}\n" for line in lines(look(args)))
    if args.output is None:
        write_stdout(text)
    else:
        write_file(Path(args.output), text.encode(errors="backslashreplace"))


def note(args: argparse.Namespace, text: str) -> None:
    """A line on stderr, unless --quiet."""
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


def check_output(args: argparse.Namespace) -> None:
    """Raises CliError if --output, or --plot, cannot be written or is a file of the command's."""
    used = {Path(path).resolve() for name in _FILES for path in _paths(args, name)}
    for name in ("output", "plot"):
        for path in _paths(args, name):
            check_writable(f"--{name}", path, regular=False)
            real = Path(path).resolve()
            if real in used and not _is_special(real):
                raise CliError(
                    f"--{name} {path}: the command uses that file otherwise; expected one of its "
                    "own"
                )
            used.add(real)


def _paths(args: argparse.Namespace, name: str) -> list[str]:
    """The paths of an argument that has one, several or none, and may be a switch."""
    value = getattr(args, name, None)
    return [path for path in (value if isinstance(value, list) else [value]) if type(path) is str]


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; a link's target; a device or pipe as it is.

    Raises:
        CliError: it cannot be written; nothing is left of it.
    """
    path = path.resolve()
    try:
        if _is_special(path):
            path.write_bytes(data)
        else:
            _replace(path, data)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if path.exists():  # a new file stays private: it may hold prompts and answers
            Path(name).chmod(stat.S_IMODE(path.stat().st_mode))
        Path(name).replace(path)
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
    folder = Path(path).parent
    why = ""
    if len(os.fsencode(Path(path).name)) > _LONGEST_NAME:
        why = f"its name has more than {_LONGEST_NAME} bytes"
    elif path.endswith(os.sep) or Path(path).is_dir():
        why = "it is a folder; expected the name of a file"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif regular and _is_special(Path(path)):
        why = "it is no regular file; expected the name of one"
    elif not _is_special(Path(path)) and not os.access(folder, os.W_OK):
        why = f"the folder {folder} is not writable"
    if why:
        raise CliError(f"{option} {path}: {why}")


def _is_special(path: Path) -> bool:
    """Whether there is a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def noting(args: argparse.Namespace, logger: str) -> Iterator[None]:
    """Within, what this logger says is a note; where logging is set up, it goes there alone."""
    log, handler = logging.getLogger(logger), logging.Handler()
    if getattr(args, "quiet", True):
        yield
        return

    def emit(record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            note(args, record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
