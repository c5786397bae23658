"""The local folder of an object store: a directory store of what the bucket has.

    CACHE/mirror          a DirectoryStore: manifests and sidecars as they are in the bucket; packs
                          as sparse files, but those that were saved here
    CACHE/payload/<id>    what was fetched of a pack's payload; sparse
    CACHE/cache.sqlite3   which ranges are present (range_cache.py), and which version of which
                          object was copied

A copy is put in its place, and its version recorded, while the mirror's lock is held, and only if
nobody recorded another version of the object since the copy was asked for.

Names of snapshots are those of their files (`Access.stored`) wherever nothing else is said. Files
of an encrypted store are the encrypted bytes of the bucket's objects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpager import _core
from kvpager._support.arguments import usable_path
from kvpager._support.section_json import section_or_empty
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.stores import removal
from kvpager.stores.access import Access, LocalRanges
from kvpager.stores.base import ByteRanges
from kvpager.stores.bucket import Bucket, ObjectVersion, UnreachableError, at_once
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import KINDS
from kvpager.stores.directory import DirectoryStore
from kvpager.stores.encryption import Secret, StoreKey
from kvpager.stores.files import PRIVATE, make_folder, remove
from kvpager.stores.holes import require_holes
from kvpager.stores.local_database import LocalDatabase
from kvpager.stores.lock import exclusive
from kvpager.stores.names import (
    SIDECAR_SUFFIX,
    SNAPSHOT_SUFFIX,
    pack_of,
    sidecar_of,
    snapshot_of,
    temporary_name,
)
from kvpager.stores.origin import Origin
from kvpager.stores.range_cache import (
    FRONT_BYTES,
    Fetcher,
    PackFiles,
    PackRanges,
    Payload,
    RangeCache,
    metadata_start,
    pack_object,
)
from kvpager.stores.settings import StoreSettings

_log = logging.getLogger(__name__)

SNAPSHOTS = "snapshots/"
_BATCH = 200  # snapshots that are copied between two takings of the lock
_TABLE, _ENTRY = 64, 32  # of a snapshot file: where its section table is, and bytes of an entry
_FINGERPRINT, _SESSION, _PACKS = 4, 5, 9  # types of sections


def manifest_object(name: str) -> str:
    """The object of a snapshot's manifest."""
    return f"{SNAPSHOTS}{name}{SNAPSHOT_SUFFIX}"


def sidecar_object(name: str) -> str:
    """The object of a snapshot's sidecar."""
    return f"{SNAPSHOTS}{name}{SIDECAR_SUFFIX}"


def _section(file: bytes, wanted: int, where: str) -> bytes:
    """A section of a snapshot file; empty if it has none of this type."""
    metadata_start(file[:FRONT_BYTES], where)
    for entry in range(int.from_bytes(file[16:20], "little")):
        at = _TABLE + _ENTRY * entry
        if int.from_bytes(file[at : at + 2], "little") == wanted:
            start = int.from_bytes(file[at + 8 : at + 16], "little")
            return file[start : start + int.from_bytes(file[at + 16 : at + 24], "little")]
    return b""


def packs_of(manifest: bytes, where: str) -> list[str]:
    """Ids of the packs that a manifest needs; none of a self-contained file."""
    section = _section(manifest, _PACKS, where)
    count = int.from_bytes(section[:4], "little")
    ids = [section[8 + 24 * i : 24 + 24 * i] for i in range(min(count, 256))]
    return [f"{int.from_bytes(one, 'little'):032x}" for one in ids]


def origin_of(manifest: bytes, where: str) -> tuple[dict[str, Any], Origin]:
    """The parsed session section of a snapshot, and what it was saved under."""
    fingerprint = _section(manifest, _FINGERPRINT, where).decode("utf-8", "replace")
    session = _section(manifest, _SESSION, where).decode("utf-8", "replace")
    values = section_or_empty(session, where, "session")
    return values, Origin.of(fingerprint, values, where)


@dataclass
class _Beginning:
    """The first bytes of an object of `size` bytes, as those of a file."""

    data: bytes
    size: int

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def will_need(self, offset: int, size: int) -> None:
        pass


@dataclass
class _Copy:
    """A snapshot of the bucket, ready to be put in its place.

    Attributes:
        packs: paths of the files with front and metadata of packs, by id.
    """

    name: str
    data: bytes
    version: ObjectVersion
    packs: dict[str, str] = field(default_factory=dict)


class _MirrorCatalogue(Catalogue):
    """Forgets what is cached of a pack when its file goes."""

    def __init__(self, folder: str, access: Access, removed: Callable[[str], None]) -> None:
        super().__init__(folder, access)
        self._removed = removed

    def expired(self, now_ns: int, ttl_seconds: float | None) -> list[str]:
        return []  # a mirror has what the bucket has; `ObjectStore.gc` removes it there

    def orphans(self) -> list[str]:
        return []

    def remove_pack(self, pack: str) -> None:
        super().remove_pack(pack)
        self._removed(pack)


class Mirror:
    """The local copy of a bucket. Used by any number of threads and processes.

    Attributes:
        access: opens and writes its files.
        store: the directory store.
        cache: which payload is present.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: str | os.PathLike[str],
        pool: ThreadPoolExecutor,
        *,
        cache_bytes: int | None,
        ttl_seconds: float | None,
        lock_timeout: float,
        secret: Secret | None,
    ) -> None:
        """`secret`: that the bucket's objects are encrypted with; None: they are plain."""
        self.access = Access(self.opened, secret)
        self._bucket = bucket
        self._pool = pool
        self._lock_timeout = lock_timeout
        self.folder = os.path.abspath(usable_path(folder, "cache"))  # noqa: PTH100  # keeps links
        Path(self.folder).parent.mkdir(parents=True, exist_ok=True)
        make_folder(self.folder, PRIVATE)
        make_folder(f"{self.folder}/incoming", PRIVATE)
        require_holes(self.folder)
        self._database = LocalDatabase(f"{self.folder}/cache.sqlite3")
        self._claim()
        self._packs = f"{self.folder}/mirror/packs"
        self.cache = RangeCache(self._database, self.folder, self._packs, cache_bytes, self.access)
        self._fetcher = Fetcher(bucket, self.cache, pool)
        ttl: float | str = "never" if ttl_seconds is None else ttl_seconds
        self.store = MirrorStore(self, f"{self.folder}/mirror", ttl, lock_timeout, secret)

    def _claim(self) -> None:
        """Makes the folder this bucket's; clears it if its database was removed."""
        with self._database.transaction() as database:
            (address,) = database.execute("SELECT address FROM state").fetchone()
            if address and address != self._bucket.address:
                raise InvalidArgumentError(
                    f"cache is {self.folder!r}, which is the cache of {address}; expected another "
                    f"folder for {self._bucket.address}"
                )
            if not address:
                for place in ("mirror", "payload"):
                    if Path(self.folder, place).exists():
                        _log.warning("%s: its database is gone; it is cleared", self.folder)
                        shutil.rmtree(f"{self.folder}/{place}")
            database.execute("UPDATE state SET address = ?", (self._bucket.address,))

    def opened(self, path: str) -> ByteRanges:
        """The bytes of a snapshot's or a pack's file, for a reader."""
        pack = pack_of(os.path.basename(path))  # noqa: PTH119  # of native code
        if pack is None or not path.startswith(f"{self._packs}/"):
            return LocalRanges(path)
        files = PackFiles(pack, path, self.cache.payload_path(pack))
        return PackRanges(self._fetcher, files, path, self.access)

    def plain(self, path: str, data: bytes) -> bytes:
        """The plain bytes of an object. Raises StorageError, CorruptSnapshotError."""
        plain = self.access.plain(_Beginning(data, len(data)), f"{self._bucket.address}/{path}")
        return bytes(plain.read(0, plain.size))

    def shown(self, names: Iterable[str]) -> list[str]:
        """The names that users know snapshots by."""
        with self.locked() as catalogue:
            return catalogue.shown_names(names)

    # What was copied of the bucket.

    def recorded(self, path: str) -> ObjectVersion | None:
        """The version of an object that was copied, or uploaded."""
        rows = self._database.rows("SELECT * FROM object WHERE path = ?", (path,))
        return _version(rows[0]) if rows else None

    def record(self, versions: Iterable[ObjectVersion]) -> None:
        """Records versions of objects. Of copies: while the mirror's lock is held."""
        with self._database.transaction() as database:
            database.execute("UPDATE state SET serial = serial + 1")
            database.executemany(
                "INSERT OR REPLACE INTO object SELECT ?, ?, ?, ?, ?, serial FROM state",
                [(one.path, one.size, one.etag, one.generation, one.modified) for one in versions],
            )

    def forget(self, *paths: str) -> None:
        """Forgets the versions of objects, which are then copied again."""
        with self._database.transaction() as database:
            database.executemany("DELETE FROM object WHERE path = ?", [(one,) for one in paths])

    def _serial(self) -> int:
        return int(self._database.rows("SELECT serial FROM state")[0][0])

    def _is_newer(self, path: str, serial: int) -> bool:
        sql = "SELECT 1 FROM object WHERE path = ? AND serial > ?"
        return bool(self._database.rows(sql, (path, serial)))

    # Snapshots that are saved here and not yet in the bucket.

    def pending(self) -> dict[str, tuple[bool, str | None]]:
        """Their names, whether each may replace any other, and why it cannot be uploaded."""
        rows = self._database.rows("SELECT * FROM pending ORDER BY name")
        return {
            row["name"]: (
                bool(row["overwrite"]),
                None if row["error"] is None else self.access.show(row["error"]),
            )
            for row in rows
        }

    def is_pending(self, name: str) -> bool:
        """Whether the snapshot, or the one that it is a companion of, is one of them."""
        names = [name, *(name.removesuffix(f".{kind}") for kind in KINDS)]
        sql = f"SELECT 1 FROM pending WHERE name IN ({', '.join('?' * len(names))})"
        return bool(self._database.rows(sql, names))

    def set_pending(self, name: str, *, overwrite: bool, error: str | None = None) -> None:
        """Adds a name, or the error of one."""
        with self._database.transaction() as database:
            sql = "INSERT OR REPLACE INTO pending VALUES (?, ?, ?)"
            hidden = None if error is None else self.access.hide(error)
            database.execute(sql, (name, overwrite, hidden))

    def clear_pending(self, name: str) -> None:
        """Removes a name."""
        with self._database.transaction() as database:
            database.execute("DELETE FROM pending WHERE name = ?", (name,))

    # Copying.

    def refresh(self) -> None:
        """Brings all snapshots and sidecars up to date with the bucket."""
        serial = self._serial()
        there = {one.path: one for one in self._bucket.list(SNAPSHOTS)}
        sql = "SELECT * FROM object WHERE path >= 'snapshots/' AND path < 'snapshots0'"
        known = {row["path"]: (_version(row), row["serial"]) for row in self._database.rows(sql)}
        changed = [
            name
            for path, version in there.items()
            if (name := snapshot_of(path.removeprefix(SNAPSHOTS))) is not None
            and (path not in known or known[path][0].etag != version.etag)
        ]
        for start in range(0, len(changed), _BATCH):
            self.copy(changed[start : start + _BATCH])
        notes = [
            version
            for path, version in there.items()
            if sidecar_of(path.removeprefix(SNAPSHOTS)) is not None
            and (path not in known or known[path][0].modified != version.modified)
        ]
        for start in range(0, len(notes), _BATCH):
            self._copy_sidecars(notes[start : start + _BATCH], serial)
        gone = [path for path, (_, since) in known.items() if path not in there and since <= serial]
        if gone:
            self._drop(gone, serial)

    def refresh_one(self, name: str) -> None:
        """Brings one snapshot up to date with the bucket."""
        path = manifest_object(name)
        serial = self._serial()
        there = self._bucket.head(path)
        known = self.recorded(path)
        if there is None:
            if known is not None:
                self._drop([path, sidecar_object(name)], serial)
            return
        if known is None or known.etag != there.etag:
            self.copy([name])
        with self.store.locked() as (catalogue, settings, now_ns):
            snapshot = catalogue.snapshot(name)
        # Others may have used one that seems to have expired.
        if snapshot is None or (known and not snapshot.expired(now_ns, settings.ttl_seconds)):
            return
        if (note := self._bucket.head(sidecar_object(name))) is not None:
            self._copy_sidecars([note], serial)

    def copy(self, names: Iterable[str]) -> None:
        """Copies these snapshots from the bucket, as far as they are still there."""
        serial = self._serial()
        found = [one for one in at_once(self._pool, self._fetch, names) if one is not None]
        try:
            with self.locked() as catalogue:
                for one in found:
                    if self._is_newer(one.version.path, serial) or self.is_pending(one.name):
                        continue
                    for pack, temporary in one.packs.items():
                        self._place_pack(catalogue, pack, temporary)
                    self._place(catalogue.manifest_path(one.name), one.data, one.version.modified)
                    catalogue.add_snapshot(one.name)
                    self.record([one.version])
                removal.remove_unneeded_packs(catalogue)
        finally:
            for one in found:
                for temporary in one.packs.values():
                    remove(temporary)

    def _fetch(self, name: str) -> _Copy | None:
        path = manifest_object(name)
        for last in (False, True):  # it may be replaced, and its old packs removed, meanwhile
            there = self._bucket.get(path)
            if there is None:
                return None
            copy = _Copy(name, *there)
            try:
                needed = packs_of(self.plain(path, copy.data), f"{self._bucket.address}/{path}")
            except PagerError:  # it is listed with its error
                return copy
            try:
                with self.locked() as catalogue:
                    tables = {pack: catalogue.pack(pack) for pack in needed}
                for pack, table in tables.items():
                    if table is None or table.error:
                        copy.packs[pack] = self._fetch_pack(pack)
            except CorruptSnapshotError:  # it is listed with its error
                return copy
            except UnreachableError:
                raise
            except StorageError:  # likewise, if the pack is not whole at the second look either
                if last:
                    return copy
            else:
                return copy
        return None

    def _fetch_pack(self, pack: str) -> str:
        """Makes a sparse file with a pack's front and metadata; returns its path."""
        size, parts = self._front_and_metadata(pack)
        temporary = f"{self.folder}/incoming/{temporary_name()}"
        with _core.OwnedFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            os.ftruncate(file.fileno(), size)
            for start, data in parts.items():
                os.pwrite(file.fileno(), data, start)
        return temporary

    def _front_and_metadata(self, pack: str) -> tuple[int, dict[int, Any]]:
        """The size of a pack, and its bytes before and behind the payload, by their offsets."""
        path = pack_object(pack)
        where = f"{self._bucket.address}/{path}"
        front = bytes(self._bucket.get_range(path, 0, self.access.file_front(FRONT_BYTES)))
        size = len(front)
        if self.access.secret is not None:  # the front says how long the plain bytes are
            there = self._bucket.head(path)
            if there is None:
                raise StorageError(f"{where}: no longer in the bucket")
            size = there.size
        try:
            _, start, size = Payload.of(_Beginning(front, size), where, self.access)
        except StorageError as error:  # of another store
            raise CorruptSnapshotError(str(error)) from error
        return size, {0: front, start: self._bucket.get_range(path, start, size - start)}

    def mend(self, pack: str) -> None:
        """Fetches again what a pack's own file has of the bucket's."""
        if self.recorded(pack_object(pack)) is None:  # it is not there yet
            return
        _, parts = self._front_and_metadata(pack)
        with self.locked() as catalogue:
            with _core.OwnedFile(catalogue.pack_path(pack), os.O_RDWR | os.O_NOFOLLOW) as file:
                for start, data in parts.items():
                    os.pwrite(file.fileno(), data, start)
            catalogue.add_pack(pack)
            catalogue.add_damage(pack)

    def _place_pack(self, catalogue: Catalogue, pack: str, temporary: str) -> None:
        there = catalogue.pack(pack)
        if there is not None and not there.error:
            return
        if there is not None:
            self.cache.forget(pack)
        os.rename(temporary, catalogue.pack_path(pack))  # noqa: PTH104
        catalogue.add_pack(pack)
        self.record([ObjectVersion(pack_object(pack), 0, "", None, 0.0)])

    def _place(self, path: str, data: bytes, modified: float) -> None:
        """Puts a small file in its place, with the time of its object."""
        temporary = f"{self.folder}/incoming/{temporary_name()}"
        with _core.OwnedFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
            os.write(file.fileno(), data)
            os.utime(file.fileno(), ns=(int(modified * 1e9),) * 2)
        os.rename(temporary, path)  # noqa: PTH104

    def _copy_sidecars(self, versions: list[ObjectVersion], serial: int) -> None:
        found = at_once(self._pool, lambda one: self._bucket.get(one.path), versions)
        with self.locked() as catalogue:
            for there in found:
                if there is None or self._is_newer(there[1].path, serial):
                    continue
                data, version = there
                name = str(sidecar_of(version.path.removeprefix(SNAPSHOTS)))
                snapshot = catalogue.snapshot(name)
                used = 0.0 if snapshot is None else snapshot.last_used_ns / 1e9
                if snapshot is not None:
                    path = catalogue.sidecar_path(name)
                    self._place(path, data, max(version.modified, used))
                    catalogue.add_note(name)
                self.record([version])

    def _drop(self, paths: list[str], serial: int) -> None:
        """Removes the copies of objects that are gone from the bucket."""
        with self.locked() as catalogue:
            gone = []
            for path in paths:
                file = path.removeprefix(SNAPSHOTS)
                name = snapshot_of(file)
                if self._is_newer(path, serial) or (name and self.is_pending(name)):
                    continue
                if name is not None:
                    gone.append(name)
                elif (note := sidecar_of(file)) is not None and catalogue.snapshot(note):
                    remove(catalogue.sidecar_path(note))
                    catalogue.add_note(note)
                self.forget(path)
            removal.remove_snapshots(catalogue, gone)

    def uploading(self) -> _core.ExclusiveLock:
        """Held by who uploads a pending snapshot, and waited for by who deletes one."""
        return exclusive(f"{self.folder}/uploading", self._lock_timeout)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Catalogue]:
        """Holds the mirror's lock."""
        with self.store.locked() as (catalogue, _, _):
            yield catalogue

    @staticmethod
    def expired(
        catalogue: Catalogue, now_ns: int, ttl_seconds: float | None, leased: Set[str]
    ) -> list[str]:
        """Names of expired snapshots that no writer is at. now_ns: by the bucket's clock."""
        found = Catalogue.expired(catalogue, now_ns, ttl_seconds)
        return [name for name in found if name not in leased]

    @staticmethod
    def orphans(catalogue: Catalogue, leased: Set[str]) -> list[str]:
        """Names of companions that belong to no snapshot and that no writer is at."""
        return [name for name in Catalogue.orphans(catalogue) if name not in leased]


class MirrorStore(DirectoryStore):
    """The directory store of a mirror; readers of its packs fetch what is missing."""

    def __init__(
        self,
        mirror: Mirror,
        path: str,
        ttl: float | str,
        lock_timeout: float,
        secret: Secret | None,
    ) -> None:
        self._mirror = mirror
        self._buckets_secret = secret
        super().__init__(path, ttl=ttl, lock_timeout=lock_timeout)

    def _key(self, key: StoreKey | bytes | None) -> StoreKey | None:
        del key
        return None  # the bucket has the secret

    def _secret(self, key: StoreKey | None, *, is_given: bool) -> Secret | None:
        del key, is_given
        return self._buckets_secret

    def _new_catalogue(self, access: Access) -> Catalogue:
        del access
        mirror = self._mirror
        return _MirrorCatalogue(self.path, mirror.access, mirror.cache.removed)

    def locked(self) -> AbstractContextManager[tuple[Catalogue, StoreSettings, int]]:
        """Holds its lock for a `with` block."""
        return self._locked()


def _version(row: Any) -> ObjectVersion:
    return ObjectVersion(row["path"], row["size"], row["etag"], row["generation"], row["modified"])
