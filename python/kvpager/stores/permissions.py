"""Permissions of files and folders: prompts are private, so files are 0600 and folders 0700.

A mode that the user gives holds regardless of the umask, as with `install -m`. A replaced file
gains no permission that it lacked.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from kvpager.arguments import is_integer
from kvpager.errors import InvalidArgumentError
from kvpager.stores.names import DAMAGE_SUFFIX, SETTINGS_FILE, SIDECAR_SUFFIX

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
    for folder in (store, f"{store}/packs", f"{store}/snapshots"):
        widen(folder, folder_mode(mode))
    beside = [
        *Path(store, "snapshots").glob(f"*{SIDECAR_SUFFIX}"),
        *Path(store, "packs").glob(f"*{DAMAGE_SUFFIX}"),
    ]
    for file in (f"{store}/lock", f"{store}/{SETTINGS_FILE}", *map(str, beside)):
        widen(file, mode)
