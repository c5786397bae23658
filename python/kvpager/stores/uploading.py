"""Saves into a bucket: at once, or from the folder later. See leases.py for their protocol."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.stores import removal
from kvpager.stores.bucket import ConflictError, ObjectVersion, UnreachableError, at_once
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import (
    KINDS,
    CompanionSnapshot,
    companion_name,
    named_companions,
    owner_of,
)
from kvpager.stores.leases import Lease, condemned_packs
from kvpager.stores.mirror import manifest_object, origin_of
from kvpager.stores.range_cache import pack_object
from kvpager.stores.saving import GroupSaving, Saving
from kvpager.stores.tables import Snapshot, Stamp

if TYPE_CHECKING:
    from kvpager.stores.object import ObjectStore

_log = logging.getLogger(__name__)

_MOST_TRIES = 100  # of replacing a manifest that others replace too
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # between tries of an upload that is not waited for


class BucketSaving(GroupSaving):
    """Saves into the mirror and into the bucket.

    Call write_companions and write; then upload, unless that is left for later, and publish_here.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        *,
        overwrite: bool,
        later: bool = False,
        avoided: Set[str] = frozenset(),
        source: Snapshot | None = None,
    ) -> None:
        """`later`: the upload is left for later. avoided: packs that are not shared.

        source: the pending snapshot that is uploaded.
        """
        self._store = store
        self._mirror = store.mirror
        access = self._mirror.access
        super().__init__(self._mirror.store.locked, name, access, overwrite=overwrite)
        self._file = access.stored(name)
        self._avoided |= avoided
        self._later = later
        self._source = source
        self._upload = self._stack.enter_context(Upload(store))
        self._rooms: dict[str, int] = {}  # rows of the cache, by pack
        self._stack.callback(self._give_room_back)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.undo()
        super().__exit__(kind, error, trace)

    def _may_write(self, saving: Saving) -> bool:
        shared = saving.plan.shared_packs
        try:
            bad = self._upload.plan(saving.name, shared, saving.pack_id)
        except UnreachableError:
            if not self._later:
                raise
            bad = {pack for pack in shared if not self._mirror.cache.is_whole(pack)}
        if bad:
            self._avoided |= bad
            return False
        if saving.pack_bytes:
            size = self._access.file_bytes(saving.pack_bytes)
            room = self._mirror.cache.require_room(saving.pack_id, size)
            self._rooms[saving.pack_id] = room
        return True

    def upload(self) -> None:
        """Uploads the packs, then the manifests, the primary's last."""
        for part in self._parts:
            if part.pack_file is not None:
                self._upload.pack(part.pack_id, part.pack_file)
        for part in self._parts:
            data = Path(part.manifest_file).read_bytes()
            self._upload.manifest(part.name, data, part.check_taker)
        self._store.delete_objects(self._stale())

    def _stale(self) -> list[str]:
        """Names of companions that the snapshot had and has no more."""
        had = {companion_name(self._file, kind) for kind in KINDS}
        had -= {part.name for part in self._parts}
        known = self._upload.companions
        return [one for one in had if one in known or self._mirror.recorded(manifest_object(one))]

    def publish_here(self) -> None:
        """Makes it visible in the mirror, unless that has a later one already."""
        with self._locked() as (catalogue, settings, now_ns):
            there = catalogue.snapshot(self._file)
            if self._source is not None and _stamp(there) != _stamp(self._source):
                self._mirror.record(self._upload.written)  # another one is pending by now
                return
            if self._source is None and not self._later and not self._upload.is_latest():
                return
            if self._later:
                self._mirror.set_pending(self._file, overwrite=self._overwrite)
            parts = self._parts
            replaced = self.publish(catalogue, settings, now_ns)
            self._mirror.store.after_publishing(catalogue, self._name, replaced)
            removal.remove_snapshots(catalogue, self._gone(catalogue))
            for part in parts:
                if (row := self._rooms.pop(part.pack_id, None)) is not None:
                    self._mirror.cache.written(row, part.pack_id)
            self._mirror.record(self._upload.written)
            if not self._later:
                self._mirror.clear_pending(self._file)

    def _gone(self, catalogue: Catalogue) -> list[str]:
        """Those companions in the mirror that the snapshot has no more."""
        had = {companion_name(self._file, kind) for kind in KINDS}
        return [one for one in Catalogue.orphans(catalogue) if one in had]

    def _give_room_back(self) -> None:
        for row in self._rooms.values():
            self._mirror.cache.release(row)
        self._rooms.clear()


class Upload:
    """One writer's part of the protocol in leases.py. A context manager, which ends the lease.

    Attributes:
        written: versions of the objects that were written.
        companions: names of companions that other writers' snapshots, which are replaced, have.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._bucket = store.bucket
        self._mirror = store.mirror
        self._pool = store.pool
        self._lease = Lease(self._bucket, store.lease_seconds)
        self._seen: dict[str, list[ObjectVersion | None]] = {}  # of each manifest; the last is now
        self._shared: dict[str, set[str]] = {}  # packs of each snapshot that were there before
        self.written: list[ObjectVersion] = []
        self.companions: set[str] = set()

    def plan(self, name: str, shared: set[str], new: str) -> set[str]:
        """Leases the packs of a snapshot; returns those of `shared` that it cannot have.

        new: the pack that will be uploaded for it.
        """
        with self._mirror.locked() as catalogue:
            recorded = self._mirror.recorded(manifest_object(name))
            replaced = catalogue.snapshot(name)
        proven: set[str] = set()
        if recorded is not None and replaced is not None and not self._mirror.is_pending(name):
            proven = set(replaced.manifest.uses)
        self._seen[name] = [recorded]
        self._shared[name] = shared
        self._lease.cover({*shared, new}, {name})
        condemned, _ = condemned_packs(self._bucket)
        # The manifest that is replaced needs these until then: the write succeeds on no other.
        return (shared & condemned.keys()) or self._missing(shared - proven)

    def _missing(self, packs: Iterable[str]) -> set[str]:
        """Those packs that are not in the bucket; uploads those that are whole here."""
        packs = list(packs)
        there = at_once(self._pool, self._bucket.head, map(pack_object, packs))
        missing = set()
        for pack, version in zip(packs, there):
            path = pack_object(pack)
            if version is None:
                self._mirror.forget(path)  # so that it stays whole
                if not self._mirror.cache.is_whole(pack):
                    missing.add(pack)
                else:
                    with self._mirror.locked() as catalogue:
                        file = catalogue.pack_path(pack)
                    self.pack(pack, file)
            self._mirror.record([_uploaded(path)])
        return missing

    def pack(self, pack: str, file: str) -> None:
        """Uploads a pack."""
        path = pack_object(pack)
        self._bucket.upload(path, file, self._lease.renew)
        self.written.append(_uploaded(path))

    def manifest(self, name: str, data: bytes, check: Callable[..., None]) -> None:
        """Publishes a manifest (P). check: raises if another writer's snapshot must stay."""
        path = manifest_object(name)
        seen = self._seen[name]
        for tries in range(_MOST_TRIES):
            self._lease.renew()
            try:
                self.written.append(self._bucket.replace(path, data, seen[-1]))
            except ConflictError:
                time.sleep(random.uniform(0, 0.01 * min(tries, 20)))
            else:
                return
            there = self._bucket.get(path)
            if there is not None:
                data_there = self._mirror.plain(path, there[0])
                session, origin = origin_of(data_there, f"{self._bucket.address}/{path}")
                check(owner_of(session), origin)
                self.companions.update(
                    companion_name(name, kind) for kind in named_companions(session)
                )
            seen.append(None if there is None else there[1])
            if missing := self._missing(self._shared[name]):
                raise StorageError(
                    f"{self._bucket.address}/{path}: packs {sorted(missing)} were deleted while it "
                    "was saved; save again"
                )
        raise StorageError(
            f"{self._bucket.address}/{path}: replaced by others {_MOST_TRIES} times while it was "
            "saved; save again"
        )

    def is_latest(self) -> bool:
        """Whether the mirror knows of no later version. REQUIRES: the mirror's lock."""
        return all(
            _etag(self._mirror.recorded(manifest_object(name))) in map(_etag, seen)
            for name, seen in self._seen.items()
        )

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.end()


class Uploader:
    """Uploads what is pending, in a thread of its own that ends when nothing is left."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._mirror = store.mirror
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = self._has_more = False

    def wake(self) -> None:
        """Begins to upload."""
        with self._changed:
            self._has_more = True
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def flush(self, timeout: float | None) -> None:
        """See `ObjectStore.flush`."""
        with self._changed:
            if not self._mirror.pending():
                return
        self.wake()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not self._left(), timeout)
            if left := self._mirror.pending():
                why = [error or "not uploaded yet" for _, error in left.values()]
                (name,) = self._mirror.shown([next(iter(left))])
                raise StorageError(
                    f"{self._store.address}: {len(left)} snapshots are not in the bucket yet, "
                    f"such as {name!r}: {why[0]}"
                )

    def _left(self) -> list[tuple[str, bool]]:
        pending = self._mirror.pending().items()
        return [(name, overwrite) for name, (overwrite, error) in pending if error is None]

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                if self._is_closed or not self._has_more:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._has_more = False
            failed = sum(self._try(name, overwrite) for name, overwrite in self._left())
            with self._changed:
                self._changed.notify_all()
                if failed:
                    self._has_more = True
                    self._changed.wait_for(lambda: self._is_closed, pause)
                pause = min(2 * pause, _LONGEST_PAUSE) if failed else _FIRST_PAUSE

    def _try(self, name: str, overwrite: bool) -> bool:
        """Uploads a snapshot; returns whether that is to be tried again."""
        if self._is_closed:
            return False
        try:
            with self._mirror.uploading():
                self._upload(name, overwrite=overwrite)
        except (InvalidArgumentError, CorruptSnapshotError) as error:
            _log.error("%s is not uploaded: %s", *self._mirror.shown([name]), error)
            self._mirror.set_pending(name, overwrite=overwrite, error=str(error))
        except (PagerError, OSError) as error:
            _log.warning("%s is uploaded later: %s", *self._mirror.shown([name]), error)
            return True
        return False

    def _upload(self, name: str, *, overwrite: bool) -> None:
        """Saves a snapshot again, all of whose chunks are here, and its companions."""
        if not self._mirror.is_pending(name):  # another one has uploaded it
            return
        with self._mirror.locked() as catalogue:
            source = catalogue.snapshot(name)
            if source is None:  # it was deleted, or never published
                self._mirror.clear_pending(name)
                return
            names = {one.manifest.name for one in catalogue.companions(name)}
            readers = {one: catalogue.open(catalogue.manifest_path(one)) for one in names}
            reader = catalogue.open(source.manifest.path)
            shown = catalogue.shown(source)
        companions = [
            CompanionSnapshot(one.rpartition(".")[2], part, part.fingerprint, part.session)
            for one, part in readers.items()
        ]
        with BucketSaving(self._store, shown, overwrite=overwrite, source=source) as saving:
            saving.write_companions(companions, None)
            saving.write(reader, reader.fingerprint, reader.session, None)
            saving.upload()
            saving.publish_here()
        with self._mirror.locked() as catalogue:
            is_deleted = catalogue.snapshot(name) is None
        if is_deleted and not self._mirror.is_pending(name):
            self._store.delete_objects([*names, name])

    def close(self) -> None:
        """Ends the thread, once it has uploaded what it is at."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()


def _uploaded(path: str) -> ObjectVersion:
    """The record of an object that never changes."""
    return ObjectVersion(path, 0, "", None, 0.0)


def _etag(version: ObjectVersion | None) -> str | None:
    return None if version is None else version.etag


def _stamp(snapshot: Snapshot | None) -> Stamp | None:
    return None if snapshot is None else snapshot.manifest.stamp
