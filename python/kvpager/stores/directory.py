"""The directory store: a folder of snapshots that share chunks, with a byte budget."""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvpager import _core
from kvpager.arguments import as_flag
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, PagerError, StorageError
from kvpager.paths import usable_path
from kvpager.salts import checked_salt
from kvpager.stores import removal
from kvpager.stores.base import GcReport, ProgressCallback, SaveReport, StoreEntry
from kvpager.stores.belonging import is_under
from kvpager.stores.budget import make_room, tidy
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.collection import Collection
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.creation import open_or_create
from kvpager.stores.damage import check_places
from kvpager.stores.group_saving import GroupSaving
from kvpager.stores.lock import TIMEOUT_SECONDS, checked_timeout
from kvpager.stores.names import check_name
from kvpager.stores.own_name import misnamed, name_in
from kvpager.stores.permissions import share
from kvpager.stores.prefix import longest_prefix
from kvpager.stores.settings import StoreSettings, parse_ttl
from kvpager.stores.sidecar import SIDECAR_BYTES
from kvpager.stores.tables import Snapshot


class DirectoryStore:
    """A folder of snapshots. Turns of one session and sessions with a common prefix share chunks.

    It is no access control: anyone who may use the folder may list, read, replace and delete all
    of it. Any number of threads and processes may use one folder at once, through one store object
    or several. If a process is killed, everything that was reported saved is still there. See
    docs/stores.md.

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
        lock_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        as_flag(create, "create")
        self._lock_timeout = checked_timeout("lock_timeout", lock_timeout)
        wanted = StoreSettings().updated(byte_budget, ttl, mode)  # checks before anything is made
        self.path = os.path.abspath(usable_path(path, "path"))  # noqa: PTH100  # resolve() follows links
        self._catalogue = Catalogue(self.path)
        with _system_errors(self.path):
            open_or_create(self.path, wanted, create=create, lock_timeout=self._lock_timeout)
        if byte_budget is not None or ttl is not None or mode is not None:
            with self._locked() as (catalogue, settings, now_ns):
                changed = settings.updated(byte_budget, ttl, mode)
                if changed != settings:
                    tidy(catalogue, changed, now_ns)
                    make_room(catalogue, changed, 0)
                    changed.write(self.path)
                if mode is not None:
                    share(self.path, changed.mode)

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
        with GroupSaving(self._locked, name, overwrite=overwrite) as saving:
            saving.write_companions(companions, progress)
            saving.write(content, fingerprint, session, progress)
            try:
                with self._locked() as (catalogue, settings, now_ns):
                    replaced = saving.publish(catalogue, settings, now_ns)
                    self._after_publishing(catalogue, name, replaced)
            except BaseException:
                saving.release()
                with contextlib.suppress(PagerError), self._locked() as (catalogue, _, _):
                    saving.undo(catalogue)
                raise
            return saving.report(time.monotonic() - started)

    def _after_publishing(self, catalogue: Catalogue, name: str, replaced: list[Snapshot]) -> None:
        """Marks the use and removes what only the old snapshots needed. It is saved already."""
        self._touch(catalogue, name)
        if replaced:
            with contextlib.suppress(OSError, PagerError):  # the next save removes it
                catalogue.refresh()
                packs = [pack for snapshot in replaced for pack in snapshot.manifest.packs]
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
            reader = _core.SnapshotReader.open(manifest.path, catalogue.packs_folder)
            why = misnamed(manifest.path, name_in(reader.session, manifest.path), name)
            if why is not None:
                raise CorruptSnapshotError(why)
            self._touch(catalogue, name)
            return reader

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """The longest prefix of chunks with these names that a snapshot of the store begins with.

        Args:
            hashes: of the full chunks of a text, made by `_core.Pager.chain_hashes`; by
                `legacy_chain_hashes` to search snapshots of formats before 1.2.

        Returns:
            A snapshot of these chunks alone, or None. Counts as a use of the snapshot they are in.
        """
        with self._locked(files_only=True) as (catalogue, settings, now_ns):
            snapshots = catalogue.snapshots.values()
            if any(snapshot.mortal(settings.ttl_seconds) for snapshot in snapshots):
                catalogue.refresh()  # expiry depends on the times of last use
            visible = [
                snapshot
                for snapshot in catalogue.snapshots.values()
                if not snapshot.manifest.error
                and not snapshot.expired(now_ns, settings.ttl_seconds)
            ]
            found = longest_prefix(catalogue, visible, hashes)
            if found is None:
                return None
            manifest, chunks = found[0].manifest, found[1]
            reader = _core.SnapshotReader.open(manifest.path, catalogue.packs_folder)
            self._touch(catalogue, manifest.name)
            return _core.SnapshotReader.gather(
                [(reader, chunk) for chunk in range(chunks)], f"prefix of {manifest.path}"
            )

    def entries(self, *, companions: bool = False) -> list[StoreEntry]:
        """All snapshots by name; damaged ones with their error, expired ones not at all.

        Args:
            companions: whether they have entries of their own, beside their snapshots'.
        """
        as_flag(companions, "companions")
        with self._locked() as (catalogue, settings, now_ns):
            shares = catalogue.chunk_references(catalogue.snapshots.values())
            owners = catalogue.owners()
            return [
                _entry(catalogue, snapshot, settings, shares)
                for name, snapshot in sorted(catalogue.snapshots.items())
                if (companions or (name not in owners and snapshot.manifest.companion_of is None))
                and (snapshot.manifest.error or not snapshot.expired(now_ns, settings.ttl_seconds))
            ]

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
            belonging = snapshot.manifest.belonging
            if not force and belonging is not None and not is_under(salt, belonging.salt):
                raise InvalidArgumentError(
                    f"snapshot {name!r} was saved under another salt; give that one, or force=True"
                )
            removal.remove_snapshots(catalogue, [name])

    def pin(self, name: str) -> None:
        """Exempts the snapshot `name` from expiry and eviction. May be called twice.

        Raises:
            StorageError: there is none.
        """
        self._annotate(name, pinned=True)

    def unpin(self, name: str) -> None:
        """Lets the snapshot `name` expire or be evicted again.

        Raises:
            StorageError: there is none.
        """
        self._annotate(name, pinned=False)

    def set_ttl(self, name: str, ttl: float | str | None) -> None:
        """Sets how long a snapshot lives after its last use.

        Args:
            name: of the snapshot.
            ttl: seconds, a duration such as "12h", "never", or None for the store's own.
        """
        seconds = None if ttl is None else parse_ttl("ttl", ttl)
        never = ttl is not None and seconds is None
        self._annotate(name, ttl_seconds=float("inf") if never else seconds)

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
            return len(
                check_places(
                    catalogue,
                    settings,
                    content.chain_hashes[chunk],
                    content.content_ids[chunk],
                )
            )

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
        with self._locked() as (catalogue, _, _):
            snapshots = list(catalogue.snapshots.values())
            own = [one for one in snapshots if one.manifest.companion_of is None]
            counts = catalogue.chunk_references(snapshots)
            needed = sum(int(np.count_nonzero(of_pack)) for of_pack in counts.values())
            referenced = sum(int(of_pack.sum()) for of_pack in counts.values())
            return {
                "bytes": catalogue.bytes,
                "byte_budget": self._settings().byte_budget,
                "snapshots": len(own),
                "companions": len(snapshots) - len(own),
                "pinned": sum(snapshot.sidecar.pinned for snapshot in own),
                "damaged": sum(catalogue.error(snapshot) is not None for snapshot in snapshots),
                "packs": len(catalogue.packs),
                "pack_bytes": sum(table.bytes for table in catalogue.packs.values()),
                "chunks": sum(table.chunks for table in catalogue.packs.values()),
                "chunks_needed": needed,
                "chunks_referenced": referenced,
                "dedupe_ratio": referenced / needed if needed else 1.0,
                "bytes_temporary": sum(catalogue.temporaries.values()),
            }

    def __repr__(self) -> str:
        return f"DirectoryStore({self.path!r})"

    def _locked(self, *, files_only: bool = False) -> _Locked:
        """Locks the store for a `with` block, which gets catalogue, settings and time in ns.

        files_only: do not list unchanged folders again; times of last use and sizes may be old.
        """
        return _Locked(self.path, self._catalogue, self._lock_timeout, files_only=files_only)

    def _settings(self) -> StoreSettings:
        with _system_errors(self.path):
            return StoreSettings.read(self.path)

    def _visible(
        self, name: str, catalogue: Catalogue, settings: StoreSettings, now_ns: int
    ) -> Snapshot:
        snapshot = catalogue.snapshots.get(check_name(name))
        if snapshot is not None and not snapshot.expired(now_ns, settings.ttl_seconds):
            return snapshot
        why = "there is no snapshot" if snapshot is None else "the time to live is over of snapshot"
        close = difflib.get_close_matches(name, catalogue.snapshots, n=1)
        hint = f"; did you mean {close[0]!r}?" if close and close[0] != name else ""
        raise StorageError(f"{self.path}: {why} {name!r}{hint}")

    def _annotate(self, name: str, **changes: Any) -> None:
        with self._locked() as (catalogue, settings, now_ns):
            snapshot = self._visible(name, catalogue, settings, now_ns)
            owner = catalogue.owners().get(name)
            if owner is not None:
                raise InvalidArgumentError(
                    f"snapshot {name!r} belongs to {owner!r} and lives as long; name that one"
                )
            tidy(catalogue, settings, now_ns)
            make_room(catalogue, settings, SIDECAR_BYTES, kept=name)
            sidecar = replace(snapshot.sidecar, error=None, **changes)
            sidecar.write(catalogue.sidecar_path(name), snapshot.last_used_ns, settings.mode)

    def _touch(self, catalogue: Catalogue, name: str) -> None:
        """Marks a use, if the store is writable."""
        now = time.time_ns()
        for path in (catalogue.sidecar_path(name), catalogue.manifest_path(name)):
            try:
                os.utime(path, ns=(now, now))
            except FileNotFoundError:  # without a sidecar the manifest's time is the last use
                continue
            except OSError:
                return
            return


def _entry(
    catalogue: Catalogue, snapshot: Snapshot, settings: StoreSettings, shares: dict[str, Any]
) -> StoreEntry:
    manifest = snapshot.manifest
    companions = catalogue.companions(manifest.name)
    own = shared = 0.0
    for part in (snapshot, *(catalogue.snapshots[name] for name in companions)):
        alone, others = _bytes_of(catalogue, part, shares)
        own, shared = own + alone, shared + others
    return StoreEntry(
        name=manifest.name,
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
        companions=tuple(companions),
        companion_of=manifest.companion_of,
        segment=manifest.segment,
        salt_digest=None if manifest.belonging is None else manifest.belonging.salt,
    )


def _bytes_of(
    catalogue: Catalogue, snapshot: Snapshot, shares: dict[str, Any]
) -> tuple[float, float]:
    """Bytes on disk that only this manifest needs, and those that others need too."""
    own, shared = float(snapshot.bytes), 0.0
    for pack, chunks in snapshot.manifest.uses.items():
        if pack not in shares or not len(shares[pack]):
            continue
        each = catalogue.packs[pack].bytes / len(shares[pack])
        chunks = chunks[chunks < len(shares[pack])]  # an error of the snapshot, which is told
        alone = int(np.count_nonzero(shares[pack][chunks] == 1))
        own += alone * each
        shared += (len(chunks) - alone) * each
    return own, shared


class _Locked(_core.ExclusiveLock):
    """A store's lock, which reads the store's contents when it is taken."""

    def __init__(
        self, folder: str, catalogue: Catalogue, timeout_seconds: float, *, files_only: bool
    ) -> None:
        super().__init__(f"{folder}/lock", timeout_seconds)
        self._folder = folder
        self._catalogue = catalogue
        self._files_only = files_only

    def entered(self) -> tuple[Catalogue, StoreSettings, int]:  # type: ignore[override]
        """Catalogue, settings and time in ns, read with the lock held."""
        try:
            with _system_errors(self._folder):
                settings = StoreSettings.read(self._folder)
                if self._files_only:
                    self._catalogue.refresh_files()
                else:
                    self._catalogue.refresh()
        except BaseException as error:
            self._forget_after(error)
            raise
        return self._catalogue, settings, time.time_ns()

    def leaving(self, error: BaseException | None) -> None:
        """Raises StorageError for an OSError of the block."""
        self._forget_after(error)
        with _system_errors(self._folder):
            if isinstance(error, OSError) and not isinstance(error, PagerError):
                raise error

    def _forget_after(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, PagerError):
            self._catalogue.forget()


@contextlib.contextmanager
def _system_errors(folder: str) -> Iterator[None]:
    """Turns an OSError into a StorageError with the same message."""
    try:
        yield
    except PagerError:  # StorageError is a subclass of OSError
        raise
    except OSError as error:
        words = error.strerror or type(error).__name__
        raise StorageError(f"{error.filename or folder}: {words}") from error
