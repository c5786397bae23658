"""Garbage collection of a directory store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvpager.errors import CapacityError, CorruptSnapshotError, PagerError
from kvpager.stores import removal
from kvpager.stores.base import GcReport, ProgressCallback
from kvpager.stores.budget import make_room, tidy
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.compaction import Compaction, note_damage, repoint, sparse_packs
from kvpager.stores.settings import StoreSettings
from kvpager.stores.tables import Pack

# Takes the store's lock; returns the store's contents while the lock is held.
Locked = Callable[[], AbstractContextManager[tuple[Catalogue, StoreSettings, int]]]


class Collection:
    """One garbage collection: short steps under the lock; chunks are copied outside it."""

    def __init__(
        self, locked: Locked, progress: ProgressCallback | None, remove_damaged: bool
    ) -> None:
        self.report = GcReport()
        self._locked = locked
        self._progress = progress
        self._remove_damaged = remove_damaged
        self._bytes_done = 0
        self._bytes_total = 0

    def run(self) -> GcReport:
        """Collects, and returns the report."""
        with self._locked() as (catalogue, settings, now_ns):
            if self._remove_damaged:
                catalogue.refresh()
            before = catalogue.size
            self._remove(catalogue, settings, now_ns)
            groups = sparse_packs(catalogue)
            self._count(bytes_freed=before - catalogue.size)
            self._bytes_total = sum(_bytes_to_move(table) for group in groups for table in group)
        for group in groups:
            self._compact([table.id for table in group])
        # A manifest that points to another pack can be larger than the old one.
        return dataclasses.replace(self.report, bytes_freed=max(0, self.report.bytes_freed))

    def rehearse(self) -> GcReport:
        """Reports what `run` would do now; changes nothing.

        Does not look for chunks that other packs hold too, so `run` may free more.
        """
        with self._locked() as (catalogue, settings, now_ns):
            if self._remove_damaged:
                catalogue.refresh()
            with catalogue.rehearsal() as spared:
                before = catalogue.size
                self._tidy(catalogue, settings, now_ns)
                self._make_room(catalogue, settings)
                tables = [table for group in sparse_packs(catalogue) for table in group]
                moved = sum(_bytes_to_move(table) for table in tables)
                freed = before - catalogue.size + sum(table.bytes for table in tables) - moved
                self._count(bytes_freed=freed, packs_compacted=len(tables))
                gone = (*spared, *(table.path for table in tables))
        return dataclasses.replace(self.report, would_remove=gone)

    def _count(self, **more: int) -> None:
        now = self.report
        changes = {name: getattr(now, name) + count for name, count in more.items()}
        self.report = dataclasses.replace(now, **changes)

    def _skip(self, what: str, why: str) -> None:
        self.report = dataclasses.replace(self.report, skipped=(*self.report.skipped, (what, why)))

    def _remove(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        self._tidy(catalogue, settings, now_ns)
        if moves := catalogue.moves():
            repoint(catalogue, settings, moves)
            self._count(packs_removed=tidy(catalogue, settings, now_ns).packs)
        self._make_room(catalogue, settings)

    def _tidy(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        if self._remove_damaged:
            removed = _remove_damaged(catalogue)
            self.report = dataclasses.replace(self.report, damaged_removed=tuple(removed))
        tidied = tidy(catalogue, settings, now_ns)
        self.report = dataclasses.replace(
            self.report,
            expired=tidied.expired,
            orphans=tidied.orphans,
            temporaries=tidied.temporaries,
            sidecars=tidied.strays,
            packs_removed=tidied.packs,
        )

    def _make_room(self, catalogue: Catalogue, settings: StoreSettings) -> None:
        self.report = dataclasses.replace(self.report, damaged=tuple(_damaged(catalogue)))
        try:
            evicted = make_room(catalogue, settings, 0)
        except CapacityError as error:
            self._skip(catalogue.folder, str(error))
        else:
            self.report = dataclasses.replace(self.report, evicted=tuple(evicted))

    def _compact(self, group: list[str]) -> None:
        with Compaction(group) as compaction:
            with self._locked() as (catalogue, settings, _):
                paths = ", ".join(catalogue.pack_path(pack) for pack in group)
                if not compaction.begin(catalogue, settings):
                    self._skip(paths, "no room within the budget to copy what is needed of it")
                    return
            try:
                written = compaction.write(self._note_progress if self._progress else None)
            except BaseException as error:
                chunk = error.chunk if isinstance(error, CorruptSnapshotError) else None
                if chunk is None:
                    with contextlib.suppress(PagerError), self._locked() as (catalogue, _, _):
                        compaction.undo(catalogue)
                    raise
                self._skip(paths, str(error))
                with self._locked() as (catalogue, settings, _):
                    compaction.undo(catalogue)
                    note_damage(catalogue, settings, compaction.damaged_place(chunk))
                return
            with self._locked() as (catalogue, settings, _):
                catalogue.add_temporary(compaction.temporary)  # it has another size by now
                before = catalogue.size
                compaction.publish(catalogue, settings)
                packs = [*compaction.sources, compaction.pack_id]
                gone = removal.remove_unneeded_packs(catalogue, packs)
                kept = compaction.pack_id not in gone
                # The new pack has been counted since it was begun.
                self._count(
                    bytes_freed=before - catalogue.size - (written if kept else 0),
                    packs_compacted=len(set(gone).intersection(compaction.sources)),
                    chunks_moved=compaction.chunks if kept else 0,
                )
                for pack in set(compaction.sources) - set(gone):
                    self._skip(catalogue.pack_path(pack), "in use")
        self._bytes_done += written

    def _note_progress(self, done: int, total: int) -> None:
        assert self._progress is not None
        self._progress(self._bytes_done + done, max(self._bytes_total, self._bytes_done + total))


def _bytes_to_move(table: Pack) -> int:
    return table.bytes * int((table.counts > 0).sum()) // table.chunks


def _damaged(catalogue: Catalogue) -> list[tuple[str, str]]:
    found = [(snapshot.manifest.path, error) for snapshot, error in catalogue.broken()]
    bad = [(one.path, one.error) for one in catalogue.unsound_packs() if one.error]
    return sorted([*found, *bad])


def _remove_damaged(catalogue: Catalogue) -> list[tuple[str, str]]:
    """Removes corrupt manifests and packs, and snapshots that cannot be opened without them.

    Keeps files that merely could not be read now, and snapshots with some damaged chunks, because
    those can be computed again.
    """
    corrupt = {table.id: table for table in catalogue.unsound_packs() if table.corrupt}
    lost = {
        snapshot.manifest.name: why
        for snapshot, why in catalogue.broken()
        if snapshot.manifest.corrupt
        or any(pack in corrupt or not catalogue.pack(pack) for pack in snapshot.manifest.uses)
    }
    removed = [(catalogue.manifest_path(name), why) for name, why in lost.items()]
    removed += [(table.path, table.error or "") for table in corrupt.values()]
    removal.remove_snapshots(catalogue, lost)
    for pack in corrupt:
        catalogue.remove_pack(pack)
    return sorted(removed)
