"""Locks of a directory store: flock(), which the kernel takes back when a process dies.

Every acquisition has a descriptor of its own, so that threads of one process exclude each other as
processes do. Descriptors are closed on exec, and every lock is taken back before its descriptor is
closed, so that a forked child does not go on holding what its parent let go. Native objects own
both from the first instant, so that an interrupt loses none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from kvpager import _core
from kvpager.errors import InvalidArgumentError
from kvpager.stores.names import is_temporary

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW


TIMEOUT_SECONDS = 120.0  # many times what any holder needs: none reads chunks meanwhile


def checked_timeout(field: str, seconds: float) -> float:
    """A number of seconds to wait at most, infinity for ever; InvalidArgumentError if it is none.

    field: what the argument is called.
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not seconds >= 0:
        raise InvalidArgumentError(
            f"{field} is {seconds!r}; expected a number of seconds, 0 or more"
        )
    return float(min(seconds, sys.float_info.max))


def exclusive(path: str, timeout_seconds: float) -> _core.ExclusiveLock:
    """Holds the lock file at `path`, made where it is missing, for as long as the block runs.

    Entering it raises StorageError or OSError: the file cannot be had, its file system has no
    flock(), or somebody, who is named, has held it all the time. The `with` statement must be given
    this very object: its native methods leave an interrupt no instant between taking the lock and
    the block.
    """
    return _core.ExclusiveLock(path, timeout_seconds)


def in_use(path: str) -> bool:
    """Whether somebody, in this process or another one, holds the file at `path`.

    REQUIRES: the store's lock, without which the answer is old when it arrives.
    """
    try:
        with _core.OwnedFile(path, _FLAGS) as file:
            return not file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False


def remove_dead_temporaries(folder: str) -> int:
    """Removes what writers that died have left beside single files; returns how many files.

    A file that is being written is locked, and one that was just made but is not locked yet is made
    again by its writer. What cannot be looked at or removed stays for another time.
    """
    removed = 0
    with contextlib.suppress(OSError):
        # Not scandir: an interrupt would leave its descriptor open.
        for name in filter(is_temporary, os.listdir(folder)):  # noqa: PTH208
            path = f"{folder}/{name}"
            with (
                contextlib.suppress(OSError),
                _core.OwnedFile(path, _FLAGS | os.O_NONBLOCK) as file,
            ):
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                if regular and file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
                    Path(path).unlink()
                    removed += 1
    return removed


class Hold:
    """Keeps files from being removed by anybody who asks `in_use` first. A context manager."""

    def __init__(self) -> None:
        self._files: list[_core.OwnedFile] = []

    def add(self, paths: Iterable[str]) -> None:
        """Holds these files too. REQUIRES: the store's lock, so that none is being removed."""
        for path in paths:
            self._files.append(_core.OwnedFile(path, _FLAGS))
            if not self._files[-1].lock(fcntl.LOCK_SH | fcntl.LOCK_NB):
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)

    def release(self) -> None:
        """Lets all of them go. Doing so twice is harmless."""
        for file in self._files:
            file.unlock()
            file.close()
        self._files.clear()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
