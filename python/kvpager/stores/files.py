"""Files of a store: their permissions, atomic writes of small ones, and durable changes of folders.

Prompts are private, so files are 0600 and folders 0700. A mode that the user sets holds regardless
of the umask, as with `install -m`. A replaced file gains no permission that it lacked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager._support.arguments import is_integer
from kvpager.errors import InvalidArgumentError
from kvpager.stores.names import DAMAGE_SUFFIX, SETTINGS_FILE, SIDECAR_SUFFIX, temporary_name

PRIVATE = 0o600
_ALL = 0o666
_OCTAL = re.compile(r"0?o?[0-7]{3,4}")
_WITHOUT_MODES = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # the file system has no modes


def parse_mode(field: str, value: object) -> int:
    """A file's permissions, from 0o640 or "640".

    Raises:
        InvalidArgumentError: names `field`; also if the owner could not read and write.
    """
    mode = -1
    if is_integer(value):
        mode = int(value)
    elif isinstance(value, str) and _OCTAL.fullmatch(value):
        mode = int(value.lstrip("0o") or "0", 8)
    if mode & ~_ALL or mode & PRIVATE != PRIVATE:
        raise InvalidArgumentError(
            f"{field} is {oct(mode) if mode >= 0 else repr(value)}; expected the permissions of a "
            'file that its owner reads and writes, such as 0o600, 0o640 or 0o660 (in text "640")'
        )
    return mode


def folder_mode(mode: int) -> int:
    """The mode of folders for files with `mode`: read permission adds search permission."""
    return mode | (mode & 0o444) >> 2


def kept_mode(path: str, mode: int) -> int:
    """`mode` without the permissions that an existing file at `path` lacks."""
    try:
        return mode & Path(path).stat().st_mode
    except OSError:
        return mode


def set_mode(descriptor: int, mode: int) -> None:
    """Gives an open file exactly this mode, if its file system has modes."""
    if os.fstat(descriptor).st_mode & 0o7777 == mode:
        return
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def make_folder(path: str, mode: int) -> None:
    """Makes a folder for files of this mode; an existing one stays unchanged."""
    try:
        Path(path).mkdir(mode=0o700)
    except FileExistsError:
        if not Path(path).is_dir():
            raise
        return
    try:
        Path(path).chmod(folder_mode(mode))
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def widen(path: str, mode: int) -> None:
    """Adds the permissions of `mode` to a file or folder that this user owns."""
    try:
        now = Path(path).stat().st_mode & 0o7777
        if now | mode != now:
            Path(path).chmod(now | mode)
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def share(store: str, mode: int) -> None:
    """Widens what a store is used by, so that users of files of this mode can use it.

    These are its folders, its lock, its settings, and notes beside snapshots and packs. Manifests
    and packs, which hold texts and their K/V, keep the permissions they were written with.
    """
    for folder in (Path(store), Path(store, "packs"), Path(store, "snapshots")):
        if folder.is_dir():  # a store of blocks has no snapshots
            widen(str(folder), folder_mode(mode))
    beside = [
        *Path(store, "snapshots").glob(f"*{SIDECAR_SUFFIX}"),
        *Path(store, "packs").glob(f"*{DAMAGE_SUFFIX}"),
    ]
    for file in (f"{store}/lock", f"{store}/{SETTINGS_FILE}", *map(str, beside)):
        widen(file, mode)


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
