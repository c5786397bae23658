"""Locks of a directory store: flock(), which the kernel takes back when a process dies.

Every acquisition has a descriptor of its own, so that threads of one process exclude each other as
processes do. Descriptors are closed on exec, and every lock is taken back before its descriptor is
closed, so that a forked child does not go on holding what its parent let go.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator

from kvpager.errors import StorageError
from kvpager.process import MadeIn

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Holds the lock file at `path`, made where it is missing, for as long as the block runs.

    Raises:
        StorageError: the file cannot be had, or its file system has no flock().
    """
    made_in = MadeIn()
    descriptor = _open_lock(path)  # nothing between it and the block that closes it
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot lock the store: {error.strerror}; a directory store needs a file "
                "system with flock(), such as a local one"
            ) from error
        try:
            yield
        finally:
            _unlock(descriptor, made_in)
    finally:
        os.close(descriptor)


def _unlock(descriptor: int, made_in: MadeIn) -> None:
    """Takes a lock back from forked children too, who have a copy of the descriptor.

    A child that ends a block it was forked in does not take it from its parent.
    """
    if made_in.forked:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_lock(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
    except OSError as error:
        # A store that may only be read is locked all the same.
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | _FLAGS)


def in_use(path: str) -> bool:
    """Whether somebody, in this process or another one, holds the file at `path`.

    REQUIRES: the store's lock, without which the answer is old when it arrives.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


class Hold:
    """Keeps files from being removed by anybody who asks `in_use` first. A context manager."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._made_in = MadeIn()

    def add(self, paths: Iterable[str]) -> None:
        """Holds these files too. REQUIRES: the store's lock, so that none is being removed."""
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | _FLAGS)
            self._descriptors.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Lets all of them go. Doing so twice is harmless."""
        while self._descriptors:
            descriptor = self._descriptors.pop()
            _unlock(descriptor, self._made_in)
            os.close(descriptor)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
