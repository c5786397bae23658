"""Snapshot files on their way to a client or from one, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from kvpager.server.errors import ApiError, no_space, retry_after

_PREFIX = "kvpager-transfer-"
_LOCK = "lock"
_STARTING_SECONDS = 60.0  # in which a server has locked the folder that it made
_BLOCK = 1 << 20


class Transfers:
    """Exports and imports of a server. Of the event loop, but for `clean` and files' contents.

    A file that is sent has no name any more, so that its bytes go with its last reader, whatever
    becomes of the server; what was being written when one was killed goes when the next one starts.
    """

    def __init__(self, parent: str | None, most: int) -> None:
        """Makes its folder, and removes those that killed servers left.

        Args:
            parent: where the folder is made; None: among the system's temporary files.
            most: transfers of one tenant at a time.
        """
        base = Path(tempfile.gettempdir()) if parent is None else Path(parent) / ".transfers"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in base.glob(_PREFIX + "*"):
            _remove_if_left(left)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = (self._folder / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._most = most
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, tenant: str) -> Iterator[Path]:
        """A folder for one transfer, which is removed afterwards. Raises ApiError 429."""
        if self._running[tenant] >= self._most:
            raise ApiError(
                429,
                f"{self._running[tenant]} exports and imports of this tenant are under way; "
                f"expected at most {self._most} at a time, which is max_transfers",
                kind="rate_limit_error",
                code="too_many_transfers",
                headers=retry_after(1.0),
            )
        self._running[tenant] += 1
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                yield Path(folder)
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def close(self) -> None:
        """Removes its folder. May be called twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


async def receive(parts: AsyncIterator[bytes], path: Path) -> None:
    """Writes what comes to a file, a block at a time. Raises ApiError 507 for a full disk."""
    block = bytearray()
    with path.open("wb") as file, _full_disk():
        async for part in parts:
            block += part
            if len(block) >= _BLOCK:
                await asyncio.to_thread(file.write, block)
                block = bytearray()
        await asyncio.to_thread(file.write, block)
        await asyncio.to_thread(file.flush)


async def send(file: IO[bytes], seconds: float) -> AsyncIterator[bytes]:
    """The contents of a file, for `seconds` at most. Raises TimeoutError where they are over."""
    deadline = time.monotonic() + seconds
    while block := await asyncio.to_thread(file.read, _BLOCK):
        yield block
        if time.monotonic() > deadline:
            raise TimeoutError(f"a client took more than {seconds:.0f} s for an export")


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space() from error
        raise


def _remove_if_left(folder: Path) -> None:
    """Removes the folder of a server that does not run any more."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            return
        lock = folder / _LOCK
        if not lock.exists() and time.time() - found.st_mtime < _STARTING_SECONDS:
            return
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
