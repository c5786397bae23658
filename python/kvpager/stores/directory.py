"""The directory store: a folder of snapshots that share chunks, with a byte budget."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvpager import _core
from kvpager._support.arguments import as_flag, as_integer, usable_path
from kvpager._support.salts import checked_salt
from kvpager._support.section_json import section_or_empty
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.stores import removal
from kvpager.stores.access import Access
from kvpager.stores.base import (
    GcReport,
    ProgressCallback,
    RangesOpener,
    SaveReport,
    StoreEntry,
)
from kvpager.stores.budget import make_room, tidy
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.collection import Collection
from kvpager.stores.compaction import check_places
from kvpager.stores.companions import CompanionSnapshot
from kvpager.stores.encryption import Secret, StoreKey, make_key, new_secret, secret_of
from kvpager.stores.files import share
from kvpager.stores.journals import DirectoryJournals
from kvpager.stores.lock import TIMEOUT_SECONDS, checked_timeout
from kvpager.stores.locked import Locked, system_errors
from kvpager.stores.names import SETTINGS_FILE, check_name
from kvpager.stores.origin import is_under, misnamed, name_in
from kvpager.stores.saving import GroupSaving
from kvpager.stores.settings import StoreSettings, open_or_create, parse_ttl
from kvpager.stores.sharing import longest_prefix
from kvpager.stores.tables import SIDECAR_BYTES, Snapshot, hashes_of

_log = logging.getLogger(__name__)


class DirectoryStore:
    """A folder of snapshots. Turns of one session and sessions with a common prefix share chunks.

    It is no access control: anyone who may use the folder may list, read, replace and delete all
    of it. Any number of threads and processes may use one folder at once, through one store object
    or several. If a process is killed, everything that was reported saved is still there. See
    docs/stores.md.

    Attributes:
        journals: of work under way, such as a server's responses; no part of the budget.

    Args:
        path: of the folder; made if it does not exist.
        byte_budget: most bytes of all files of the store together, at every instant; an int, a size
            such as "50GiB", or "unlimited". Applies to all users of the folder. None: the store's
            recorded setting, "unlimited" in a new one.
        ttl: how long a snapshot lives after its last use; seconds, a duration such as "7d", or
            "never". None: the store's recorded setting, "never" in a new one.
        create: whether to make a missing or empty folder a store.
        mode: permissions of files written from now on, such as 0o640 or "640", regardless of the
            umask; users with read permission may also enter the folders. None: the store's recorded
            setting, 0o600 in a new one. A replaced snapshot gains no permission that it lacked.
        key: encrypts all files of a new store, and opens an encrypted one; a StoreKey, or 32 bytes.
            None: the key of KVPAGER_STORE_KEY or KVPAGER_STORE_KEY_FILE; without one a new store is
            plain.
        lock_timeout: seconds that a call, this constructor included, waits for another thread or
            process that holds the store's lock; then it raises StorageError, which names the
            holder. No caller writes chunks while it holds the lock.

    Raises:
        InvalidArgumentError: an argument is out of range, or the folder has other things in it.
        StorageError: the folder is missing and `create` is False, or a system call failed.
        UnsupportedVersionError: a newer version made the store.
        CapacityError: snapshots that must stay need more than byte_budget.

    Example:
        >>> store = DirectoryStore("agents", byte_budget="50GiB", ttl="7d")
        >>> session.save("planner", store=store)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        byte_budget: int | str | None = None,
        ttl: float | str | None = None,
        create: bool = True,
        mode: int | str | None = None,
        key: StoreKey | bytes | None = None,
        lock_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        as_flag(create, "create")
        self._lock_timeout = checked_timeout("lock_timeout", lock_timeout)
        wanted = StoreSettings().updated(byte_budget, ttl, mode)  # checks before anything is made
        self.path = os.path.abspath(usable_path(path, "path"))  # noqa: PTH100  # resolve() follows links
        found = self._key(key)
        if found is not None:
            wanted = replace(wanted, encryption=found.wrap(new_secret()))
        with system_errors(self.path):
            open_or_create(self.path, wanted, create=create, lock_timeout=self._lock_timeout)
        secret = self._secret(found, is_given=key is not None)
        self._catalogue = self._new_catalogue(Access(self._opener, secret))
        if byte_budget is not None or ttl is not None or mode is not None:
            with self._locked() as (catalogue, settings, now_ns):
                changed = settings.updated(byte_budget, ttl, mode)
                if changed != settings:
                    tidy(catalogue, changed, now_ns)
                    make_room(catalogue, changed, 0)
                    changed.write(self.path)
                if mode is not None:
                    share(self.path, changed.mode)
                    catalogue.index.share(changed.mode)
        # A function of the store itself would keep it, and its index open, until a collection.
        folder = self.path
        self.journals = DirectoryJournals(
            f"{folder}/journals", lambda: _settings_of(folder).mode, secret
        )

    # How its files are opened; None: they are local.
    _opener: RangesOpener | None = None

    def _key(self, key: StoreKey | bytes | None) -> StoreKey | None:
        return make_key(key)

    def _secret(self, key: StoreKey | None, *, is_given: bool) -> Secret | None:
        wrapped, file = self._settings().encryption, f"{self.path}/{SETTINGS_FILE}"
        return secret_of(self.path, wrapped, key, is_given=is_given, file=file)

    def rewrap(self, key: StoreKey | bytes) -> None:
        """Makes the first of these the store's key, which older ones open no longer.

        Writes store.json alone: what encrypts the files stays.

        Raises:
            InvalidArgumentError: the store is not encrypted.
            StorageError: none of the keys opens it.
        """
        with self._locked() as (_, settings, _):
            settings.rewrapped(key, self.path).write(self.path)

    @property
    def byte_budget(self) -> int | None:
        """Most bytes of all files of the store together; None: unlimited."""
        return self._settings().byte_budget

    @property
    def mode(self) -> int:
        """Permissions of files written from now on."""
        return self._settings().mode

    @property
    def ttl_seconds(self) -> float | None:
        """How long a snapshot lives after its last use; None: forever."""
        return self._settings().ttl_seconds

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
        """Saves `content` under `name`; writes only chunks that no snapshot of the store has.

        See `SnapshotStore.save`. An old snapshot of that name stays until the new one is in place,
        which takes over its pin and time to live. Companions are published in the same instant.

        Replaces a snapshot of another salt or model only with `overwrite`.

        Raises:
            InvalidArgumentError: the name belongs to another snapshot's companion, or to a snapshot
                of another salt or model.
            CapacityError: no room, even after evicting all that may be; says why. Nothing was
                changed.
        """
        started = time.monotonic()
        access = self._catalogue.access
        with GroupSaving(self._locked, name, access, overwrite=overwrite) as saving:
            try:
                saving.write_companions(companions, progress)
                saving.write(content, fingerprint, session, progress)
                with self._locked() as (catalogue, settings, now_ns):
                    replaced = saving.publish(catalogue, settings, now_ns)
                    self.after_publishing(catalogue, name, replaced)
            except BaseException:
                saving.undo()
                raise
            return saving.report(time.monotonic() - started)

    @staticmethod
    def after_publishing(catalogue: Catalogue, name: str, replaced: list[Snapshot]) -> None:
        """Marks the use and removes what only the old snapshots needed. It is saved already.

        catalogue: locked. name: of the snapshot. replaced: snapshots that it replaced.
        """
        catalogue.touch(catalogue.access.stored(name), time.time_ns())
        if replaced:
            with contextlib.suppress(OSError, PagerError):  # the next save removes it
                packs = [pack for snapshot in replaced for pack in snapshot.manifest.uses]
                removal.remove_unneeded_packs(catalogue, dict.fromkeys(packs))
                removal.remove_snapshots(catalogue, catalogue.orphans())

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a snapshot; its bytes stay as long as the reader lives. Counts as a use.

        Raises:
            StorageError: no snapshot has this name, it has expired, or it cannot be read.
            CorruptSnapshotError: it is damaged, or was saved under another name.
            UnsupportedVersionError: a newer release wrote it.
        """
        with self._locked() as (catalogue, settings, now_ns):
            snapshot = self._visible(name, catalogue, settings, now_ns)
            manifest = snapshot.manifest
            reader: _core.SnapshotReader = catalogue.open(manifest.path)
            session = section_or_empty(reader.session, manifest.path, "session")
            why = misnamed(manifest.path, name_in(session), name)
            if why is not None:
                raise CorruptSnapshotError(why)
            catalogue.touch(manifest.name, time.time_ns())
            return reader

    def path_of(self, name: str) -> str:
        """The path of a snapshot's manifest, which need not be there."""
        return self._catalogue.manifest_path(self._catalogue.access.stored(name))

    def open_file(self, path: str) -> _core.SnapshotReader:
        """Opens a manifest or a pack of the store by its path. Counts as no use.

        Raises:
            StorageError, CorruptSnapshotError, UnsupportedVersionError: as `open`.
        """
        return self._catalogue.open(path)

    @property
    def is_encrypted(self) -> bool:
        """Whether its files are encrypted."""
        return self._catalogue.access.renames

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """The longest prefix of chunks with these names that a snapshot of the store begins with.

        Args:
            hashes: of the full chunks of a text, made by `_core.Pager.chain_hashes`.

        Returns:
            A snapshot of these chunks alone, or None. Counts as a use of the snapshot they are in.
        """
        with self._locked() as (catalogue, settings, now_ns):
            found = catalogue.current(
                lambda: longest_prefix(catalogue, hashes, now_ns, settings.ttl_seconds),
                lambda found: [] if found is None else [found[0]],
            )
            if found is None:
                return None
            manifest, chunks = found[0].manifest, found[1]
            reader = catalogue.open(manifest.path)
            catalogue.touch(manifest.name, time.time_ns())
            return _core.SnapshotReader.gather(
                [(reader, chunk) for chunk in range(chunks)], f"prefix of {manifest.path}"
            )

    def entries(
        self,
        *,
        companions: bool = False,
        latest_first: bool = False,
        after: str | tuple[float, str] | None = None,
        limit: int | None = None,
        named: Callable[[str], bool] | None = None,
    ) -> list[StoreEntry]:
        """All snapshots by name; damaged ones with their error, expired ones not at all.

        Args:
            companions: whether they have entries of their own, beside their snapshots'.
            latest_first: by their last use, the latest first.
            after: leaves out all up to this place: a name, or with `latest_first` the `last_used`
                and the name of an entry.
            limit: most entries; None: all.
            named: leaves out names for which it returns False.
        """
        as_flag(companions, "companions")
        as_flag(latest_first, "latest_first")
        if after is not None and isinstance(after, str) == latest_first:
            expected = "a time and a name" if latest_first else "a name"
            raise InvalidArgumentError(f"after is {after!r}; expected {expected}")
        if limit is not None:
            as_integer(limit, "limit", 1)
        with self._locked() as (catalogue, settings, now_ns):
            ask = catalogue.by_last_use if latest_first else catalogue.by_name

            def listed() -> list[Snapshot]:
                rows = ask(after, companions=companions, named=named)
                return list(itertools.islice(_alive(rows, settings, now_ns), limit))

            found = catalogue.current(listed, lambda found: found)
            return [_entry(catalogue, snapshot, settings) for snapshot in found]

    def entry(self, name: str) -> StoreEntry | None:
        """A snapshot's entry; None if no snapshot has this name, or it has expired."""
        with self._locked() as (catalogue, settings, now_ns):
            snapshot = catalogue.look_up(catalogue.access.stored(name))
            if snapshot is None or snapshot.expired(now_ns, settings.ttl_seconds):
                return None
            return _entry(catalogue, snapshot, settings)

    def saved(self, names: Iterable[str]) -> set[str]:
        """Those of these names that `stats()` counts as snapshots, in one query."""
        with self._locked() as (catalogue, _, _):
            stored = {catalogue.access.stored(name): name for name in names}
            return {stored[name] for name in catalogue.among(stored)}

    def delete(self, name: str, *, salt: str = "", force: bool = False) -> None:
        """Deletes a snapshot and what only it needed. Readers that have it open can read on.

        Args:
            name: of the snapshot.
            salt: of the engine that saved it.
            force: delete it even if it was saved under another salt.

        Raises:
            StorageError: no snapshot has this name, or a system call failed.
            InvalidArgumentError: it is pinned, or was saved under another salt.
        """
        as_flag(force, "force")
        checked_salt(salt)
        with self._locked() as (catalogue, settings, now_ns):
            snapshot = self._visible(name, catalogue, settings, now_ns)
            if snapshot.sidecar.pinned and not snapshot.sidecar.error:
                raise InvalidArgumentError(f"snapshot {name!r} is pinned; unpin it first")
            origin = snapshot.manifest.origin
            if not force and origin is not None and not is_under(salt, origin.salt):
                raise InvalidArgumentError(
                    f"snapshot {name!r} was saved under another salt; give that one, or force=True"
                )
            removal.remove_snapshots(catalogue, [snapshot.manifest.name])

    def pin(self, name: str) -> None:
        """Exempts the snapshot `name` from expiry and eviction. May be called twice.

        Raises:
            StorageError: there is none.
        """
        self.annotate(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Lets the snapshot `name` expire or be evicted again.

        Raises:
            StorageError: there is none.
        """
        self.annotate(name, pinned=False)

    def set_ttl(self, name: str, ttl: float | str | None) -> None:
        """Sets how long a snapshot lives after its last use.

        Args:
            name: of the snapshot.
            ttl: seconds, a duration such as "12h", "never", or None for the store's own.
        """
        seconds = None if ttl is None else parse_ttl("ttl", ttl)
        never = ttl is not None and seconds is None
        self.annotate(name, ttl_seconds=float("inf") if never else seconds)

    def verify(
        self, name: str, *, threads: int = 1, progress: ProgressCallback | None = None
    ) -> list[tuple[int, int, str]]:
        """Reads a whole snapshot; returns (chunk, layer, what is wrong) for all damage.

        Damaged chunks are recorded: no other snapshot shares them any more, and the next save of
        the same content writes them again.

        Args:
            name: of the snapshot.
            threads: that read it.
            progress: called with (bytes read, bytes in all).

        Raises:
            StorageError: there is no such snapshot, or it cannot be read.
            CorruptSnapshotError: what is damaged is more than chunks.
        """
        reader = self.open(name)
        damage = list(reader.verify(threads, progress))
        for chunk in sorted({chunk for chunk, _, _ in damage}):
            self.report_damage(reader, chunk)
        return damage

    def report_damage(self, content: _core.SnapshotContent, chunk: int) -> int:
        """Call this when reading a chunk raised CorruptSnapshotError; see `verify`.

        Args:
            content: the reader that raised.
            chunk: the chunk's number in it; a tail, which is never shared, is ignored.

        Returns:
            The number of damaged copies of the chunk in the store that were not recorded before.
        """
        if not 0 <= chunk < content.sealed_chunks:
            return 0
        with self._locked() as (catalogue, settings, _):
            return len(check_places(catalogue, settings, *hashes_of(content.hashes, chunk)))

    def gc(
        self,
        progress: ProgressCallback | None = None,
        *,
        remove_damaged: bool = False,
        dry_run: bool = False,
    ) -> GcReport:
        """Removes what no snapshot needs, and compacts packs of which less than half is needed.

        Other threads and processes can use the store meanwhile.

        Args:
            progress: called with bytes moved and bytes to move.
            remove_damaged: also remove files that are damaged beyond use; by default they are kept
                and reported.
            dry_run: remove nothing; the report's `would_remove` lists what would be removed.
        """
        as_flag(dry_run, "dry_run")
        damaged = as_flag(remove_damaged, "remove_damaged")
        collection = Collection(self._locked, progress, damaged)
        return collection.rehearse() if dry_run else collection.run()

    def stats(self) -> dict[str, int | float | None]:
        """Numbers about the store.

        bytes, byte_budget, snapshots, companions, pinned, damaged, packs, pack_bytes, chunks (in
        packs), chunks_needed (by any snapshot), chunks_referenced (the sum over snapshots),
        dedupe_ratio (chunks_referenced / chunks_needed) and bytes_temporary (files being written).
        """
        with self._locked() as (catalogue, settings, _):
            totals = catalogue.totals()
            needed, referenced = totals["needed"], totals["referenced"]
            return {
                "bytes": totals["bytes"],
                "byte_budget": settings.byte_budget,
                "snapshots": totals["snapshots"],
                "companions": totals["companions"],
                "pinned": totals["pinned"],
                "damaged": len(catalogue.broken()),
                "packs": totals["packs"],
                "pack_bytes": totals["pack_bytes"],
                "chunks": totals["chunks"],
                "chunks_needed": needed,
                "chunks_referenced": referenced,
                "dedupe_ratio": referenced / needed if needed else 1.0,
                "bytes_temporary": catalogue.temporary_bytes(),
            }

    def reindex(self, progress: ProgressCallback | None = None) -> None:
        """Makes the index anew from the files, which are the truth; nothing else changes.

        A store does so by itself where it sees that files changed; this is for files that were
        changed in place by hand.

        progress: called with files read and files in all.
        """
        with self._locked() as (catalogue, settings, _):
            catalogue.rebuild(settings.mode, progress)

    def __repr__(self) -> str:
        return f"DirectoryStore({self.path!r})"

    def _new_catalogue(self, access: Access) -> Catalogue:
        return Catalogue(self.path, access)

    def _locked(self) -> Locked[Catalogue]:
        """Locks the store for a `with` block, which gets catalogue, settings and time in ns."""
        return Locked(self.path, self._catalogue, self._lock_timeout)

    def _settings(self) -> StoreSettings:
        return _settings_of(self.path)

    def _visible(
        self, name: str, catalogue: Catalogue, settings: StoreSettings, now_ns: int
    ) -> Snapshot:
        stored = catalogue.access.stored(check_name(name))
        snapshot = catalogue.look_up(stored)
        if snapshot is None and stored != name:  # one that cannot be read has its files' name
            snapshot = catalogue.look_up(name)
        if snapshot is not None and not snapshot.expired(now_ns, settings.ttl_seconds):
            return snapshot
        why = "there is no snapshot" if snapshot is None else "the time to live is over of snapshot"
        close = difflib.get_close_matches(name, catalogue.similar(name), n=1)
        hint = f"; did you mean {close[0]!r}?" if close and close[0] != name else ""
        raise StorageError(f"{self.path}: {why} {name!r}{hint}")

    def annotate(self, name: str, **changes: Any) -> None:
        """Makes changes of `pinned` or `ttl_seconds` of the snapshot `name`. See `pin`, `set_ttl`.

        Raises:
            StorageError: there is none.
        """
        with self._locked() as (catalogue, settings, now_ns):
            snapshot = self._visible(name, catalogue, settings, now_ns)
            owner = snapshot.owner
            if owner is not None:
                raise InvalidArgumentError(
                    f"snapshot {name!r} belongs to {snapshot.manifest.companion_of!r} and lives as "
                    "long; name that one"
                )
            stored = snapshot.manifest.name
            tidy(catalogue, settings, now_ns)
            make_room(catalogue, settings, SIDECAR_BYTES, kept=stored)
            sidecar = replace(snapshot.sidecar, error=None, **changes)
            sidecar.write(catalogue.sidecar_path(stored), snapshot.last_used_ns, settings.mode)
            catalogue.add_note(stored)


def _settings_of(folder: str) -> StoreSettings:
    with system_errors(folder):
        return StoreSettings.read(folder)


def _alive(
    snapshots: Iterable[Snapshot], settings: StoreSettings, now_ns: int
) -> Iterator[Snapshot]:
    """Those that have not expired, and unreadable ones."""
    for snapshot in snapshots:
        if snapshot.manifest.error or not snapshot.expired(now_ns, settings.ttl_seconds):
            yield snapshot


def _entry(catalogue: Catalogue, snapshot: Snapshot, settings: StoreSettings) -> StoreEntry:
    manifest = snapshot.manifest
    companions = catalogue.companions(manifest.name)
    own = shared = 0.0
    for part in (snapshot, *companions):
        alone, others = _bytes_of(catalogue, part)
        own, shared = own + alone, shared + others
    return StoreEntry(
        name=catalogue.shown(snapshot),
        path=manifest.path,
        tokens=manifest.tokens,
        chunks=manifest.chunks,
        bytes_own=round(own),
        bytes_shared=round(shared),
        created=manifest.stamp.mtime_ns / 1e9,
        last_used=snapshot.last_used_ns / 1e9,
        pinned=snapshot.sidecar.pinned,
        ttl_seconds=snapshot.ttl(settings.ttl_seconds),
        logical_digest=manifest.logical_digest,
        error=catalogue.error(snapshot),
        companions=tuple(map(catalogue.shown, companions)),
        companion_of=manifest.companion_of,
        segment=manifest.segment,
        salt_digest=None if manifest.origin is None else manifest.origin.salt,
    )


def _bytes_of(catalogue: Catalogue, snapshot: Snapshot) -> tuple[float, float]:
    """Bytes on disk that only this manifest needs, and those that others need too."""
    own, shared = float(snapshot.bytes), 0.0
    for pack, chunks in snapshot.manifest.uses.items():
        table = catalogue.pack(pack)
        if table is None or not table.chunks:
            continue
        each = table.bytes / table.chunks
        chunks = chunks[chunks < table.chunks]  # an error of the snapshot, which is told
        alone = int(np.count_nonzero(table.counts[chunks] == 1))
        own += alone * each
        shared += (len(chunks) - alone) * each
    return own, shared
