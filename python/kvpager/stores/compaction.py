"""Moves chunks between packs: out of packs of which little is needed, and to remove duplicates.

A pack never changes, so the bytes of its unneeded chunks can only be freed by copying the needed
ones to another pack. Manifests that pointed to the old places are replaced by equal ones that point
to the new; their logical digests stay the same. Damaged chunks are listed in a file of their own,
packs/<id>.damaged, a JSON list of chunk numbers: no other snapshot shares such a chunk, and a save
of the same content writes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

import numpy as np

from kvpager import _core
from kvpager.errors import PagerError, StorageError
from kvpager.stores.base import ProgressCallback
from kvpager.stores.budget import make_room
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.files import PRIVATE, kept_mode, write_atomically
from kvpager.stores.lock import Hold
from kvpager.stores.names import new_pack_id
from kvpager.stores.saving import PACK_SESSION
from kvpager.stores.settings import StoreSettings
from kvpager.stores.sharing import MAX_PACKS, table_of
from kvpager.stores.tables import Pack, PackChunk, Run, Snapshot


def check_places(
    catalogue: Catalogue, settings: StoreSettings, chain: bytes, content: bytes
) -> list[PackChunk]:
    """Reads all copies of a chunk again, records damaged ones. REQUIRES: the store's lock."""
    found = []
    for place in catalogue.places([(chain, content)])[0]:
        pack = catalogue.open(catalogue.pack_path(place.pack))
        alone = _core.SnapshotReader.gather([(pack, place.chunk)], place.pack)
        if alone.verify(1):
            note_damage(catalogue, settings, place)
            found.append(place)
    return found


def note_damage(catalogue: Catalogue, settings: StoreSettings, place: PackChunk) -> None:
    """Records that a chunk is damaged. REQUIRES: the store's lock."""
    table = catalogue.pack(place.pack)
    if table is None:
        return
    text = json.dumps(sorted({*table.damaged, place.chunk}))
    make_room(catalogue, settings, len(text), wanted=frozenset({place.pack}))
    write_atomically(catalogue.damage_path(place.pack), text, settings.mode)
    catalogue.add_damage(place.pack)


def sparse_packs(catalogue: Catalogue) -> list[list[Pack]]:
    """Packs of which less than half is needed, in groups that one new pack each can replace.

    Leaves out packs with a needed chunk that is damaged. If a file of another version may need
    packs, there are none.
    """
    if catalogue.may_need_any_pack():
        return []
    groups: dict[str, list[Pack]] = {}
    for table in catalogue.sparse_packs():
        if not any(table.counts[chunk] for chunk in table.damaged):
            groups.setdefault(table.kind, []).append(table)
    return list(groups.values())


def repoint(
    catalogue: Catalogue, settings: StoreSettings, moves: Mapping[PackChunk, PackChunk]
) -> None:
    """Replaces manifests by ones that point to the new places. REQUIRES: the store's lock.

    If a snapshot needs a chunk of a pack that did not move, it keeps all its places in that pack.
    """
    for snapshot in catalogue.users(dict.fromkeys(place.pack for place in moves)):
        if not snapshot.manifest.error:
            _repoint_one(catalogue, settings, snapshot, moves)


def _repoint_one(
    catalogue: Catalogue,
    settings: StoreSettings,
    snapshot: Snapshot,
    moves: Mapping[PackChunk, PackChunk],
) -> None:
    path = snapshot.manifest.path
    budget = settings.byte_budget
    reader = catalogue.open(path)
    try:
        sizes = dict(reader.packs)
        ids = list(sizes)
        old = [PackChunk(ids[pack], chunk) for pack, chunk in reader.places.tolist()]
        new = [moves.get(place, place) for place in old]
        table = table_of(
            [Run(chunk, 1, *place) for chunk, place in enumerate(new)],
            lambda pack: sizes.get(pack) or _chunks(catalogue, pack),
            reader.summary_checksums,
        )
        texts = (reader.fingerprint, reader.session)
        bound = _core.snapshot_file_bytes(
            reader, reader.sealed_chunks, reader.tail_tokens > 0, *texts, len(table.packs)
        )
        if new == old or len(table.packs) > max(len(ids), MAX_PACKS):
            return
        if budget is not None and catalogue.size + catalogue.access.file_bytes(bound) > budget:
            return
        writer = catalogue.access.writer(path, reader.layout, bound, settings.mode)
        try:
            writer.write_manifest(
                reader, table.packs, table.places, table.summary_checksums, *texts
            )
            writer.publish()
        finally:
            writer.discard()
    finally:
        del reader  # it holds packs; an error's traceback must not keep it alive
    with contextlib.suppress(OSError):  # keep the time of the save
        os.utime(path, ns=(snapshot.manifest.stamp.mtime_ns,) * 2)
    catalogue.add_snapshot(snapshot.manifest.name)


def _chunks(catalogue: Catalogue, pack: str) -> int:
    table = catalogue.pack(pack)
    assert table is not None
    return table.chunks


class Compaction:
    """Call begin, write, publish in this order; leaving the `with` block releases everything.

    Attributes:
        chunks: number of chunks to move.
        temporary: path of the file that is being written.
    """

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.pack_id = new_pack_id()
        self._hold = Hold()
        self._places: list[PackChunk] = []
        self._content: _core.SnapshotReader | None = None
        self._writer: _core.SnapshotWriter | None = None
        self.temporary = ""

    @property
    def chunks(self) -> int:
        """Number of chunks to move."""
        return len(self._places)

    def begin(self, catalogue: Catalogue, settings: StoreSettings) -> bool:
        """Takes room for the pack; returns False if there is none. REQUIRES: the store's lock."""
        tables = [table for pack in self.sources if (table := catalogue.pack(pack)) is not None]
        self._places = [
            PackChunk(table.id, chunk)
            for table in tables
            for chunk in np.flatnonzero(table.counts).tolist()
        ]
        if not self._places:
            return False
        paths = {table.id: table.path for table in tables}
        self._hold.add(paths.values())
        readers = {pack: catalogue.open(path) for pack, path in paths.items()}
        self._content = _core.SnapshotReader.gather(
            [(readers[place.pack], place.chunk) for place in self._places], self.pack_id
        )
        bound = _core.snapshot_file_bytes(
            self._content, len(self._places), False, self._content.fingerprint, PACK_SESSION, 0
        )
        room = catalogue.size + catalogue.access.file_bytes(bound)
        if settings.byte_budget is not None and room > settings.byte_budget:
            return False
        path = catalogue.pack_path(self.pack_id)
        mode = settings.mode
        for source in paths.values():
            mode = kept_mode(source, mode)
        layout, access = self._content.layout, catalogue.access
        self._writer = access.writer(path, layout, bound, mode | PRIVATE)
        self.temporary = f"{catalogue.packs_folder}/{self._writer.temporary}"
        catalogue.add_temporary(self.temporary)
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

    def damaged_place(self, chunk: int) -> PackChunk:
        """The place of a chunk that could not be copied."""
        return self._places[chunk]

    def publish(self, catalogue: Catalogue, settings: StoreSettings) -> None:
        """Makes manifests point to the new pack. REQUIRES: the store's lock."""
        assert self._writer is not None
        self._writer.publish()
        self.release()
        catalogue.add_temporary(self.temporary)
        catalogue.add_pack(self.pack_id)
        table = catalogue.pack(self.pack_id)
        if table is None or table.error:
            why = "it is gone" if table is None else table.error
            raise StorageError(f"what was just written cannot be read back: {why}")
        new = {place: PackChunk(self.pack_id, chunk) for chunk, place in enumerate(self._places)}
        repoint(catalogue, settings, new)

    def undo(self, catalogue: Catalogue) -> None:
        """Removes what a failed copy has left. REQUIRES: the store's lock."""
        self.release()
        catalogue.add_temporary(self.temporary)

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
