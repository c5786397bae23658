"""The file store: a snapshot is a file, whole in itself. For export, import and single sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvpager import _core
from kvpager.errors import InvalidArgumentError, PagerError, StorageError
from kvpager.stores.base import ProgressCallback, SaveReport, StoreEntry
from kvpager.stores.names import SNAPSHOT_SUFFIX


class FileStore:
    """Names are paths of files; relative ones are taken from `folder`.

    Args:
        folder: where relative names begin and what `entries` lists; None: the current folder, and
            nothing to list.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def save(
        self,
        name: str,
        content: _core.SnapshotContent,
        *,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None = None,
    ) -> SaveReport:
        """Writes one file that holds everything, atomically. See `SnapshotStore.save`."""
        started = time.monotonic()
        path = self._path(name)
        chunks = list(range(content.chunks))
        writer = _core.SnapshotWriter(path, content.layout)
        try:
            written = writer.write_content(content, chunks, fingerprint, session, progress)
            digest = writer.logical_digest
            writer.publish()
        finally:
            writer.discard()
        return SaveReport(
            name=os.fspath(name),
            path=path,
            tokens=len(content.tokens),
            chunks=len(chunks),
            chunks_written=len(chunks),
            bytes_written=written,
            bytes_shared=0,
            logical_digest=digest,
            seconds=time.monotonic() - started,
        )

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a file. See `SnapshotStore.open`."""
        return _core.SnapshotReader.open(self._path(name))

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """None: files are looked up by name alone."""
        del hashes
        return None

    def entries(self) -> list[StoreEntry]:
        """The snapshots of the folder, by file name.

        Raises:
            InvalidArgumentError: the store was made without a folder.
            StorageError: the folder cannot be read.
        """
        if self.folder is None:
            raise InvalidArgumentError("folder is None; entries() needs FileStore(folder)")
        try:
            files = [f for f in self.folder.iterdir() if f.suffix == SNAPSHOT_SUFFIX]
        except OSError as error:
            raise StorageError(f"{self.folder}: {error.strerror}") from error
        return [_entry(file) for file in sorted(files)]

    def delete(self, name: str) -> None:
        """Removes a file. See `SnapshotStore.delete`."""
        path = self._path(name)
        try:
            Path(path).unlink()
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error

    def _path(self, name: str | os.PathLike[str]) -> str:
        if not os.fspath(name):
            raise InvalidArgumentError("name is empty; expected the path of a file")
        return os.fspath(self.folder / name if self.folder is not None else name)

    def __repr__(self) -> str:
        return f"FileStore({'' if self.folder is None else repr(os.fspath(self.folder))})"


def _entry(file: Path) -> StoreEntry:
    path = os.fspath(file)
    try:
        status = file.stat()
        reader = _core.SnapshotReader.open(path)
    except (OSError, PagerError) as error:
        return StoreEntry(name=file.name, path=path, error=str(error))
    return StoreEntry(
        name=file.name,
        path=path,
        tokens=len(reader.tokens),
        chunks=reader.chunks,
        bytes_own=status.st_size,
        created=status.st_mtime,
        last_used=status.st_mtime,
        logical_digest=reader.logical_digest,
    )
