"""The object store: snapshots in a bucket of S3, GCS or Azure, cached in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvpager import _core
from kvpager._support.arguments import as_flag, is_number
from kvpager._support.option_table import parse_bytes
from kvpager._support.process import MadeIn
from kvpager.errors import (
    CorruptSnapshotError,
    InvalidArgumentError,
    PagerError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.stores import removal
from kvpager.stores.base import GcReport, ProgressCallback, SaveReport, StoreEntry
from kvpager.stores.bucket import Bucket, ConflictError, ObjectVersion, UnreachableError
from kvpager.stores.bucket_journals import BucketJournals
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import (
    CompanionSnapshot,
    companion_name,
)
from kvpager.stores.encryption import Secret, StoreKey, make_key, new_secret, secret_of
from kvpager.stores.leases import Collector
from kvpager.stores.lock import TIMEOUT_SECONDS, checked_timeout
from kvpager.stores.mirror import Mirror, manifest_object, sidecar_object
from kvpager.stores.names import check_name, pack_of
from kvpager.stores.range_cache import pack_object
from kvpager.stores.settings import UNLIMITED, is_duration, parse_ttl
from kvpager.stores.sharing import longest_prefix
from kvpager.stores.tables import Sidecar, hashes_of
from kvpager.stores.uploading import BucketSaving, Uploader

_log = logging.getLogger(__name__)

_SETTINGS = "store.json"
_VERSION = 1
_THREADS = 16  # requests of one store object at a time


class ObjectStore:
    """Snapshots in a bucket, which any number of machines use at once; see docs/stores.md.

    Like `DirectoryStore`, it is no access control. What is read is fetched by range and cached in a
    folder; what is saved shares chunks with what is known there.

    Args:
        address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX, or a store
            object of the package obstore.
        cache: folder of the cache, made if it does not exist. Threads and processes may share it.
        cache_bytes: most bytes of K/V in the cache, at every instant; an int, a size such as
            "20GiB", or "unlimited". Tokens and other metadata of all snapshots come on top.
        ttl: how long a snapshot lives after its last use; seconds, a duration such as "7d", or
            "never". None: the store's recorded setting, "never" in a new one.
        create: whether to make a store where there is none.
        options: of the service, such as endpoint, region and keys; obstore's names. None: those of
            the environment.
        key: encrypts all objects of a new store, and what the cache has of them, and opens an
            encrypted one; as in `DirectoryStore`.
        write_back: whether `save` returns once the snapshot is in the folder; it is uploaded in the
            background, `flush` waits for that.
        refresh_seconds: how old a listing `find_prefix` may use, to know of the snapshots of other
            machines, before another one is begun in the background; 0: each call waits for one.
        retry_seconds: for how long a failing request is repeated before StorageError is raised.
        timeout: seconds without an answer after which a request has failed.
        lease_seconds: how long a lease of a writer that died protects what it was writing.
        lock_timeout: as in `DirectoryStore`, for the folder.

    Raises:
        InvalidArgumentError: an argument is out of range, or the folder is another bucket's cache;
            or an encrypted store is opened without a key, or another one with a key.
        StorageError: the package obstore is missing, or the bucket cannot be used, or it is
            encrypted with another key.
        UnsupportedVersionError: a newer version made the store.

    Example:
        >>> store = ObjectStore("s3://agents/a", cache="/var/cache/kvpager", cache_bytes="20GiB")
        >>> session.save("planner", store=store)
    """

    def __init__(
        self,
        address: object,
        *,
        cache: str | os.PathLike[str],
        cache_bytes: int | str = UNLIMITED,
        ttl: float | str | None = None,
        create: bool = True,
        options: Mapping[str, Any] | None = None,
        key: StoreKey | bytes | None = None,
        write_back: bool = False,
        refresh_seconds: float = 60.0,
        retry_seconds: float = 10.0,
        timeout: float = 10.0,
        lease_seconds: float = 3600.0,
        lock_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._write_back = as_flag(write_back, "write_back")
        self._refresh_seconds = _seconds("refresh_seconds", refresh_seconds)
        self.lease_seconds = _seconds("lease_seconds", lease_seconds)
        budget = None if cache_bytes == UNLIMITED else parse_bytes("cache_bytes", cache_bytes)
        wanted = None if ttl is None else parse_ttl("ttl", ttl)
        self.bucket = Bucket(
            address,
            options,
            retry_seconds=_seconds("retry_seconds", retry_seconds),
            timeout=_seconds("timeout", timeout),
        )
        self.address = self.bucket.address
        self._made_in = MadeIn()
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpager-bucket")
        self._ttl_seconds, secret = self._settle(
            wanted, key, given=ttl is not None, create=as_flag(create, "create")
        )
        self.mirror = Mirror(
            self.bucket,
            cache,
            self.pool,
            cache_bytes=budget,
            ttl_seconds=self._ttl_seconds,
            lock_timeout=checked_timeout("lock_timeout", lock_timeout),
            secret=secret,
        )
        self.journals = BucketJournals(self.bucket, secret)
        self._lock = threading.Lock()
        self._refreshed = float("-inf")
        self._refreshing: Future[None] | None = None
        self._uploader = Uploader(self)
        if self.mirror.pending():
            self._uploader.wake()

    def _settle(
        self, ttl_seconds: float | None, key: StoreKey | bytes | None, *, given: bool, create: bool
    ) -> tuple[float | None, Secret | None]:
        """Reads the store's settings, or makes it a store; returns its time to live and secret."""
        found, is_given = make_key(key), key is not None
        while True:
            settings, version = self._settings()
            if version is None and not create:
                raise StorageError(f"{self.address}: there is no store here; create=True makes one")
            if version is None:
                wrapped = None if found is None else found.wrap(new_secret())
                changed = _Settings(ttl_seconds, wrapped)
            else:
                ttl = ttl_seconds if given else settings.ttl_seconds
                changed = dataclasses.replace(settings, ttl_seconds=ttl)
            secret = secret_of(
                self.address, changed.encryption, found, is_given=is_given, file=self._settings_file
            )
            with contextlib.suppress(ConflictError):
                if version is None or changed != settings:
                    self.bucket.replace(_SETTINGS, changed.text(), version)
                return changed.ttl_seconds, secret

    @property
    def _settings_file(self) -> str:
        return f"{self.address}/{_SETTINGS}"

    def _settings(self) -> tuple[_Settings, ObjectVersion | None]:
        """The settings in the bucket and their version; None if it is no store yet."""
        there = self.bucket.get(_SETTINGS)
        if there is None:
            return _Settings(), None
        return _Settings.of(there[0], self._settings_file), there[1]

    def rewrap(self, key: StoreKey | bytes) -> None:
        """Makes the first of these the store's key; see `DirectoryStore.rewrap`."""
        given = make_key(key)
        assert given is not None
        while True:
            settings, version = self._settings()
            if settings.encryption is None:
                raise InvalidArgumentError(f"{self.address} is a store without encryption")
            wrapped = given.rewrap(settings.encryption, self._settings_file)
            changed = dataclasses.replace(settings, encryption=wrapped)
            with contextlib.suppress(ConflictError):
                self.bucket.replace(_SETTINGS, changed.text(), version)
                return

    @property
    def is_encrypted(self) -> bool:
        """Whether its objects are encrypted."""
        return self.mirror.access.secret is not None

    @property
    def path(self) -> str:
        """The folder of the cache."""
        return self.mirror.folder

    @property
    def ttl_seconds(self) -> float | None:
        """How long a snapshot lives after its last use; None: forever."""
        return self._ttl_seconds

    # Saving.

    def save(
        self,
        name: str,
        content: _core.SnapshotContent,
        *,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None = None,
        companions: Sequence[CompanionSnapshot] = (),
        overwrite: bool = False,
    ) -> SaveReport:
        """Saves `content` under `name`; uploads only chunks that no snapshot of the store has.

        See `DirectoryStore.save`. Of several writers of one name, the last one's snapshot stays.

        Raises:
            InvalidArgumentError: as `DirectoryStore.save`.
            CapacityError: what is new does not fit into the cache.
            StorageError: a system call or a request failed. Then the bucket has either snapshot of
                that name, as a whole.
        """
        self._made_in.require("the store")
        started = time.monotonic()
        later = self._write_back
        with BucketSaving(self, name, overwrite=overwrite, later=later) as saving:
            saving.write_companions(companions, progress)
            saving.write(content, fingerprint, session, progress)
            if not later:
                saving.upload()
            saving.publish_here()
            report = saving.report(time.monotonic() - started)
        if later:
            self._uploader.wake()
        return report

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all that was saved is in the bucket.

        timeout: most seconds to wait; None: any.

        Raises:
            StorageError: it is not there after this time; says why.
        """
        self._uploader.flush(timeout)

    # Reading.

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a snapshot: asks the bucket whether it has changed, and fetches it if so.

        While the bucket cannot be reached, opens what the cache has, with a warning.

        Raises:
            StorageError: no snapshot has this name, it has expired, or it cannot be read.
            CorruptSnapshotError: it is damaged. UnsupportedVersionError: a newer release wrote it.
        """
        stored = self._stored(name)
        self._up_to_date(stored)
        try:
            reader = self.mirror.store.open(name)
        except CorruptSnapshotError:
            if self.mirror.is_pending(stored):
                raise
            self.mirror.forget(manifest_object(stored))  # the copy may be damaged
            self._up_to_date(stored)
            reader = self.mirror.store.open(name)
        self._note_use(stored)
        return reader

    def _stored(self, name: str) -> str:
        """The name of a snapshot's files; of one that cannot be read, it is given itself."""
        stored = self.mirror.access.stored(check_name(name))
        if stored != name and self.mirror.recorded(manifest_object(name)) is not None:
            return name
        return stored

    def _up_to_date(self, name: str, *, companions: bool = False) -> None:
        """`name`: of the files, as everywhere below."""
        self._made_in.require("the store")
        if self.mirror.is_pending(name):
            return
        try:
            self.mirror.refresh_one(name)
        except UnreachableError as error:
            if self.mirror.recorded(manifest_object(name)) is None:
                raise
            (shown,) = self.mirror.shown([name])
            _log.warning("%s is opened as the cache has it: %s", shown, error)
        if companions:
            with self.mirror.locked() as catalogue:
                snapshot = catalogue.snapshot(name)
            for kind in () if snapshot is None else snapshot.manifest.companions:
                self._up_to_date(companion_name(name, kind))

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """The longest prefix of chunks with these names that a known snapshot begins with.

        Snapshots of other machines become known by a listing in the background.
        """
        self._made_in.require("the store")
        self._refresh_if_old()
        for _ in range(2):
            with self.mirror.store.locked() as (catalogue, settings, now_ns):
                found = longest_prefix(catalogue, hashes, now_ns, settings.ttl_seconds)
                if found is None:
                    return None
                name, stamp = found[0].manifest.name, found[0].manifest.stamp
            self._up_to_date(name)
            with self.mirror.locked() as catalogue:
                now = catalogue.snapshot(name)
                if now is not None and now.manifest.stamp == stamp:
                    break
        reader = self.mirror.store.find_prefix(hashes)
        if reader is not None:
            self._note_use(name)
        return reader

    def _refresh_if_old(self) -> None:
        if self._refresh_seconds == 0:
            self._refresh()
            return
        with self._lock:
            is_old = time.monotonic() - self._refreshed > self._refresh_seconds
            if is_old and (self._refreshing is None or self._refreshing.done()):
                self._refreshed = time.monotonic()
                self._refreshing = Future()
                threading.Thread(
                    target=self._refresh_behind, args=(self._refreshing,), daemon=True
                ).start()

    def _refresh_behind(self, done: Future[None]) -> None:
        try:
            self.mirror.refresh()
        except PagerError as error:
            _log.warning("%s cannot be listed: %s", self.address, error)
        finally:
            done.set_result(None)

    def _refresh(self) -> None:
        self._made_in.require("the store")
        self.mirror.refresh()
        self._refreshed = time.monotonic()

    def entries(self, **options: Any) -> list[StoreEntry]:
        """All snapshots by name, as the bucket has them now; see `DirectoryStore.entries`."""
        self._refresh()
        return self.mirror.store.entries(**options)

    def entry(self, name: str) -> StoreEntry | None:
        """A snapshot's entry; None if no snapshot has this name, or it has expired."""
        self._up_to_date(self._stored(name), companions=True)
        return self.mirror.store.entry(name)

    def saved(self, names: Iterable[str]) -> set[str]:
        """Those of these names that `stats()` counts as snapshots."""
        return self.mirror.store.saved(names)

    def verify(
        self, name: str, *, threads: int = 1, progress: ProgressCallback | None = None
    ) -> list[tuple[int, int, str]]:
        """Reads a whole snapshot; returns (chunk, layer, what is wrong) for all damage.

        See `DirectoryStore.verify`. Damaged chunks are fetched again; those that are damaged in the
        bucket too are recorded here, so that the next save of the same content from this folder
        writes them again.
        """
        reader = self.open(name)
        damage = list(reader.verify(threads, progress))
        for chunk in sorted({chunk for chunk, _, _ in damage}):
            self.report_damage(reader, chunk)
        return damage

    def report_damage(self, content: _core.SnapshotContent, chunk: int) -> int:
        """Removes a damaged chunk from the cache, so that it is fetched again.

        See `DirectoryStore.report_damage`. Returns the number of its copies that are damaged in the
        bucket too.
        """
        if not 0 <= chunk < content.sealed_chunks:
            return 0
        hashes = [hashes_of(content.hashes, chunk)]
        with self.mirror.locked() as catalogue:
            packs = {place.pack for place in catalogue.places(hashes)[0]}
            if self.is_encrypted:  # the last block of a pack's payload has metadata too
                packs.update(table.id for table in catalogue.unsound_packs() if table.error)
        for pack in packs:
            self.mirror.cache.forget(pack)
            if self.is_encrypted:
                with contextlib.suppress(PagerError):  # it stays damaged, and is reported so
                    self.mirror.mend(pack)
        return self.mirror.store.report_damage(content, chunk)

    def stats(self) -> dict[str, Any]:
        """Numbers about the store as this machine knows it.

        Those of `DirectoryStore.stats`, and requests (by kind: their number and bytes),
        cache_bytes, cache_budget, and pending (snapshots that are not in the bucket yet).
        """
        return self.mirror.store.stats() | {
            "requests": self.bucket.stats(),
            "cache_bytes": self.mirror.cache.bytes,
            "cache_budget": self.mirror.cache.byte_budget,
            "pending": len(self.mirror.pending()),
        }

    # Notes.

    def _note_use(self, name: str) -> None:
        """Writes the last use into the bucket, at most once in a tenth of the time to live."""
        with self.mirror.locked() as catalogue:
            snapshot = catalogue.snapshot(name)
            if snapshot is None or snapshot.owner is not None:
                return
            ttl = snapshot.ttl(self._ttl_seconds)
            known = [self.mirror.recorded(of(name)) for of in (sidecar_object, manifest_object)]
            written = max((one.modified for one in known if one is not None), default=0.0)
            if ttl is None or not snapshot.mortal(self._ttl_seconds) or not written:
                return
            if time.time() - written < ttl / 10:
                return
        self.pool.submit(self._touch, name)

    def _touch(self, name: str) -> None:
        try:
            self._put_sidecar(name)
        except PagerError as error:
            (shown,) = self.mirror.shown([name])
            _log.warning("the last use of %s is not in the bucket: %s", shown, error)

    def _put_sidecar(self, name: str, **changes: Any) -> Sidecar:
        """Writes the sidecar in the bucket again, with changes; its time is the last use."""
        path = sidecar_object(name)
        while True:
            there = self.bucket.get(path)
            sidecar = Sidecar()
            if there is not None:
                try:
                    values = json.loads(there[0])
                except ValueError:
                    values = None
                sidecar = Sidecar.of(values, f"{self.address}/{path}")
            sidecar = dataclasses.replace(sidecar, error=None, **changes)
            with contextlib.suppress(ConflictError):
                version = None if there is None else there[1]
                written = self.bucket.replace(path, sidecar.text().encode(), version)
                self.mirror.record([written])
                return sidecar

    def _annotate(self, name: str, **changes: Any) -> None:
        stored = self._stored(name)
        self._up_to_date(stored)
        with self.mirror.locked() as catalogue:
            snapshot = catalogue.snapshot(stored)
        if snapshot is not None and snapshot.owner is None:
            sidecar = self._put_sidecar(stored, **changes)
            changes = {"pinned": sidecar.pinned, "ttl_seconds": sidecar.ttl_seconds}
        self.mirror.store.annotate(name, **changes)

    def pin(self, name: str) -> None:
        """Exempts the snapshot `name` from expiry. Raises StorageError: there is none."""
        self._annotate(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Lets the snapshot `name` expire again. Raises StorageError: there is none."""
        self._annotate(name, pinned=False)

    def set_ttl(self, name: str, ttl: float | str | None) -> None:
        """Sets how long a snapshot lives after its last use. See `DirectoryStore.set_ttl`."""
        seconds = None if ttl is None else parse_ttl("ttl", ttl)
        never = ttl is not None and seconds is None
        self._annotate(name, ttl_seconds=float("inf") if never else seconds)

    # Removing.

    def delete(self, name: str, *, salt: str = "", force: bool = False) -> None:
        """Deletes a snapshot. See `DirectoryStore.delete`. `gc` deletes what only it needed."""
        stored = self._stored(name)
        self._up_to_date(stored, companions=True)
        was_pending = self.mirror.is_pending(stored)
        with self.mirror.locked() as catalogue:
            names = _parts(catalogue, stored)
        self.mirror.store.delete(name, salt=salt, force=force)
        self.mirror.clear_pending(stored)
        # An upload that has begun would bring it back; later ones find that it is gone.
        with self.mirror.uploading() if was_pending else contextlib.nullcontext():
            self.delete_objects(names)

    def delete_objects(self, names: Iterable[str]) -> None:
        """Deletes a snapshot, then its companions. names: the companions', then its own."""
        for name in reversed(list(names)):
            for path in (manifest_object(name), sidecar_object(name)):
                self.bucket.delete(path)
                self.mirror.forget(path)

    def gc(
        self,
        progress: ProgressCallback | None = None,
        *,
        grace: float = 3600.0,
        remove_damaged: bool = False,
        dry_run: bool = False,
    ) -> GcReport:
        """Deletes expired snapshots, and packs that no snapshot needs.

        A pack is condemned by one call, and deleted by one that is at least `grace` later, so that
        readers of deleted snapshots can go on for so long. Any machine may collect at any time.

        Args:
            progress: not called: no bytes are moved.
            grace: seconds between the two calls.
            remove_damaged: expected to be False: what is damaged stays in the bucket, reported.
            dry_run: delete nothing; the report's `would_remove` lists the objects.
        """
        del progress
        as_flag(dry_run, "dry_run")
        if as_flag(remove_damaged, "remove_damaged"):
            raise InvalidArgumentError(
                f"remove_damaged is True, and {self.address} is a bucket; expected False, and "
                "delete(name) of what is listed with an error"
            )
        collector = Collector(
            self.bucket, grace=_seconds("grace", grace), lease_seconds=self.lease_seconds
        )
        leased = collector.begin(self._packs)
        self._refresh()
        now_ns = int(collector.now * 1e9)
        with self.mirror.store.locked() as (catalogue, settings, _):
            expired = self.mirror.expired(catalogue, now_ns, settings.ttl_seconds, leased)
            orphans = self.mirror.orphans(catalogue, leased)
            groups = [_parts(catalogue, name) for name in (*expired, *orphans)]
            unreadable = catalogue.unreadable()
            shown_expired = tuple(catalogue.shown_names(expired))
            shown_orphans = tuple(catalogue.shown_names(orphans))
        why = "no pack is deleted, since it may need any"
        skipped = [(one.manifest.path, f"{why}: {one.manifest.error}") for one in unreadable]
        why = "no pack is deleted before it is in the bucket"
        skipped += [(name, why) for name in self.mirror.shown(self.mirror.pending())]
        removed = [manifest_object(name) for group in groups for name in group]
        if not dry_run:
            for group in groups:
                self.delete_objects(group)
        with self.mirror.locked() as catalogue:
            if not dry_run:
                removal.remove_snapshots(catalogue, [*expired, *orphans])
            needed = {pack for one in catalogue.snapshots() for pack in one.manifest.uses}
        collected = collector.finish(needed, self._delete_pack, dry_run=dry_run or bool(skipped))
        deleted = {} if skipped else collected.deleted
        removed += map(pack_object, deleted)
        return GcReport(
            bytes_freed=0 if dry_run else sum(deleted.values()),
            expired=shown_expired,
            orphans=shown_orphans,
            packs_removed=len(deleted),
            skipped=tuple(skipped),
            would_remove=tuple(removed) if dry_run else (),
        )

    def _delete_pack(self, pack: str) -> None:
        self.bucket.delete(pack_object(pack))
        with self.mirror.locked() as catalogue:
            removal.remove_unneeded_packs(catalogue, [pack])

    def _packs(self) -> dict[str, int]:
        listed = self.bucket.list("packs/")
        found = {pack_of(one.path.removeprefix("packs/")): one.size for one in listed}
        return {pack: size for pack, size in found.items() if pack is not None}

    def close(self) -> None:
        """Ends its threads. What is not uploaded yet is when the folder is used next."""
        self._uploader.close()
        with self._lock:
            refreshing, self._refreshed = self._refreshing, float("inf")  # begins no other
        if refreshing is not None:
            refreshing.result()
        self.pool.shutdown(wait=True)

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ObjectStore({self.address!r}, cache={self.path!r})"


def _parts(catalogue: Catalogue, name: str) -> list[str]:
    """Names of a snapshot's companions, then its own."""
    return [*(one.manifest.name for one in catalogue.companions(name)), name]


def _seconds(field: str, value: object) -> float:
    if not is_number(value) or not value >= 0:
        raise InvalidArgumentError(f"{field} is {value!r}; expected a number of seconds, 0 or more")
    return float(value)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Time to live (None: forever) and encryption, as in `StoreSettings`."""

    ttl_seconds: float | None = None
    encryption: dict[str, str] | None = None

    def text(self) -> bytes:
        """The contents of the object."""
        values: dict[str, Any] = {"kvpager_bucket": _VERSION, "ttl_seconds": self.ttl_seconds}
        if self.encryption is not None:
            values["encryption"] = self.encryption
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def of(cls, data: bytes, path: str) -> _Settings:
        """Checks what the object at `path` holds."""
        try:
            values = json.loads(data)
            version, ttl = values["kvpager_bucket"], values["ttl_seconds"]
            encryption = values.get("encryption")
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptSnapshotError(f"{path}: not the settings of a store ({error})") from error
        if type(version) is int and version > _VERSION:
            raise UnsupportedVersionError(
                f"{path}: kvpager_bucket is {version}, this version knows {_VERSION}; use the "
                "version of kvpager that made the store, or a newer one"
            )
        if version != _VERSION or not (ttl is None or is_duration(ttl)):
            raise CorruptSnapshotError(
                f"{path}: holds {values!r}; expected kvpager_bucket {_VERSION}, and ttl_seconds, "
                "null or a number, 0 or more"
            )
        return cls(None if ttl is None else float(ttl), encryption)
