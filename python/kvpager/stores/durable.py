"""Writes small files atomically, and makes changes of folders durable."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager.stores.names import temporary_name
from kvpager.stores.permissions import PRIVATE, kept_mode, set_mode

SMALL_BYTES = 65536  # more than any settings or sidecar has


def read_json(path: str, limit: int = SMALL_BYTES) -> Any:
    """The JSON value in a small file of untrusted content.

    Raises:
        OSError: it does not exist, is not a regular file, or cannot be read.
        ValueError: it is larger than `limit` bytes, or not JSON.
    """
    # O_NONBLOCK: if the path is a pipe, opening it must not wait for a writer.
    with _core.OwnedFile(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size > limit:
            raise ValueError(f"{status.st_size} bytes, expected at most {limit}")
        data = os.read(file.fileno(), limit)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_atomically(path: str, text: str, mode: int = PRIVATE) -> None:
    """Writes `text` to `path`: temporary name, fsync, rename, fsync of the folder.

    mode: permissions; a replaced file gains none that it lacked.
    """
    folder = str(Path(path).parent)
    temporary = f"{folder}/{temporary_name()}"
    try:
        with _core.OwnedFile(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            _write(file.fileno(), text.encode(), path)
            set_mode(file.fileno(), kept_mode(path, mode))
            os.fsync(file.fileno())
        Path(temporary).rename(path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(folder)


def _write(descriptor: int, data: bytes, path: str) -> None:
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, "only a part could be written", path)


def sync_folder(folder: str) -> None:
    """Makes renames and removals in a folder durable."""
    with _core.OwnedFile(folder, os.O_RDONLY | os.O_DIRECTORY) as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system cannot sync folders
                raise


def remove(path: str) -> None:
    """Removes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
