"""Small files that exist whole or not at all, and folders that remember what was done to them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvpager.stores.names import temporary_name

SMALL_BYTES = 65536  # more than any settings or sidecar has


def read_json(path: str, limit: int = SMALL_BYTES) -> Any:
    """The JSON value in a small file, which may hold anything.

    Raises:
        OSError: it is not there, not a regular file, or cannot be read.
        ValueError: it is larger than `limit` bytes, or not JSON.
    """
    # O_NONBLOCK: opening a pipe must not wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size > limit:
            raise ValueError(f"{status.st_size} bytes, expected at most {limit}")
        data = os.read(descriptor, limit)
    finally:
        os.close(descriptor)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_atomically(path: str, text: str) -> None:
    """Puts `text` where `path` says: temporary name, fsync, rename, fsync of the folder."""
    folder = str(Path(path).parent)
    temporary = f"{folder}/{temporary_name()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            data = text.encode()
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "only a part could be written", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        Path(temporary).rename(path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(folder)


def sync_folder(folder: str) -> None:
    """Makes renames and removals in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without folders to sync
            raise
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
