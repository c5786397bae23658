"""The contents of a directory store, read from its files.

One per store object, refreshed and used only while the store's lock is held. Tables of packs and
manifests are cached by inode, size and time; those of unreadable files are read again each time, so
that a repaired file is noticed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpager.stores import names
from kvpager.stores.chunk_index import ChunkIndex, Place
from kvpager.stores.companions import KINDS, companion_name
from kvpager.stores.durable import SMALL_BYTES, read_json, remove
from kvpager.stores.own_name import misnamed
from kvpager.stores.sidecar import Sidecar
from kvpager.stores.tables import Manifest, Pack, Snapshot, Stamp

# Folder times come from a coarse clock: a folder that changed less than this before it was listed
# may change again without getting another time.
_SETTLED_NS = 100_000_000
_IRREGULAR = (
    "not a regular file, so that it is unknown which packs it needs and all are kept; move it out "
    "of the store, or put the file itself in its place"
)
_NO_PACK = "not a regular file; put the file itself in its place"


class Catalogue:
    """Snapshots, packs and the other files of a store.

    Attributes:
        packs: by id, damaged ones included.
        snapshots: by name, damaged and expired ones included; companions have the sidecar and the
            last use of their primary.
        temporaries: path and size of files being written, or left by a writer that died.
        strays: path and size of sidecars without a snapshot and lists of damage without a pack.
        bytes: size of all files of any kind.
        index: the undamaged chunks of all readable packs.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.packs_folder = f"{folder}/packs"
        self.snapshots_folder = f"{folder}/snapshots"
        self.packs: dict[str, Pack] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.temporaries: dict[str, int] = {}
        self.strays: dict[str, int] = {}
        self.bytes = 0
        self.index = ChunkIndex()
        self._sidecars: dict[str, tuple[Stamp, Sidecar]] = {}
        self._settles = True  # whether what was read last is all there is
        self._settled: tuple[int, int] | None = None  # both folders' times, if they can be trusted

    def manifest_path(self, name: str) -> str:
        """Path of a snapshot's manifest."""
        return f"{self.snapshots_folder}/{name}{names.SNAPSHOT_SUFFIX}"

    def sidecar_path(self, name: str) -> str:
        """Path of a snapshot's sidecar."""
        return f"{self.snapshots_folder}/{name}{names.SIDECAR_SUFFIX}"

    def pack_path(self, pack: str) -> str:
        """Path of a pack."""
        return f"{self.packs_folder}/{pack}{names.SNAPSHOT_SUFFIX}"

    def damage_path(self, pack: str) -> str:
        """Path of the list of a pack's damaged chunks."""
        return f"{self.packs_folder}/{pack}{names.DAMAGE_SUFFIX}"

    def remove(self, path: str) -> None:
        """Removes a file, if it exists. The caller updates the catalogue's entries."""
        remove(path)

    def forget(self) -> None:
        """Makes the next refresh read everything again, after an interrupted change."""
        self.packs, self.snapshots, self.index = {}, {}, ChunkIndex()
        self._sidecars = {}
        self._settled = None

    def refresh_files(self) -> None:
        """`refresh`, if files were added or removed since. REQUIRES: the store's lock.

        Times of last use may be out of date.
        """
        if self._settled is None or self._settled != self._folder_times():
            self.refresh()

    def _folder_times(self) -> tuple[int, int]:
        packs, snapshots = Path(self.packs_folder).stat(), Path(self.snapshots_folder).stat()
        return packs.st_mtime_ns, snapshots.st_mtime_ns

    def refresh(self) -> None:
        """Reads the folders again. REQUIRES: the store's lock."""
        self._settled = None
        times, now_ns = self._folder_times(), time.time_ns()
        self._read_folders()
        if self._settles and max(times) + _SETTLED_NS < now_ns:
            self._settled = times

    def _read_folders(self) -> None:
        self.temporaries, self.strays, self.bytes = {}, {}, 0
        self._settles = True
        self._refresh_packs(*self._list(self.packs_folder))
        self._refresh_snapshots(*self._list(self.snapshots_folder))
        # A dead writer of store.json leaves its temporary file in the store's own folder.
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if names.is_temporary(entry.name) and not entry.is_dir(follow_symlinks=False):
                    self.temporaries[entry.path] = 0

    def _list(self, folder: str) -> tuple[dict[str, Stamp], list[str]]:
        """The regular files of a folder, whose bytes it adds up, and the names of all others.

        Records temporaries apart and leaves them out.
        """
        files, others = {}, []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    others.append(entry.name)
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by hand in the meantime
                    continue
                self.bytes += status.st_size
                if names.is_temporary(entry.name):
                    self.temporaries[entry.path] = status.st_size
                else:
                    files[entry.name] = Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
        return files, others

    def _refresh_packs(self, files: dict[str, Stamp], others: list[str]) -> None:
        stamps = {pack: stamp for file, stamp in files.items() if (pack := names.pack_of(file))}
        for pack in list(self.packs):
            known = self.packs[pack]
            if known.error or stamps.get(pack) != known.stamp:
                self.index.discard(pack, known.chain_hashes, known.content_ids)
                del self.packs[pack]
        for pack, stamp in stamps.items():
            if pack not in self.packs:
                self.packs[pack] = Pack.read(pack, self.pack_path(pack), stamp)
                table = self.packs[pack]
                self.index.add(pack, table.chain_hashes, table.content_ids)
        for file in others:
            if pack := names.pack_of(file):
                path = self.pack_path(pack)
                self.packs[pack] = Pack(pack, path, Stamp(0, 0, 0), error=f"{path}: {_NO_PACK}")
        damaged = {}
        for file, stamp in files.items():
            if (pack_id := names.damage_of(file)) is None:
                continue
            if pack_id not in self.packs:
                self.strays[f"{self.packs_folder}/{file}"] = stamp.bytes
            else:
                damaged[pack_id] = _read_damage(
                    self.damage_path(pack_id), self.packs[pack_id].chunks
                )
        for pack, table in self.packs.items():
            if table.damaged != damaged.get(pack, frozenset()):
                self.packs[pack] = replace(table, damaged=damaged.get(pack, frozenset()))

    def _refresh_snapshots(self, files: dict[str, Stamp], others: list[str]) -> None:
        sidecars = {
            name: stamp for file, stamp in files.items() if (name := names.sidecar_of(file))
        }
        known, self.snapshots = self.snapshots, {}
        for file in others:
            self._add_irregular(file, sidecars)
        for file, stamp in files.items():
            if (name := names.snapshot_of(file)) is None:
                continue
            before = known[name].manifest if name in known else None
            if before is None or before.error or before.stamp != stamp:
                path = self.manifest_path(name)
                before = Manifest.read(name, path, stamp, self.packs_folder)
            beside = sidecars.pop(name, None)
            self.snapshots[name] = Snapshot(
                before,
                self._sidecar(name, beside),
                beside.bytes if beside else 0,
                beside.mtime_ns if beside else stamp.mtime_ns,
            )
        for companion, name in self.owners().items():
            primary = self.snapshots[name]
            self.snapshots[companion] = replace(
                self.snapshots[companion],
                sidecar=primary.sidecar,
                last_used_ns=primary.last_used_ns,
            )
        self._sidecars = {n: kept for n, kept in self._sidecars.items() if n in self.snapshots}
        for name, stamp in sidecars.items():
            self.strays[self.sidecar_path(name)] = stamp.bytes

    def _add_irregular(self, file: str, sidecars: dict[str, Stamp]) -> None:
        """Adds a file that may be a manifest, as one that may need any pack."""
        path = f"{self.snapshots_folder}/{file}"
        name = names.snapshot_of(file) or file
        beside = sidecars.pop(name, None)
        stamp = beside or Stamp(0, 0, 0)
        manifest = Manifest(name, path, Stamp(0, 0, 0), error=f"{path}: {_IRREGULAR}")
        notes = self._sidecar(name, beside)
        self.snapshots[name] = Snapshot(manifest, notes, stamp.bytes, stamp.mtime_ns)

    def _sidecar(self, name: str, stamp: Stamp | None) -> Sidecar:
        if stamp is None:
            return Sidecar()
        if name not in self._sidecars or self._sidecars[name][0] != stamp:
            notes = Sidecar.read(self.sidecar_path(name))
            if notes.error is not None:  # perhaps they can be read next time
                self._sidecars.pop(name, None)
                self._settles = False
                return notes
            self._sidecars[name] = (stamp, notes)
        return self._sidecars[name][1]

    def error(self, snapshot: Snapshot) -> str | None:
        """What is wrong with a snapshot, or None."""
        manifest = snapshot.manifest
        if manifest.error:
            return manifest.error
        if (why := misnamed(manifest.path, manifest.saved_as, manifest.name)) is not None:
            return why
        for pack, chunks in manifest.uses.items():
            table = self.packs.get(pack)
            if table is None:
                return f"{manifest.path}: its pack {self.pack_path(pack)} is missing"
            if table.error:
                return f"{manifest.path}: its pack is damaged: {table.error}"
            if len(chunks) and chunks.max() >= table.chunks:
                return f"{manifest.path}: its pack {table.path} is another one, of fewer chunks"
            bad = sorted(table.damaged.intersection(chunks.tolist()))
            if bad:
                return f"{manifest.path}: chunks {bad} of its pack {table.path} are damaged"
        return snapshot.sidecar.error

    def references(self) -> Counter[str]:
        """How many snapshots with readable manifests need each pack."""
        counts: Counter[str] = Counter()
        for snapshot in self.snapshots.values():
            counts.update(snapshot.manifest.packs)
        return counts

    def chunk_references(self, snapshots: Iterable[Snapshot]) -> dict[str, npt.NDArray[np.int64]]:
        """How many of these snapshots need each chunk of each sound pack, [chunks of the pack]."""
        counts = {
            pack: np.zeros(table.chunks, dtype=np.int64) for pack, table in self.packs.items()
        }
        for snapshot in snapshots:
            for pack, chunks in snapshot.manifest.uses.items():
                if pack in counts:
                    counts[pack][chunks[chunks < len(counts[pack])]] += 1
        return counts

    def sound_places(self, chain: bytes, content: bytes) -> list[Place]:
        """Places of undamaged chunks with exactly these bytes."""
        return [p for p in self.index.places(chain, content) if self.is_sound(p)]

    def is_sound(self, place: Place) -> bool:
        """Whether no damage of a chunk is known."""
        return place.chunk not in self.packs[place.pack].damaged

    def companions(self, name: str) -> list[str]:
        """Names of a snapshot's companions: those that it names and that name it.

        If one of the two cannot be read, the other one's link is enough.
        """
        manifest = self.snapshots[name].manifest
        found: list[str] = []
        if not manifest.companions and not manifest.error:
            return found
        for kind in KINDS:
            beside = self.snapshots.get(companion_name(name, kind))
            if beside is None:
                continue
            own, theirs = manifest.companions.get(kind), beside.manifest
            if theirs.error:
                bound = own is not None
            else:
                bound = theirs.companion_of == name and (
                    manifest.error is not None or own == theirs.logical_digest
                )
            if bound:
                found.append(theirs.name)
        return found

    def owners(self) -> dict[str, str]:
        """Maps the name of each companion to that of its primary."""
        return {beside: name for name in self.snapshots for beside in self.companions(name)}

    def orphans(self) -> list[str]:
        """Companions without a primary: left by a writer that died, or replaced."""
        owners = self.owners()
        return [
            name
            for name, snapshot in self.snapshots.items()
            if snapshot.manifest.companion_of is not None and name not in owners
        ]

    def unreadable(self) -> list[Snapshot]:
        """Snapshots whose packs are unknown."""
        return [s for s in self.snapshots.values() if s.manifest.error]


class Rehearsal(Catalogue):
    """A catalogue that removes no files, to find out what would be removed.

    Attributes:
        spared: paths of the files that would have been removed, in order.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.spared: list[str] = []

    def remove(self, path: str) -> None:
        """Records the file, if it exists."""
        if os.path.lexists(path):
            self.spared.append(path)


def _read_damage(path: str, chunks: int) -> frozenset[int]:
    """The listed ones of `chunks` chunks; all of them if the list cannot be read."""
    try:
        listed = read_json(path, SMALL_BYTES + 16 * chunks)
        if isinstance(listed, list) and all(type(chunk) is int for chunk in listed):
            return frozenset(listed)
    except (ValueError, OSError):
        pass
    return frozenset(range(chunks))
