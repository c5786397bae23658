"""Moves chunks between packs: out of packs of which little is needed, and to remove duplicates.

A pack never changes, so the bytes of its unneeded chunks can only be freed by copying the needed
ones to another pack. Manifests that pointed to the old places are replaced by equal ones that point
to the new; their logical digests stay the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import numpy as np

from kvpager import _core
from kvpager.errors import PagerError, StorageError
from kvpager.stores.base import ProgressCallback
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.chunk_index import Place
from kvpager.stores.lock import Hold
from kvpager.stores.names import new_pack_id
from kvpager.stores.permissions import PRIVATE, kept_mode
from kvpager.stores.plan import MAX_PACKS, table_of
from kvpager.stores.saving import PACK_SESSION
from kvpager.stores.settings import StoreSettings
from kvpager.stores.tables import KNOWN_MINOR, Snapshot


def sparse_packs(catalogue: Catalogue) -> list[list[str]]:
    """Packs of which less than half is needed, in groups that one new pack each can replace.

    Leaves out packs with a needed chunk that is damaged, and packs that a file of a newer version
    needs or may need.
    """
    if any(not snapshot.manifest.corrupt for snapshot in catalogue.unreadable()):
        return []
    left_alone = {
        pack
        for snapshot in catalogue.snapshots.values()
        if snapshot.manifest.minor_version > KNOWN_MINOR
        for pack in snapshot.manifest.packs
    }
    groups: dict[tuple[object, ...], list[str]] = {}
    for pack, counts in catalogue.chunk_references(catalogue.snapshots.values()).items():
        table = catalogue.packs[pack]
        needed = np.flatnonzero(counts)
        if pack in left_alone or table.damaged.intersection(needed.tolist()):
            continue
        if 0 < 2 * len(needed) < table.chunks:
            groups.setdefault(table.kind, []).append(pack)
    return [sorted(group) for group in groups.values()]


def better_places(catalogue: Catalogue) -> dict[Place, Place]:
    """Other places to use, for needed chunks that are damaged or lie in several packs."""
    counts = catalogue.chunk_references(catalogue.snapshots.values())
    total = {pack: int(needed.sum()) for pack, needed in counts.items()}
    moves = {}
    for pack, needed in counts.items():
        table = catalogue.packs[pack]
        for chunk in np.flatnonzero(needed).tolist():
            places = catalogue.sound_places(table.chain_hashes[chunk], table.content_ids[chunk])
            best = max(places, key=lambda place: (total[place.pack], place), default=None)
            if best is not None and best != Place(pack, chunk):
                moves[Place(pack, chunk)] = best
    return moves


def repoint(catalogue: Catalogue, settings: StoreSettings, moves: Mapping[Place, Place]) -> None:
    """Replaces manifests by ones that point to the new places. REQUIRES: the store's lock.

    If a snapshot needs a chunk of a pack that did not move, it keeps all its places in that pack.
    """
    sources = {place.pack for place in moves}
    for snapshot in list(catalogue.snapshots.values()):
        manifest = snapshot.manifest
        if manifest.minor_version <= KNOWN_MINOR and sources.intersection(manifest.packs):
            _repoint_one(catalogue, settings, snapshot, moves)


def _repoint_one(
    catalogue: Catalogue,
    settings: StoreSettings,
    snapshot: Snapshot,
    moves: Mapping[Place, Place],
) -> None:
    path = snapshot.manifest.path
    budget = settings.byte_budget
    reader = _core.SnapshotReader.open(path, catalogue.packs_folder)
    try:
        sizes = dict(reader.packs)
        ids = list(sizes)
        old = [Place(ids[pack], chunk) for pack, chunk in reader.places.tolist()]
        new = [moves.get(place, place) for place in old]
        table = table_of(
            new,
            lambda pack: sizes.get(pack) or catalogue.packs[pack].chunks,
            reader.summary_checksums.tolist().__getitem__,
        )
        texts = (reader.fingerprint, reader.session)
        bound = _core.snapshot_file_bytes(
            reader, reader.sealed_chunks, reader.tail_tokens > 0, *texts, len(table.packs)
        )
        if new == old or len(table.packs) > max(len(ids), MAX_PACKS):
            return
        if budget is not None and catalogue.bytes + bound > budget:
            return
        writer = _core.SnapshotWriter(path, reader.layout, bound, settings.mode)
        try:
            size = writer.write_manifest(
                reader, table.packs, table.places, table.summary_checksums, *texts
            )
            writer.publish()
        finally:
            writer.discard()
    finally:
        del reader  # it holds packs; an error's traceback must not keep it alive
    catalogue.bytes += size - snapshot.manifest.stamp.bytes
    with contextlib.suppress(OSError):  # keep the time of the save
        os.utime(path, ns=(snapshot.manifest.stamp.mtime_ns,) * 2)


class Compaction:
    """Call begin, write, publish in this order; leaving the `with` block releases everything.

    Attributes:
        chunks: number of chunks to move.
    """

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.pack_id = new_pack_id()
        self._hold = Hold()
        self._places: list[Place] = []
        self._content: _core.SnapshotReader | None = None
        self._writer: _core.SnapshotWriter | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks to move."""
        return len(self._places)

    def begin(self, catalogue: Catalogue, settings: StoreSettings) -> bool:
        """Takes room for the pack; returns False if there is none. REQUIRES: the store's lock."""
        counts = catalogue.chunk_references(catalogue.snapshots.values())
        sources = [pack for pack in self.sources if pack in catalogue.packs]
        self._places = [
            Place(pack, chunk)
            for pack in sources
            for chunk in np.flatnonzero(counts[pack]).tolist()
        ]
        if not self._places:
            return False
        paths = {pack: catalogue.pack_path(pack) for pack in sources}
        self._hold.add(paths.values())
        readers = {pack: _core.SnapshotReader.open(path) for pack, path in paths.items()}
        self._content = _core.SnapshotReader.gather(
            [(readers[place.pack], place.chunk) for place in self._places], self.pack_id
        )
        bound = _core.snapshot_file_bytes(
            self._content, len(self._places), False, self._content.fingerprint, PACK_SESSION, 0
        )
        if settings.byte_budget is not None and catalogue.bytes + bound > settings.byte_budget:
            return False
        path = catalogue.pack_path(self.pack_id)
        mode = settings.mode
        for source in paths.values():
            mode = kept_mode(source, mode)
        self._writer = _core.SnapshotWriter(path, self._content.layout, bound, mode | PRIVATE)
        return True

    def write(self, progress: ProgressCallback | None) -> int:
        """Copies the chunks into a new, unpublished pack; returns its size."""
        assert self._writer is not None
        assert self._content is not None
        return self._writer.write_content(
            self._content,
            list(range(len(self._places))),
            self._content.fingerprint,
            PACK_SESSION,
            progress,
        )

    def damaged_place(self, chunk: int) -> Place:
        """The place of a chunk that could not be copied."""
        return self._places[chunk]

    def publish(self, catalogue: Catalogue, settings: StoreSettings) -> None:
        """Makes manifests point to the new pack. REQUIRES: the store's lock."""
        assert self._writer is not None
        self._writer.publish()
        self.release()
        catalogue.refresh()
        if error := catalogue.packs[self.pack_id].error:
            raise StorageError(f"what was just written cannot be read back: {error}")
        new = {place: Place(self.pack_id, chunk) for chunk, place in enumerate(self._places)}
        repoint(catalogue, settings, new)
        catalogue.refresh()

    def release(self) -> None:
        """Removes what was not published, and releases locks. May be called twice."""
        if self._writer is not None:
            self._writer.discard()
        self._writer = self._content = None
        self._hold.release()

    def __enter__(self) -> Compaction:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PagerError):
            self.release()
