"""The file store: one self-contained file per snapshot. For export, import and single sessions.

Companions are files beside it: `chat.kvsnap.draft` belongs to `chat.kvsnap`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager._support.arguments import usable_path
from kvpager._support.section_json import section_or_empty
from kvpager.errors import InvalidArgumentError, PagerError, StorageError
from kvpager.stores.access import Access
from kvpager.stores.base import ProgressCallback, SaveReport, StoreEntry, tokens_of
from kvpager.stores.companions import (
    KINDS,
    CompanionSnapshot,
    companion_name,
    named_companions,
    owner_of,
    session_of_companion,
    session_of_primary,
)
from kvpager.stores.encryption import StoreKey, make_key
from kvpager.stores.files import PRIVATE, parse_mode, sync_folder
from kvpager.stores.lock import remove_dead_temporaries
from kvpager.stores.names import SNAPSHOT_SUFFIX
from kvpager.stores.origin import Origin
from kvpager.stores.segments import noted_segment

_log = logging.getLogger(__name__)


class FileStore:
    """Names are paths of files, relative to `folder`.

    Args:
        folder: start of relative names, and the folder that `entries` lists; None: the current
            folder, and `entries` raises.
        mode: permissions of new files, such as 0o640 or "640", regardless of the umask. A replaced
            file gains no permission that it lacked.
        key: encrypts new files and opens encrypted ones: a StoreKey, or 32 bytes. None: the key of
            KVPAGER_STORE_KEY or KVPAGER_STORE_KEY_FILE; without one new files are plain. Plain
            files are opened in any case.

    Raises:
        InvalidArgumentError: `mode` is no file mode that lets the owner read and write.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        mode: int | str = PRIVATE,
        key: StoreKey | bytes | None = None,
    ) -> None:
        self.mode = parse_mode("mode", mode)
        self._access = Access(secret=make_key(key), in_store=False)
        self.folder = None if folder is None else Path(usable_path(folder, "folder"))

    def save(
        self,
        name: str,
        content: _core.SnapshotContent,
        *,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None = None,
        companions: Sequence[CompanionSnapshot] = (),
        overwrite: bool = True,
    ) -> SaveReport:
        """Writes one file that holds everything, atomically. See `SnapshotStore.save`.

        Replaces any file at that path, also one of another salt or model.

        Companions get files of their own, published just before.
        """
        del overwrite
        path = self._path(name)
        with contextlib.ExitStack() as stack:
            written = [
                (companion.kind, part)
                for companion in companions
                if (part := self._write_companion(stack, name, companion, progress)) is not None
            ]
            beside = {kind: report for kind, (_, report) in written}
            session = session_of_primary(session, beside)
            writer, report = self._write(stack, name, content, fingerprint, session, progress)
            stale = [old for old in self._companions(path) if old.suffix[1:] not in beside]
            for _, (companion_writer, _) in written:
                companion_writer.publish()
            writer.publish()
        _remove(stale)
        remove_dead_temporaries(os.path.dirname(path) or ".")  # noqa: PTH120  # of any length
        return replace(report, companions=tuple(beside.values()))

    def _write_companion(
        self,
        stack: contextlib.ExitStack,
        name: str,
        companion: CompanionSnapshot,
        progress: ProgressCallback | None,
    ) -> tuple[_core.SnapshotWriter, SaveReport] | None:
        """Like `_write`; None if the companion cannot be saved."""
        owner = self._path(name)
        beside = companion_name(os.fspath(name), companion.kind)
        path = Path(self._path(beside))
        try:
            if os.path.exists(path) and path not in self._companions(owner):  # noqa: PTH110  # of any length
                raise InvalidArgumentError(f"{path} is there already and does not belong to {name}")
            session = session_of_companion(companion.session, Path(owner).name)
            return self._write(
                stack, beside, companion.content, companion.fingerprint, session, progress
            )
        except PagerError as error:
            _log.warning("%s is saved without its %s: %s", name, companion.kind, error)
            return None

    def _write(
        self,
        stack: contextlib.ExitStack,
        name: str,
        content: _core.SnapshotContent,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None,
    ) -> tuple[_core.SnapshotWriter, SaveReport]:
        """Writes a file without publishing it; `stack` removes it if it stays unpublished."""
        started = time.monotonic()
        path = self._path(name)
        chunks = list(range(content.chunks))
        writer = self._access.writer(path, content.layout, 0, self.mode)
        stack.callback(writer.discard)
        written = writer.write_content(content, chunks, fingerprint, session, progress)
        return writer, SaveReport(
            name=os.fspath(name),
            path=path,
            tokens=tokens_of(content, section_or_empty(session, path, "session")),
            chunks=len(chunks),
            chunks_written=len(chunks),
            bytes_written=written,
            bytes_shared=0,
            logical_digest=writer.logical_digest,
            seconds=time.monotonic() - started,
        )

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a file. See `SnapshotStore.open`."""
        return self._access.open(self._path(name))

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """Returns None: this store finds files by name only."""
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
        return [self._entry(file) for file in sorted(files)]

    def delete(self, name: str) -> None:
        """Removes a file and its companions' files, durably. See `SnapshotStore.delete`.

        Raises:
            StorageError: there is no such file, or a system call failed; also if the file was
                removed but a power failure could bring it back.
        """
        path = self._path(name)
        beside = self._companions(path)
        try:
            Path(path).unlink()
            _remove(beside)
            sync_folder(os.fspath(Path(path).parent))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error

    def _path(self, name: str | os.PathLike[str]) -> str:
        path = usable_path(name, "name")
        return path if self.folder is None else os.fspath(self.folder / path)

    def _companions(self, path: str) -> list[Path]:
        """The companions of the file at `path`: those that it names, and those that name it.

        One link is enough: both files may have been renamed, one may be damaged, or the primary may
        never have been published.
        """
        primary = self._opened(path)
        named = {} if primary is None else named_companions(_session_of(primary))
        found = []
        for kind in KINDS:
            beside = companion_name(path, kind)
            if not os.path.isfile(beside):  # noqa: PTH113  # no file has a name that long
                continue
            companion = self._opened(beside)
            if companion is None:
                bound = kind in named
            else:
                bound = (
                    owner_of(_session_of(companion)) == Path(path).name
                    or named.get(kind) == companion.logical_digest
                )
            if bound:
                found.append(Path(beside))
        return found

    def _opened(self, path: str) -> _core.SnapshotReader | None:
        """Opens a snapshot file; None if it cannot be read."""
        try:
            return self._access.open(path)
        except PagerError:
            return None

    def _entry(self, file: Path) -> StoreEntry:
        path = os.fspath(file)
        try:
            status = file.stat()
            reader = self._access.open(path)
            beside = self._companions(path)
            size = status.st_size + sum(companion.stat().st_size for companion in beside)
        except (OSError, PagerError) as error:
            return StoreEntry(name=file.name, path=path, error=str(error))
        session = _session_of(reader)
        return StoreEntry(
            name=file.name,
            path=path,
            tokens=tokens_of(reader, session),
            chunks=reader.chunks,
            bytes_own=size,
            created=status.st_mtime,
            last_used=status.st_mtime,
            logical_digest=reader.logical_digest,
            companions=tuple(companion.name for companion in beside),
            segment=noted_segment(session, len(reader.tokens), path),
            salt_digest=Origin.of(reader.fingerprint, session, path).salt,
        )

    def __repr__(self) -> str:
        return f"FileStore({'' if self.folder is None else repr(os.fspath(self.folder))})"


def _session_of(reader: _core.SnapshotReader) -> dict[str, Any]:
    return section_or_empty(reader.session, reader.path, "session")


def _remove(files: Iterable[Path]) -> None:
    """Removes files of companions without a primary."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:  # noqa: PERF203  # each by itself
            _log.warning("%s, which belongs to nothing any more: %s", file, error.strerror)
