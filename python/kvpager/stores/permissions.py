"""Who may read what kvpager writes: prompts are private, so that files are 0600 and folders 0700.

A mode that was asked for holds whatever the umask, as with `install -m`: the umask speaks for those
who did not say. A file that is replaced keeps the permissions that it lacks.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from kvpager.errors import InvalidArgumentError

PRIVATE = 0o600
_ALL = 0o666
_OCTAL = re.compile(r"0?o?[0-7]{3,4}")
_WITHOUT_MODES = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # as mounted


def parse_mode(field: str, value: object) -> int:
    """A file's permissions, from 0o640 or "640".

    Raises:
        InvalidArgumentError: naming `field`; also where the owner could not read and write.
    """
    mode = -1
    if isinstance(value, int) and not isinstance(value, bool):
        mode = value
    elif isinstance(value, str) and _OCTAL.fullmatch(value):
        mode = int(value.lstrip("0o") or "0", 8)
    if mode & ~_ALL or mode & PRIVATE != PRIVATE:
        raise InvalidArgumentError(
            f"{field} is {oct(mode) if mode >= 0 else repr(value)}; expected the permissions of a "
            'file that its owner reads and writes, such as 0o600, 0o640 or 0o660 (in text "640")'
        )
    return mode


def folder_mode(mode: int) -> int:
    """Of the folders of files with this mode: who may read may look up."""
    return mode | (mode & 0o444) >> 2


def kept_mode(path: str, mode: int) -> int:
    """`mode` less what a file that is there already lacks."""
    try:
        return mode & Path(path).stat().st_mode
    except OSError:
        return mode


def set_mode(descriptor: int, mode: int) -> None:
    """Gives an open file exactly this mode, where its file system has any."""
    if os.fstat(descriptor).st_mode & 0o7777 == mode:
        return
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def make_folder(path: str, mode: int) -> None:
    """Makes a folder for files of this mode; one that is there stays as it is."""
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
    """Adds the permissions that `mode` has and a file or folder of one's own lacks."""
    try:
        now = Path(path).stat().st_mode & 0o7777
        if now | mode != now:
            Path(path).chmod(now | mode)
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def share_folders(store: str, mode: int) -> None:
    """Lets whoever may use files of this mode come to them, and take the lock."""
    for folder in (store, f"{store}/packs", f"{store}/snapshots"):
        widen(folder, folder_mode(mode))
    widen(f"{store}/lock", mode)
