"""Locks of a directory store: flock(), which the kernel releases when a process dies.

Every acquisition has a descriptor of its own, so that threads of one process exclude each other as
processes do. Descriptors are closed on exec, and every lock is released before its descriptor is
closed, so that a forked child does not keep a lock that its parent has released. Native objects own
both from the start, so that an interrupt loses neither.
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
from kvpager._support.arguments import is_number
from kvpager.errors import InvalidArgumentError
from kvpager.stores.names import is_temporary

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW


TIMEOUT_SECONDS = 120.0  # many times what a holder needs: none reads chunks with the lock


def checked_timeout(field: str, seconds: float) -> float:
    """Checks a number of seconds to wait at most, or infinity. Raises InvalidArgumentError.

    field: name of the argument, for the message.
    """
    if not is_number(seconds) or not seconds >= 0:
        raise InvalidArgumentError(
            f"{field} is {seconds!r}; expected a number of seconds, 0 or more"
        )
    return float(min(seconds, sys.float_info.max))


def exclusive(path: str, timeout_seconds: float) -> _core.ExclusiveLock:
    """Holds the lock file at `path` (made if missing) for a `with` block.

    Entering raises OSError if the file cannot be opened, and StorageError if its file system has no
    flock() or if another holder, whom the message names, kept the lock for the whole time. Pass the
    returned object itself to `with`: its native methods let no interrupt come between taking the
    lock and entering the block.
    """
    return _core.ExclusiveLock(path, timeout_seconds)


def in_use(path: str) -> bool:
    """Whether this or another process holds the file at `path`.

    REQUIRES: the store's lock, without which the answer may be out of date.
    """
    try:
        with _core.OwnedFile(path, _FLAGS | os.O_NONBLOCK) as file:  # a FIFO would not open
            return not file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False


def remove_dead_temporaries(folder: str) -> int:
    """Removes temporary files of dead writers beside single files; returns their number.

    A file that is being written is locked. If one is removed just before its writer locks it, the
    writer makes it again. Files that cannot be read or removed stay.
    """
    removed = 0
    with contextlib.suppress(OSError):
        # Not scandir: an interrupt could leave its descriptor open.
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
    """Marks files as in use, so that no collection removes them. A context manager."""

    def __init__(self) -> None:
        self._files: list[_core.OwnedFile] = []

    def add(self, paths: Iterable[str]) -> None:
        """Holds these files too. REQUIRES: the store's lock, which removals need too."""
        for path in paths:
            self._files.append(_core.OwnedFile(path, _FLAGS))
            if not self._files[-1].lock(fcntl.LOCK_SH | fcntl.LOCK_NB):
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), path)

    def release(self) -> None:
        """Releases all of them. May be called twice."""
        for file in self._files:
            file.unlock()
            file.close()
        self._files.clear()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
