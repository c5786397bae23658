"""Exports and imports of snapshot files, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvpager.server.errors import ApiError, no_space, retry_after

if TYPE_CHECKING:
    from kvpager._core import SnapshotImage

_BLOCK = 1 << 20


class Transfers:
    """Exports and imports of a server. Used by the event loop."""

    def __init__(self, parent: Path | None, most: int) -> None:
        """Makes the folder of its files.

        Args:
            parent: of the folder; None: files are in the system's temporary folder.
            most: limit of one tenant's transfers at a time.
        """
        self._folder = None if parent is None else parent / ".transfers"
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._most = most
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Counts one transfer of a tenant while it is open. Raises ApiError 429."""
        if self._running[tenant] >= self._most:
            raise ApiError(
                429,
                f"{self._running[tenant]} exports and imports of this tenant are under way; "
                f"expected at most {self._most} at a time, which is max_transfers",
                code="too_many_transfers",
                headers=retry_after(),
            )
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    @contextlib.asynccontextmanager
    async def received(self, parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
        """Writes parts to a file, a block at a time; yields its path. Raises ApiError 507.

        The file has no name in any folder, so that nothing is left of it, also after a kill.
        """
        block = bytearray()
        with tempfile.TemporaryFile(dir=self._folder) as file:
            with _full_disk():
                async for part in parts:
                    block += part
                    if len(block) >= _BLOCK:
                        await asyncio.to_thread(file.write, block)
                        block = bytearray()
                await asyncio.to_thread(file.write, block)
                await asyncio.to_thread(file.flush)
            yield f"/proc/self/fd/{file.fileno()}"


async def send(image: SnapshotImage, seconds: float) -> AsyncIterator[bytes]:
    """Yields the bytes of a snapshot. Raises TimeoutError after `seconds`.

    Only the next block is in memory, or a chunk that is longer.
    """
    deadline = time.monotonic() + seconds
    pieces = iter(range(image.pieces))

    def block() -> bytes:
        made: list[bytes] = []
        while sum(map(len, made)) < _BLOCK and (piece := next(pieces, None)) is not None:
            made.append(image.read_piece(piece))
        return made[0] if len(made) == 1 else b"".join(made)

    while made := await asyncio.to_thread(block):
        yield made
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
