"""The contents of a directory store: an index of what its files say.

Snapshots go by the names of their files, which are other names in an encrypted store
(`Access.stored`); a manifest has the name that it was saved under too.

Packs, manifests, sidecars and lists of damage are the truth; the index (`Index`) can be deleted at
any time. It is used only while the store's lock is held. Every change of a file is followed by one
of the index (`add_*`, `remove_*`, `touch`), and `settle` records the folders' times. If the times
are others when the lock is taken next, a process died in between or files were changed by hand:
then files whose inode, size or time differ are read again. Files that could not be read are read
again each time the lock is taken.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.stores import names
from kvpager.stores.access import Access
from kvpager.stores.base import ProgressCallback
from kvpager.stores.companions import KINDS, companion_name
from kvpager.stores.files import SMALL_BYTES, read_json, remove
from kvpager.stores.index import SPARSE_PACK, UNSOUND_PACK, UNSOUND_SNAPSHOT, Index
from kvpager.stores.origin import Origin, misnamed
from kvpager.stores.segments import SegmentNote
from kvpager.stores.tables import Hashes, Manifest, Pack, PackChunk, Sidecar, Snapshot, Stamp, Uses

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")

_MANY = 1000  # files whose reading is worth a line in the log
_LOG_SECONDS = 2.0  # between two of these lines
_BATCH = 500  # values of one statement
_IRREGULAR = (
    "not a regular file, so that it is unknown which packs it needs and all are kept; move it out "
    "of the store, or put the file itself in its place"
)
_NO_PACK = "not a regular file; put the file itself in its place"
_NO_STAMP = Stamp(0, 0, 0)
_TEMPORARY, _STRAY = "temporary", "stray"


class Catalogue:
    """Snapshots, packs and the other files of a store."""

    def __init__(self, folder: str, access: Access | None = None) -> None:
        """`access`: of its files; None: they are plain."""
        self.folder = folder
        self.access = access or Access()
        self.packs_folder = f"{folder}/packs"
        self.snapshots_folder = f"{folder}/snapshots"
        self.index = Index(folder)
        self._packs: dict[str, Pack | None] = {}  # read since the lock was taken
        self._models: dict[int, dict[str, Any]] = {}  # likewise, fingerprints by number
        self._spared: list[str] | None = None
        self._is_behind = False  # whether a file that changed could not be looked at

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

    def open(self, path: str) -> _core.SnapshotReader:
        """Opens a manifest or a pack."""
        return self.access.open(path, self.packs_folder)

    # Taking the store's lock, and giving it back.

    def begin(self, mode: int) -> None:
        """Opens the index, and brings it up to date if the files are not as it left them.

        mode: permissions of a new index.
        """
        self._packs, self._models = {}, {}
        self._spared, self._is_behind = None, False
        self.index.begin(mode)
        try:
            self._catch_up()
        except sqlite3.OperationalError as error:  # such as a full disk
            _log.warning("%s: its index is kept in memory: %s", self.folder, error)
            self.index.begin_private()
            self._catch_up()

    def _catch_up(self) -> None:
        if tuple(self._state()) == self._folders():
            self._retry()
        else:
            self.refresh()

    def settle(self) -> None:
        """Records that the index is up to date with the files, and ends the transaction.

        Raises OSError where that cannot be; `begin` finds out.
        """
        if self._is_behind:
            self.index.execute("UPDATE state SET packs = '', snapshots = ''")
        elif tuple(self._state()) != self._folders():
            for folder in (self.packs_folder, self.snapshots_folder):
                # A time of its own: the file system's clock may give the next change the same.
                with contextlib.suppress(OSError):
                    os.utime(folder, ns=(time.time_ns(),) * 2)
            self.index.execute("UPDATE state SET packs = ?, snapshots = ?", self._folders())
        self.index.commit()

    def rebuild(self, mode: int, progress: ProgressCallback | None = None) -> None:
        """Makes the index anew from the files. progress: called with files read, and all."""
        self._packs, self._models = {}, {}
        self.index.discard(mode)
        self.refresh(progress)

    def refresh(self, progress: ProgressCallback | None = None) -> None:
        """Compares the index with the files, and reads those that are new or differ."""
        self._packs = {}
        self.index.execute("DELETE FROM file")
        packs, no_packs = self._list(self.packs_folder)
        snapshots, no_snapshots = self._list(self.snapshots_folder)
        with os.scandir(self.folder) as entries:
            # A dead writer of store.json leaves its temporary file in the store's own folder.
            for entry in entries:
                if names.is_temporary(entry.name) and not entry.is_dir(follow_symlinks=False):
                    self._put_file(entry.path, 0, _TEMPORARY)
        known = (*map(names.pack_of, packs), *map(names.snapshot_of, snapshots))
        reading = _Reading(progress, sum(name is not None for name in known))
        self._refresh_packs(packs, no_packs, reading)
        self._refresh_snapshots(snapshots, no_snapshots, reading)
        self.settle()  # what was read stays, whatever becomes of the call
        self.index.execute("BEGIN IMMEDIATE")

    def _state(self) -> Any:
        return self.index.row("SELECT packs, snapshots FROM state")

    def _folders(self) -> tuple[str, str]:
        def of(folder: str) -> str:
            status = Path(folder).stat()
            return f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"

        return of(self.packs_folder), of(self.snapshots_folder)

    # Reading files.

    def _list(self, folder: str) -> tuple[dict[str, Stamp], list[str]]:
        """The regular files of a folder but temporary ones, and the names of all else in it."""
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
                if names.is_temporary(entry.name):
                    self._put_file(entry.path, status.st_size, _TEMPORARY)
                else:
                    files[entry.name] = Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
        return files, others

    def _put_file(self, path: str, size: int, kind: str = "") -> None:
        sql = "INSERT OR REPLACE INTO file VALUES (?, ?, ?)"
        self.index.execute(sql, (os.fsencode(path), size, kind))

    def _refresh_packs(self, files: dict[str, Stamp], others: list[str], reading: _Reading) -> None:
        there = {pack: stamp for file, stamp in files.items() if (pack := names.pack_of(file))}
        known: dict[str, Stamp] = {}
        sql = "SELECT name, inode, bytes, mtime_ns, error FROM pack WHERE present"
        for row in self.index.execute(sql).fetchall():
            stamp = Stamp(row["inode"], row["bytes"], row["mtime_ns"])
            if row["error"] or there.get(row["name"]) != stamp:
                self._blank_pack(row["name"])
            else:
                known[row["name"]] = stamp
        for pack, stamp in there.items():
            if pack not in known:
                self._put_pack(Pack.read(pack, self.pack_path(pack), stamp, self.open))
            reading.done()
        for file in others:
            if pack := names.pack_of(file):
                path = self.pack_path(pack)
                self._put_pack(Pack(pack, path, _NO_STAMP, error=f"{path}: {_NO_PACK}"))
        damage = {pack: stamp for file, stamp in files.items() if (pack := names.damage_of(file))}
        sql = "SELECT name, damage_bytes, damage_ns FROM pack WHERE damage_bytes OR damage_ns"
        for row in self.index.execute(sql).fetchall():
            stamp = damage.get(row["name"], _NO_STAMP)
            if (row["damage_bytes"], row["damage_ns"]) == stamp[1:]:
                damage.pop(row["name"], None)
            elif stamp == _NO_STAMP:
                self._put_damage(row["name"], _NO_STAMP)
        for pack, stamp in damage.items():
            if pack in there:
                self._put_damage(pack, stamp)
            else:
                self._put_file(self.damage_path(pack), stamp.bytes, _STRAY)
        for file, stamp in files.items():
            if not names.pack_of(file) and not names.damage_of(file):
                self._put_file(f"{self.packs_folder}/{file}", stamp.bytes)

    def _refresh_snapshots(
        self, files: dict[str, Stamp], others: list[str], reading: _Reading
    ) -> None:
        notes = {name: stamp for file, stamp in files.items() if (name := names.sidecar_of(file))}
        there = {name: stamp for file, stamp in files.items() if (name := names.snapshot_of(file))}
        known: set[str] = set()
        for row in self.index.execute("SELECT * FROM snapshot").fetchall():
            name = row["name"]
            if row["error"] or _stamp(row) != there.get(name):
                continue
            known.add(name)
            note = notes.get(name)
            if row["note_error"] or _note_stamp(row) != note:
                self._put_note(name, note)
        for row in self.index.execute("SELECT name FROM snapshot").fetchall():
            if row["name"] not in known:
                self._drop_snapshot(row["name"])
        for file in others:
            # A file that may be a manifest may need any pack. Its name may be no text.
            file = os.fsencode(file).decode("utf-8", "backslashreplace")
            path, name = f"{self.snapshots_folder}/{file}", names.snapshot_of(file) or file
            manifest = Manifest(name, path, _NO_STAMP, error=f"{path}: {_IRREGULAR}")
            self._put_snapshot(manifest, notes.get(name))
            there.setdefault(name, _NO_STAMP)
        for name, stamp in there.items():
            if stamp != _NO_STAMP:
                if name not in known:
                    self._put_snapshot(self._read_manifest(name, stamp), notes.get(name))
                reading.done()
        for name, stamp in notes.items():
            if name not in there:
                self._put_file(self.sidecar_path(name), stamp.bytes, _STRAY)
        for file, stamp in files.items():
            if not names.snapshot_of(file) and not names.sidecar_of(file):
                self._put_file(f"{self.snapshots_folder}/{file}", stamp.bytes)

    def _retry(self) -> None:
        """Reads files again that could not be read."""
        for row in self.index.execute(f"SELECT * FROM pack WHERE {UNSOUND_PACK}").fetchall():
            reads_pack = row["error"] and row["inode"]
            if reads_pack:
                self.add_pack(row["name"])
            if reads_pack or row["damage_ns"] < 0:
                self.add_damage(row["name"])
        sql = f"SELECT * FROM snapshot WHERE {UNSOUND_SNAPSHOT}"
        for row in self.index.execute(sql).fetchall():
            if row["error"] and row["inode"]:
                self.add_snapshot(row["name"])
            elif row["note_error"] and row["note_inode"]:
                self.add_note(row["name"])

    def is_current(self, snapshots: Iterable[Snapshot]) -> bool:
        """Whether the files of these snapshots and of their companions are those that were read."""
        sql = "SELECT * FROM snapshot WHERE name = ?1 OR owner = ?1"
        owners = dict.fromkeys(one.owner or one.manifest.name for one in snapshots)
        stamps: dict[str, Stamp] = {}
        for row in (row for name in owners for row in self.index.execute(sql, (name,)).fetchall()):
            stamps[self._path_of(row)] = _stamp(row)
            stamps[self.sidecar_path(row["name"])] = _note_stamp(row) or _NO_STAMP
            for pack in self._uses(row["id"]):
                table = self.pack(pack)
                stamps[self.pack_path(pack)] = _NO_STAMP if table is None else table.stamp
        return all(stamp == (self._stamp_of(path) or _NO_STAMP) for path, stamp in stamps.items())

    def current(
        self, ask: Callable[[], _Found], snapshots: Callable[[_Found], Sequence[Snapshot]]
    ) -> _Found:
        """What `ask` finds, asked again if files of its snapshots are not those that were read."""
        found = ask()
        if self.is_current(snapshots(found)):
            return found
        self.refresh()
        return ask()

    def look_up(self, name: str) -> Snapshot | None:
        """A snapshot as its files are now, damaged and expired ones included; None without any."""
        if self.snapshot(name) is None and os.path.lexists(self.manifest_path(name)):
            self.refresh()
        return self.current(lambda: self.snapshot(name), lambda one: [] if one is None else [one])

    def _read_manifest(self, name: str, stamp: Stamp) -> Manifest:
        return Manifest.read(name, self.manifest_path(name), stamp, self.open)

    def _stamp_of(self, path: str) -> Stamp | None:
        """The stamp of a regular file; None of anything else, and where it cannot be had now."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: %s; it is looked at again", path, error.strerror)
            self._is_behind = True
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)

    # What changes: each of these is told once the file has changed.

    def add_pack(self, pack: str) -> None:
        """Reads a pack that is new, or another one."""
        self._blank_pack(pack)
        path = self.pack_path(pack)
        if (stamp := self._stamp_of(path)) is not None:
            self._put_pack(Pack.read(pack, path, stamp, self.open))

    def add_snapshot(self, name: str) -> None:
        """Reads a manifest that is new, or another one."""
        if (stamp := self._stamp_of(self.manifest_path(name))) is None:
            self._drop_snapshot(name)
        else:
            note = self._stamp_of(self.sidecar_path(name))
            self._put_snapshot(self._read_manifest(name, stamp), note)

    def add_note(self, name: str) -> None:
        """Reads the sidecar of a snapshot."""
        self._put_note(name, self._stamp_of(self.sidecar_path(name)))

    def add_damage(self, pack: str) -> None:
        """Reads the list of a pack's damaged chunks."""
        self._put_damage(pack, self._stamp_of(self.damage_path(pack)) or _NO_STAMP)

    def add_temporary(self, path: str) -> None:
        """Counts a file that is being written, as far as it is there."""
        self.forget_file(path)
        if (stamp := self._stamp_of(path)) is not None:
            self._put_file(path, stamp.bytes, _TEMPORARY)

    def forget_file(self, path: str) -> None:
        """Counts a temporary file, or one of nothing, no longer."""
        self.index.execute("DELETE FROM file WHERE path = ?", (os.fsencode(path),))

    def touch(self, name: str, now_ns: int) -> None:
        """Marks a use of a snapshot, if the store is writable."""
        for path, column in (
            (self.sidecar_path(name), "note_ns"),
            (self.manifest_path(name), "mtime_ns"),
        ):
            try:
                os.utime(path, ns=(now_ns, now_ns))
            except FileNotFoundError:  # without a sidecar the manifest's time is the last use
                continue
            except OSError:
                return
            stamp = self._stamp_of(path)
            used = now_ns if stamp is None else stamp.mtime_ns
            self.index.execute(
                f"UPDATE snapshot SET {column} = ?, used_ns = ? WHERE name = ?", (used, used, name)
            )
            return

    def remove_snapshot(self, name: str) -> None:
        """Removes a snapshot's files."""
        self.remove(self.manifest_path(name))
        self.remove(self.sidecar_path(name))
        self._drop_snapshot(name)

    def remove_pack(self, pack: str) -> None:
        """Removes a pack and its list of damage."""
        self.remove(self.pack_path(pack))
        self.remove(self.damage_path(pack))
        self._put_damage(pack, _NO_STAMP)
        self._blank_pack(pack)

    def remove_file(self, path: str) -> None:
        """Removes a temporary file, or one of nothing."""
        self.remove(path)
        self.forget_file(path)

    def remove(self, path: str) -> None:
        """Removes a file, if it exists; a rehearsal only notes its path."""
        if self._spared is None:
            remove(path)
        elif os.path.lexists(path):
            self._spared.append(path)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[list[str]]:
        """Within, no file is removed; what the index was told is taken back at the end.

        Returns the paths of the files that would have been removed, in order.
        """
        self._spared = []
        self.index.execute("SAVEPOINT rehearsal")
        try:
            yield self._spared
        finally:
            self._spared = None
            self.index.execute("ROLLBACK TO rehearsal")
            self._packs = {}

    def _put_pack(self, pack: Pack) -> None:
        """Fills the row of a pack, which is blank or missing."""
        number = self._pack_number(pack.id)
        self.index.update(
            "pack",
            pack.id,
            present=1,
            **pack.stamp._asdict(),
            chunks=pack.chunks,
            kind=pack.kind,
            hashes=pack.hashes,
            checksums=pack.summary_checksums.tobytes(),
            error=pack.error,
            corrupt=pack.corrupt,
        )
        keys = _keys(pack)
        self.index.executemany(
            "INSERT OR IGNORE INTO twice SELECT ?1 WHERE EXISTS"
            " (SELECT 1 FROM place WHERE key = ?1)",
            ((key,) for key in keys),
        )
        self.index.executemany(
            "INSERT OR IGNORE INTO place VALUES (?, ?, ?)",
            ((key, number, chunk) for chunk, key in enumerate(keys)),
        )
        counts = np.zeros(pack.chunks, dtype=np.int32)
        for row in self.index.execute("SELECT chunks FROM use WHERE pack = ?", (number,)):
            chunks = np.frombuffer(row["chunks"], dtype=np.uint32)
            counts[chunks[chunks < pack.chunks]] += 1
        self._put_counts(pack.id, counts)

    def _blank_pack(self, pack: str) -> None:
        """Leaves of a pack what snapshots need of it."""
        row = self.index.row("SELECT * FROM pack WHERE name = ?", (pack,))
        if row is None:
            return
        self.index.executemany(
            "DELETE FROM place WHERE key = ? AND pack = ? AND chunk = ?",
            ((key, row["id"], chunk) for chunk, key in enumerate(_keys(self._pack(row)))),
        )
        self.index.execute("DELETE FROM pack WHERE id = ?", (row["id"],))
        if row["users"]:
            self.index.insert("pack", id=row["id"], name=pack, users=row["users"])
        self._packs.pop(pack, None)

    def _pack_number(self, pack: str) -> int:
        """The number of a pack's row, which is added where there is none."""
        row = self.index.row("SELECT id FROM pack WHERE name = ?", (pack,))
        return self.index.insert("pack", name=pack) if row is None else int(row["id"])

    def _put_counts(self, pack: str, counts: npt.NDArray[np.int32]) -> None:
        needed, referenced = int(np.count_nonzero(counts)), int(counts.sum())
        self.index.update(
            "pack", pack, counts=counts.tobytes(), needed=needed, referenced=referenced
        )
        self._packs.pop(pack, None)

    def _put_damage(self, pack: str, stamp: Stamp) -> None:
        row = self.index.row("SELECT chunks FROM pack WHERE name = ?", (pack,))
        if row is None:
            return
        damaged, failed = frozenset[int](), False
        if stamp != _NO_STAMP:
            damaged, failed = _read_damage(self.damage_path(pack), row["chunks"])
        self.index.update(
            "pack",
            pack,
            damaged=json.dumps(sorted(damaged)),
            damage_bytes=stamp.bytes,
            damage_ns=-1 if failed else stamp.mtime_ns,
        )
        self._packs.pop(pack, None)

    def _put_snapshot(self, manifest: Manifest, note: Stamp | None) -> None:
        """Adds the row of a snapshot, in place of one that it has."""
        before = self._take_row(manifest.name)
        origin = manifest.origin
        model = None
        if origin is not None:
            text = json.dumps(origin.model, sort_keys=True)
            self.index.execute("INSERT OR IGNORE INTO model (fingerprint) VALUES (?)", (text,))
            row = self.index.row("SELECT id FROM model WHERE fingerprint = ?", (text,))
            model = None if row is None else row["id"]
        segment = manifest.segment
        number = self.index.insert(
            "snapshot",
            name=manifest.name,
            **manifest.stamp._asdict(),
            tokens=manifest.tokens,
            chunks=manifest.chunks,
            digest=manifest.logical_digest,
            companions=json.dumps(dict(manifest.companions)),
            companion_of=self._stored(manifest.companion_of),
            segment=None if segment is None else self.access.hide(json.dumps(asdict(segment))),
            saved_as=self._stored(manifest.saved_as),
            names=self.access.hide(json.dumps([manifest.saved_as, manifest.companion_of])),
            salt=None if origin is None else origin.salt,
            model=model,
            error=manifest.error,
            corrupt=manifest.corrupt,
        )
        for order, (pack, chunks) in enumerate(manifest.uses.items()):
            self.index.insert(
                "use",
                snapshot=number,
                number=order,
                pack=self._pack_number(pack),
                chunks=chunks.astype(np.uint32).tobytes(),
                top=int(chunks.max(initial=0)),
            )
        self._count_uses(before, manifest.uses)
        self._put_note(manifest.name, note)
        self._link(manifest.name)

    def _stored(self, name: str | None) -> str | None:
        return None if name is None else self.access.stored(name)

    def _put_note(self, name: str, stamp: Stamp | None) -> None:
        note = Sidecar() if stamp is None else Sidecar.read(self.sidecar_path(name))
        inode, size, time_ns = stamp or _NO_STAMP
        self.index.update(
            "snapshot",
            name,
            note_inode=inode,
            note_bytes=size,
            note_ns=time_ns,
            pinned=note.pinned,
            ttl=note.ttl_seconds,
            note_error=note.error,
        )
        # Without a sidecar the manifest's time is the last use.
        self.index.execute(
            "UPDATE snapshot SET used_ns = CASE WHEN note_inode THEN note_ns ELSE mtime_ns END"
            " WHERE name = ?",
            (name,),
        )

    def _drop_snapshot(self, name: str) -> None:
        self._count_uses(self._take_row(name), {})
        self._link(name)

    def _take_row(self, name: str) -> Uses:
        """Removes the row of a snapshot, if it has one; returns its uses, which still count."""
        row = self.index.row("SELECT id FROM snapshot WHERE name = ?", (name,))
        if row is None:
            return {}
        uses = self._uses(row["id"])
        self.index.execute("DELETE FROM use WHERE snapshot = ?", (row["id"],))
        self.index.execute("DELETE FROM snapshot WHERE id = ?", (row["id"],))
        return uses

    def _count_uses(self, before: Uses, after: Uses) -> None:
        """Counts a snapshot's uses. Packs of which it needs what it needed are left alone."""
        for uses, others, change in ((before, after, -1), (after, before, 1)):
            for pack, chunks in uses.items():
                if pack not in others or not np.array_equal(chunks, others[pack]):
                    self._count(pack, chunks, change)
        self.index.execute("DELETE FROM pack WHERE users = 0 AND NOT present")

    def _count(self, pack: str, chunks: npt.NDArray[np.uint32], change: int) -> None:
        row = self.index.row("SELECT id, chunks, counts FROM pack WHERE name = ?", (pack,))
        assert row is not None
        counts = np.frombuffer(row["counts"], dtype=np.int32).copy()
        counts[chunks[chunks < row["chunks"]]] += change
        self.index.execute("UPDATE pack SET users = users + ? WHERE id = ?", (change, row["id"]))
        self._put_counts(pack, counts)

    def _link(self, name: str) -> None:
        """Finds the companions that a snapshot has, and the primary that it may be one of.

        They belong together if each names the other. If one of the two cannot be read, the other
        one's link is enough.
        """
        primaries = [name, *(name.removesuffix(f".{kind}") for kind in KINDS)]
        for primary in dict.fromkeys(primaries):
            for kind in KINDS:
                beside = companion_name(primary, kind)
                self.index.execute(
                    "UPDATE snapshot SET owner = ? WHERE name = ?",
                    (primary if self._belongs(beside, primary, kind) else None, beside),
                )

    def _belongs(self, beside: str, primary: str, kind: str) -> bool:
        sql = "SELECT companions, companion_of, digest, error FROM snapshot WHERE name = ?"
        own, theirs = self.index.row(sql, (primary,)), self.index.row(sql, (beside,))
        if own is None or theirs is None:
            return False
        named = json.loads(own["companions"])
        if not named and not own["error"]:
            return False
        if theirs["error"]:
            return kind in named
        return theirs["companion_of"] == primary and (
            own["error"] is not None or named.get(kind) == theirs["digest"]
        )

    # Asking.

    @property
    def size(self) -> int:
        """Size of all files of any kind."""
        return self.totals()["bytes"]

    def totals(self) -> dict[str, int]:
        """Sums over all files; see `DirectoryStore.stats`."""
        row = self.index.row("SELECT * FROM totals")
        assert row is not None
        return {key: int(row[key]) for key in row.keys()}  # noqa: SIM118  # sqlite3's own

    def snapshot(self, name: str) -> Snapshot | None:
        """A snapshot, damaged and expired ones included; None if there is none."""
        row = self.index.row("SELECT * FROM snapshot WHERE name = ?", (name,))
        return None if row is None else self._snapshot(row)

    def pack(self, pack: str) -> Pack | None:
        """A pack, damaged ones included; None if there is none."""
        if pack not in self._packs:
            row = self.index.row("SELECT * FROM pack WHERE name = ? AND present", (pack,))
            self._packs[pack] = None if row is None else self._pack(row)
        return self._packs[pack]

    def snapshots(
        self,
        where: str = "",
        values: Sequence[object] = (),
        named: Callable[[str], bool] | None = None,
    ) -> Iterator[Snapshot]:
        """Snapshots, damaged and expired ones included.

        where: SQL that follows the table.
        named: leaves out names for which it returns False.
        """
        for row in self.index.execute(f"SELECT * FROM snapshot {where}", values):
            if named is None:
                yield self._snapshot(row)
            elif self.access.renames:
                found = self._snapshot(row)
                if named(self.shown(found)):
                    yield found
            elif named(row["name"]):  # before more of the row is read: there may be very many
                yield self._snapshot(row)

    def by_name(
        self, after: Any, *, companions: bool, named: Callable[[str], bool] | None = None
    ) -> Iterator[Snapshot]:
        """Snapshots behind this name. Of an encrypted store all are read, and sorted here."""
        if self.access.renames:
            rows = self.snapshots(f"WHERE TRUE {_which(companions)}", named=named)
            found = sorted(((self.shown(one), one) for one in rows), key=lambda pair: pair[0])
            return (one for name, one in found if name > (after or ""))
        where = f"WHERE name > ? {_which(companions)} ORDER BY name"
        return self.snapshots(where, (after or "",), named)

    def by_last_use(
        self, after: Any, *, companions: bool, named: Callable[[str], bool] | None = None
    ) -> Iterator[Snapshot]:
        """Snapshots, the one used last first, behind this time in seconds and name."""
        seconds, name = after or (math.inf, "")
        name = self.access.stored(name)
        # The first condition is one that the index can be asked for.
        most = min(seconds * 1e9 + 1000, 2.0**63 - 1024)
        return self.snapshots(
            "WHERE used_ns <= ? AND (used_ns / 1e9, name) < (?, ?)"
            f" {_which(companions)} ORDER BY used_ns DESC, name DESC",
            (int(most), seconds, name),
            named,
        )

    def among(self, names: Iterable[str]) -> set[str]:
        """Those of these names that snapshots have, companions apart."""
        wanted, found = list(names), set[str]()
        for start in range(0, len(wanted), _BATCH):
            some = wanted[start : start + _BATCH]
            sql = f"SELECT name FROM snapshot WHERE name IN ({', '.join('?' * len(some))})"
            rows = self.index.execute(f"{sql} AND companion_of IS NULL", some).fetchall()
            found |= {row["name"] for row in rows}
        return found

    def companions(self, name: str) -> list[Snapshot]:
        """A snapshot's companions."""
        return list(self.snapshots("WHERE owner = ? ORDER BY name", (name,)))

    def unneeded_packs(self) -> list[Pack]:
        """Packs that no snapshot needs."""
        return self._packs_where("users = 0")

    def sparse_packs(self) -> list[Pack]:
        """Packs of which less than half is needed, but something."""
        return self._packs_where(SPARSE_PACK)

    def unsound_packs(self) -> list[Pack]:
        """Packs that cannot be used, or of which chunks are damaged."""
        return self._packs_where(UNSOUND_PACK)

    def _packs_where(self, condition: str) -> list[Pack]:
        sql = f"SELECT * FROM pack WHERE present AND {condition}"
        return sorted(map(self._pack, self.index.execute(sql).fetchall()), key=lambda one: one.id)

    def users(self, packs: Iterable[str]) -> list[Snapshot]:
        """The snapshots that need any of these packs."""
        found: dict[int, Snapshot] = {}
        for pack in packs:
            sql = (
                "JOIN use ON use.snapshot = snapshot.id JOIN pack ON pack.id = use.pack"
                " WHERE pack.name = ?"
            )
            rows = self.index.execute(f"SELECT snapshot.* FROM snapshot {sql}", (pack,)).fetchall()
            found.update({row["id"]: self._snapshot(row) for row in rows if row["id"] not in found})
        return list(found.values())

    def least_recently_used(self) -> Iterator[Snapshot]:
        """All snapshots but those that go with another."""
        return self.snapshots("WHERE owner IS NULL ORDER BY used_ns, name")

    def expired(self, now_ns: int, ttl_seconds: float | None) -> list[str]:
        """Names of readable snapshots whose time to live is over; companions go with theirs.

        ttl_seconds: the store's own time to live.
        """
        mortal = "NOT pinned AND owner IS NULL AND companion_of IS NULL AND error IS NULL"
        found = self.index.execute(
            f"SELECT name FROM snapshot WHERE ttl IS NOT NULL AND used_ns + ttl * 1e9 < ?"
            f" AND {mortal}",
            (float(now_ns),),
        ).fetchall()
        if ttl_seconds is not None:
            sql = f"SELECT name FROM snapshot WHERE ttl IS NULL AND used_ns < ? AND {mortal}"
            limit = max(now_ns - ttl_seconds * 1e9, -(2.0**62))
            found += self.index.execute(sql, (math.ceil(limit),)).fetchall()
        return sorted(row["name"] for row in found)

    def shown(self, snapshot: Snapshot) -> str:
        """The name that users know a snapshot by; of one that cannot be read, its files' name."""
        manifest = snapshot.manifest
        if not self.access.renames or self._stored(manifest.saved_as) != manifest.name:
            return manifest.name
        return manifest.saved_as or manifest.name

    def shown_names(self, names: Iterable[str]) -> list[str]:
        """The same of snapshots by their files' names."""
        if not self.access.renames:
            return list(names)
        found = ((name, self.snapshot(name)) for name in names)
        return [name if one is None else self.shown(one) for name, one in found]

    def similar(self, name: str) -> list[str]:
        """Some names that begin as this one does, or end so: for a hint."""
        if self.access.renames:
            return []
        sql = "SELECT name FROM snapshot WHERE name {} ? ORDER BY name {} LIMIT ?"
        near = [(">=", "ASC"), ("<", "DESC")]
        return [
            row["name"]
            for order in near
            for row in self.index.execute(sql.format(*order), (name, _BATCH))
        ]

    def orphans(self) -> list[str]:
        """Companions without a primary: left by a writer that died, or replaced."""
        sql = "SELECT name FROM snapshot WHERE companion_of IS NOT NULL AND owner IS NULL"
        return sorted(row["name"] for row in self.index.execute(sql))

    def unreadable(self) -> list[Snapshot]:
        """Snapshots whose packs are unknown."""
        return [one for one in self._unsound() if one.manifest.error]

    def may_need_any_pack(self) -> bool:
        """Whether there is a manifest that may be undamaged and cannot be read, or looked at."""
        return self._is_behind or any(not one.manifest.corrupt for one in self.unreadable())

    def broken(self) -> list[tuple[Snapshot, str]]:
        """Snapshots with their errors."""
        sql = f"SELECT name FROM pack WHERE {UNSOUND_PACK}"
        packs = [row["name"] for row in self.index.execute(sql)]
        found = {one.manifest.name: one for one in [*self._unsound(), *self.users(packs)]}
        errors = ((found[name], self.error(found[name])) for name in sorted(found))
        return [(one, error) for one, error in errors if error is not None]

    def _unsound(self) -> list[Snapshot]:
        return list(self.snapshots(f"WHERE {UNSOUND_SNAPSHOT}"))

    def error(self, snapshot: Snapshot) -> str | None:
        """The error of a snapshot; None if it is sound."""
        manifest = snapshot.manifest
        if manifest.error:
            return manifest.error
        saved_as = manifest.saved_as
        if self._stored(saved_as) not in (None, manifest.name):
            return misnamed(manifest.path, saved_as, manifest.name)
        for pack, chunks in manifest.uses.items():
            table = self.pack(pack)
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

    def files(self, kind: str) -> list[str]:
        """Paths of "temporary" files, whose writers may be dead, or of "stray" ones.

        These are sidecars without a snapshot and lists of damage without a pack.
        """
        sql = "SELECT path FROM file WHERE kind <> '' AND kind = ?"
        return [os.fsdecode(row["path"]) for row in self.index.execute(sql, (kind,))]

    def temporary_bytes(self) -> int:
        """Size of all temporary files."""
        sql = "SELECT SUM(bytes) FROM file WHERE kind <> '' AND kind = ?"
        row = self.index.row(sql, (_TEMPORARY,))
        return 0 if row is None else int(row[0] or 0)

    def places(self, hashes: Sequence[Hashes]) -> list[list[PackChunk]]:
        """For each chain hash and content id, the places of undamaged chunks with these bytes."""
        return [
            [place for place in places if self._chunk(place) == both]
            for both, places in zip(hashes, self.chunks_of_keys([chain for chain, _ in hashes]))
        ]

    def chunks_named(self, chains: Sequence[bytes]) -> list[list[PackChunk]]:
        """For each chain hash, the places of undamaged chunks with this name."""
        return [
            [place for place in places if self._chunk(place)[0] == chain]
            for chain, places in zip(chains, self.chunks_of_keys(chains))
        ]

    def _chunk(self, place: PackChunk) -> Hashes:
        table = self.pack(place.pack)
        assert table is not None
        return table.chunk(place.chunk)

    def chunks_of_keys(self, chains: Sequence[bytes]) -> list[list[PackChunk]]:
        """Places of undamaged chunks whose chain hashes begin as these do."""
        keys = [_key(chain) for chain in chains]
        found: dict[int, list[PackChunk]] = {}
        for start in range(0, len(keys), _BATCH):
            some = list(dict.fromkeys(keys[start : start + _BATCH]))
            sql = (
                "SELECT key, name, chunk FROM place JOIN pack ON pack.id = place.pack"
                f" WHERE key IN ({', '.join('?' * len(some))})"
            )
            for row in self.index.execute(sql, some).fetchall():
                table = self.pack(row["name"])
                if table is not None and table.is_sound(row["chunk"]):
                    place = PackChunk(row["name"], row["chunk"])
                    found.setdefault(row["key"], []).append(place)
        return [found.get(key, []) for key in keys]

    def holders(self, place: PackChunk) -> Iterator[Snapshot]:
        """Snapshots that need a chunk, readable ones alone."""
        sql = (
            "SELECT snapshot.*, use.chunks AS used FROM use JOIN pack ON pack.id = use.pack"
            " JOIN snapshot ON snapshot.id = use.snapshot WHERE pack.name = ? AND use.top >= ?"
        )
        for row in self.index.execute(sql, (place.pack, place.chunk)):
            if place.chunk in np.frombuffer(row["used"], dtype=np.uint32):
                yield self._snapshot(row)

    def moves(self) -> dict[PackChunk, PackChunk]:
        """Other places to use, for needed chunks that are damaged or lie in several packs."""
        keys = [row["key"] for row in self.index.execute("SELECT key FROM twice")]
        wanted = {place for key in keys for place in self._of_key(key)}
        self.index.execute("DELETE FROM twice")
        self.index.executemany(
            "INSERT INTO twice SELECT ?1 WHERE"
            " (SELECT COUNT(*) FROM (SELECT 1 FROM place WHERE key = ?1 LIMIT 2)) > 1",
            ((key,) for key in keys),
        )
        for table in self.unsound_packs():
            wanted |= {PackChunk(table.id, chunk) for chunk in table.damaged}
        found = {}
        for place in sorted(wanted):
            own = self.pack(place.pack)
            if own is None or not own.counts[place.chunk]:
                continue
            (places,) = self.places([own.chunk(place.chunk)])
            best = max(places, key=lambda one: (self._referenced(one.pack), one), default=None)
            if best is not None and best != place:
                found[place] = best
        return found

    def _of_key(self, key: int) -> list[PackChunk]:
        sql = "SELECT name, chunk FROM place JOIN pack ON pack.id = place.pack WHERE key = ?"
        rows = self.index.execute(sql, (key,)).fetchall()
        return [PackChunk(row["name"], row["chunk"]) for row in rows]

    def _referenced(self, pack: str) -> int:
        table = self.pack(pack)
        return 0 if table is None else int(table.counts.sum())

    def _uses(self, snapshot: int) -> Uses:
        sql = (
            "SELECT name, use.chunks AS used FROM use JOIN pack ON pack.id = use.pack"
            " WHERE snapshot = ? ORDER BY number"
        )
        rows = self.index.execute(sql, (snapshot,)).fetchall()
        return {row["name"]: np.frombuffer(row["used"], dtype=np.uint32) for row in rows}

    def _pack(self, row: Any) -> Pack:
        return Pack(
            row["name"],
            self.pack_path(row["name"]),
            _stamp(row),
            chunks=row["chunks"],
            kind=row["kind"],
            hashes=row["hashes"],
            summary_checksums=np.frombuffer(row["checksums"], dtype=np.uint64),
            counts=np.frombuffer(row["counts"], dtype=np.int32),
            users=row["users"],
            damaged=frozenset(json.loads(row["damaged"])),
            error=row["error"],
            corrupt=bool(row["corrupt"]),
        )

    def _model(self, number: int) -> dict[str, Any]:
        if number not in self._models:
            row = self.index.row("SELECT fingerprint FROM model WHERE id = ?", (number,))
            self._models[number] = {} if row is None else json.loads(row["fingerprint"])
        return self._models[number]

    def _path_of(self, row: Any) -> str:
        path = self.manifest_path(row["name"])
        if row["inode"] or os.path.lexists(path):
            return path
        return f"{self.snapshots_folder}/{row['name']}"  # not named as manifests are

    def _snapshot(self, row: Any) -> Snapshot:
        name = row["name"]
        origin = None
        if row["model"] is not None:
            origin = Origin(row["salt"], self._model(row["model"]))
        saved_as, companion_of = json.loads(self.access.show(row["names"]))
        segment = None if row["segment"] is None else json.loads(self.access.show(row["segment"]))
        manifest = Manifest(
            name,
            self._path_of(row),
            _stamp(row),
            tokens=row["tokens"],
            chunks=row["chunks"],
            logical_digest=row["digest"],
            companions=json.loads(row["companions"]),
            companion_of=companion_of,
            segment=None if segment is None else SegmentNote(**segment),
            saved_as=saved_as,
            origin=origin,
            uses=self._uses(row["id"]),
            error=row["error"],
            corrupt=bool(row["corrupt"]),
        )
        owner, notes = row["owner"], row
        if owner is not None:
            notes = self.index.row("SELECT * FROM snapshot WHERE name = ?", (owner,)) or row
        note = Sidecar(bool(notes["pinned"]), notes["ttl"], notes["note_error"])
        return Snapshot(manifest, note, row["note_bytes"], notes["used_ns"], owner)


class _Reading:
    """Reports how far the reading of many files is."""

    def __init__(self, progress: ProgressCallback | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._count = 0
        self._logged = time.monotonic()

    def done(self) -> None:
        """Counts a file."""
        self._count += 1
        if self._progress is not None:
            self._progress(self._count, self._total)
        elif self._total >= _MANY and time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            done, total = f"{self._count:,}", f"{self._total:,}"
            _log.info("reading the files of a store for its index: %s of %s", done, total)


def _which(companions: bool) -> str:
    return "" if companions else "AND owner IS NULL AND companion_of IS NULL"


def _key(chain: bytes) -> int:
    return int.from_bytes(chain[:8], "little", signed=True)


def _keys(pack: Pack) -> list[int]:
    return [_key(pack.chunk(chunk)[0]) for chunk in range(pack.chunks)]


def _stamp(row: Any) -> Stamp:
    return Stamp(row["inode"], row["bytes"], row["mtime_ns"])


def _note_stamp(row: Any) -> Stamp | None:
    stamp = Stamp(row["note_inode"], row["note_bytes"], row["note_ns"])
    return None if stamp == _NO_STAMP else stamp


def _read_damage(path: str, chunks: int) -> tuple[frozenset[int], bool]:
    """The listed ones of `chunks` chunks, or all and True if the list cannot be read."""
    try:
        listed = read_json(path, SMALL_BYTES + 16 * chunks)
        if isinstance(listed, list) and all(type(chunk) is int for chunk in listed):
            return frozenset(listed).intersection(range(chunks)), False
    except (ValueError, OSError):
        pass
    return frozenset(range(chunks)), True
