"""How the snapshot files of a store are read, written and named: plain, or encrypted."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from kvpager import _core
from kvpager.errors import StorageError
from kvpager.stores.base import ByteRanges, RangesOpener
from kvpager.stores.encryption import (
    BLOCK_BYTES,
    HEADER_BYTES,
    TAG_BYTES,
    Secret,
    StoreKey,
    is_encrypted,
    stored_name,
)

_PATIENCE_SECONDS = 2.0  # for a writer that is about to release its file


class Access:
    """Opens and writes snapshot files.

    Args:
        opener: of files; None: they are local.
        secret: that they are encrypted with; None: they are plain.
        in_store: whether they are a directory store's: then their place in it is part of their
            encryption. Single files may be renamed, and may be plain.
    """

    def __init__(
        self,
        opener: RangesOpener | None = None,
        secret: Secret | StoreKey | None = None,
        *,
        in_store: bool = True,
    ) -> None:
        self.secret = secret
        self._below = opener
        self._in_store = in_store
        self._open_packs: weakref.WeakValueDictionary[str, LocalRanges] = (
            weakref.WeakValueDictionary()
        )

    def open(self, path: str, packs_folder: str = "") -> _core.SnapshotReader:
        """Opens a snapshot, or a pack by itself."""
        opener = self._below
        if self.secret is not None:

            def opener(file: str) -> ByteRanges:
                return self._plain(file, is_needed_pack=file != path)

        return _core.SnapshotReader.open(path, packs_folder, opener)

    def plain(self, below: ByteRanges, path: str) -> ByteRanges:
        """The plain bytes of a store's file, whose bytes are `below`.

        Raises:
            StorageError: it is another store's. CorruptSnapshotError: it is damaged.
        """
        return below if self.secret is None else self.secret.plain(below, path, self._place(path))

    def writer(
        self, path: str, layout: _core.Layout, reserve_bytes: int, mode: int
    ) -> _core.SnapshotWriter:
        """A writer of a new file; see `SnapshotWriter`."""
        cipher = None if self.secret is None else self.secret.cipher(self._place(path))
        return _core.SnapshotWriter(path, layout, reserve_bytes, mode, cipher)

    def file_bytes(self, plain_bytes: int) -> int:
        """No file of so many plain bytes is larger."""
        if self.secret is None or not plain_bytes:
            return plain_bytes
        return HEADER_BYTES + plain_bytes + (2 + plain_bytes // BLOCK_BYTES) * TAG_BYTES

    def file_front(self, plain_bytes: int) -> int:
        """Bytes of a file before its second block, where a plain one has so many."""
        return plain_bytes if self.secret is None else HEADER_BYTES + plain_bytes + TAG_BYTES

    @property
    def renames(self) -> bool:
        """Whether files have other names than their snapshots."""
        return isinstance(self.secret, Secret)

    def stored(self, name: str) -> str:
        """The name of a snapshot's files."""
        return stored_name(self.secret, name)

    def hide(self, text: str) -> str | bytes:
        """A text for the index, encrypted where files are."""
        return self.secret.hide(text) if isinstance(self.secret, Secret) else text

    def show(self, hidden: str | bytes) -> str:
        """The text of `hide`. Raises CorruptSnapshotError if it is damaged."""
        if isinstance(self.secret, Secret):
            return self.secret.show(hidden)
        return str(hidden)

    def _place(self, path: str) -> str:
        return "/".join(Path(path).parts[-2:]) if self._in_store else ""

    def _plain(self, path: str, *, is_needed_pack: bool) -> ByteRanges:
        assert self.secret is not None
        if self._below is not None:
            below = self._below(path)
        elif is_needed_pack:
            below = self._pack(path)
        else:
            below = LocalRanges(path)
        if not self._in_store and not is_encrypted(below):
            return below
        return self.plain(below, path)

    def _pack(self, path: str) -> LocalRanges:
        """A local pack, locked; one object for all readers."""
        known = self._open_packs.get(path)
        if known is None or not known.is_what_the_name_leads_to():
            known = self._open_packs[path] = LocalRanges(path, lock=True)
        return known


class LocalRanges:
    """The bytes of a local file. Raises StorageError if there is none.

    lock: hold a shared lock as long as the object lives, so that no collection removes the file.
    """

    def __init__(self, path: str, *, lock: bool = False) -> None:
        self._path = path
        try:
            self._file = _core.OwnedFile(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._finalizer = weakref.finalize(self, _release, self._file)
            if lock:
                self._lock()
            status = os.fstat(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{path}: cannot open the snapshot: {error.strerror}") from error
        self.size = status.st_size
        self._identity = (status.st_dev, status.st_ino, status.st_size)

    def _lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._file.lock(fcntl.LOCK_SH | fcntl.LOCK_NB):
            if time.monotonic() > deadline:
                raise StorageError(f"{self._path}: its writer does not end, or it is being removed")
            time.sleep(0.002)
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise StorageError(f"{self._path}: it was removed while it was opened")

    def is_what_the_name_leads_to(self) -> bool:
        """Whether the path is still this file's."""
        try:
            status = Path(self._path).stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino, status.st_size) == self._identity

    def read(self, offset: int, size: int) -> bytearray:
        """See `ByteRanges.read`."""
        data = bytearray(size)
        self._read_into(offset, memoryview(data))
        return data

    def _read_into(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self._file.fileno(), [out[done:]], offset + done)
            if count == 0:
                raise StorageError(f"{self._path}: it ends at {offset + done}, shorter than before")
            done += count

    def will_need(self, offset: int, size: int) -> None:
        """See `ByteRanges.will_need`."""
        os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)


def _release(file: _core.OwnedFile) -> None:
    file.unlock()
    file.close()
