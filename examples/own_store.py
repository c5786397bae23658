"""A store of your own: snapshots in a dict, where yours may use a database or an object store."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from kvpager import StorageError
from kvpager.stores import SaveReport, SnapshotContent, SnapshotImage, SnapshotReader, StoreEntry
from kvpager.testing import store_suite


class Held:
    """The bytes of one snapshot, read by range."""

    def __init__(self, data: bytes) -> None:
        self.size, self._data = len(data), data

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def will_need(self, offset: int, size: int) -> None:
        pass  # a remote store would begin to fetch them


class DictStore:
    """Snapshots by name, each one file in a dict."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def _held(self, name: str) -> Held:
        if name not in self._files:
            raise StorageError(f"no snapshot is called {name!r}")
        return Held(self._files[name])

    def save(
        self,
        name: str,
        content: SnapshotContent,
        *,
        fingerprint: str,
        session: str,
        progress: Callable[[int, int], None] | None = None,
        companions: Sequence[object] = (),  # only save time: a store may leave them out
        overwrite: bool = True,
    ) -> SaveReport:
        started = time.monotonic()
        image = SnapshotImage(content, fingerprint, session)
        data = bytearray()
        for piece in range(image.pieces):  # one behind the other they are the file
            data += image.read_piece(piece)
            if progress is not None:
                progress(len(data), image.file_bytes)
        self._files[name] = bytes(data)  # in one step: nobody sees half a snapshot
        return SaveReport(
            name=name,
            path=name,
            tokens=len(content.tokens),
            chunks=content.chunks,
            chunks_written=content.chunks,
            bytes_written=len(data),
            bytes_shared=0,
            logical_digest=image.logical_digest,
            seconds=time.monotonic() - started,
        )

    def open(self, name: str) -> SnapshotReader:
        return SnapshotReader.open(name, opener=self._held)  # which verifies all that it reads

    def find_prefix(self, hashes: Sequence[bytes]) -> SnapshotReader | None:
        readers = map(self.open, list(self._files))
        shared = ((reader, common(reader.chain_hashes, hashes)) for reader in readers)
        best, chunks = max(shared, key=lambda pair: pair[1], default=(None, 0))
        if best is None or chunks == 0:
            return None
        return SnapshotReader.gather([(best, chunk) for chunk in range(chunks)], best.path)

    def entries(self) -> list[StoreEntry]:
        return [
            StoreEntry(
                name=reader.path,
                path=reader.path,
                tokens=len(reader.tokens),
                chunks=reader.chunks,
                logical_digest=reader.logical_digest,
            )
            for reader in map(self.open, sorted(self._files))
        ]

    def delete(self, name: str) -> None:
        self._held(name)
        del self._files[name]


def common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many names two texts begin with that are the same."""
    equal = [x == y for x, y in zip(a, b)]
    return [*equal, False].index(False)


if __name__ == "__main__":
    for check in store_suite():
        files: dict[str, bytes] = {}
        check(functools.partial(DictStore, files))
        print("passed:", check.__name__.replace("_", " "))
