"""What a chunk store holds: an index of its packs, which are the truth.

REQUIRES, of every method of `Contents`: the store's lock. Rows of blocks go before their bytes do,
so that a reader whose bytes do not fit looks for its row again: without one it was a miss. Between
the two, ranges are in the table `dying`, and the budget counts them. Whoever has the lock ends what
a dead process began.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    UnsupportedVersionError,
)
from kvpager.stores.access import Access
from kvpager.stores.chunks.pack import Entry, Identity, PackFile, Table, span
from kvpager.stores.encryption import Secret
from kvpager.stores.files import remove
from kvpager.stores.holes import is_hole, punch
from kvpager.stores.index import Index, with_totals
from kvpager.stores.lock import in_use
from kvpager.stores.names import BLOCKS_SUFFIX, block_pack_of, is_temporary

_log = logging.getLogger(__name__)
_VERSION = 1001  # no other store's index has this one
_BATCH = 500  # values of one statement
_MANY = 10_000  # blocks that are removed together
_TEMPORARY, _DAMAGED = "temporary", "damaged"

_TABLES = """
CREATE TABLE state (packs TEXT);
INSERT INTO state VALUES ('');
CREATE TABLE identity (id INTEGER PRIMARY KEY, digest BLOB UNIQUE, text BLOB);
-- Temporary files, packs whose table is damaged, and files that are none of ours.
CREATE TABLE file (path BLOB PRIMARY KEY, bytes INTEGER, kind TEXT) WITHOUT ROWID;
-- front: bytes before the blocks.
CREATE TABLE pack (
  id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, identity INTEGER, inode INTEGER,
  bytes INTEGER, front INTEGER);
CREATE INDEX pack_identity ON pack (identity);
-- span: bytes on disk. used: time of the last use in ns.
CREATE TABLE block (
  label BLOB PRIMARY KEY, pack INTEGER, start INTEGER, size INTEGER, span INTEGER, checked BLOB,
  used INTEGER) WITHOUT ROWID;
-- Blocks of one put have one time, and a later one often needs those before it.
CREATE INDEX block_used ON block (used, start DESC);
CREATE INDEX block_pack ON block (pack);
-- Ranges of packs that are to be freed.
CREATE TABLE dying (pack INTEGER, start INTEGER, span INTEGER);
"""
_TOTALS = {
    "file": {"bytes": "{0}.bytes"},
    "pack": {"bytes": "{0}.front", "packs": "1"},
    "block": {"bytes": "{0}.span", "blocks": "1"},
    "dying": {"bytes": "{0}.span"},
}


def _schema() -> str:
    return with_totals(_TABLES, _TOTALS, "INSERT DELETE")


class Swept(NamedTuple):
    """Numbers of removed files."""

    temporaries: int
    damaged_packs: int


class Contents:
    """The packs, blocks and other files of a chunk store."""

    def __init__(self, folder: str, secret: Secret | None) -> None:
        self.folder = folder
        self.packs_folder = f"{folder}/packs"
        self.index = Index(folder, _schema, _VERSION)
        self._secret = secret
        self._access = Access(secret=secret)

    def pack_path(self, pack: str) -> str:
        """Path of a pack."""
        return f"{self.packs_folder}/{pack}{BLOCKS_SUFFIX}"

    # Taking the store's lock, and giving it back.

    def begin(self, mode: int) -> None:
        """Opens the index, and brings it up to date if the files are not as it left them."""
        self.index.begin(mode)
        if self._state() != self._folder_state():
            self.refresh()
        if not self.index.is_private:
            self._bury(is_tolerant=True)

    def settle(self) -> None:
        """Records that the index is up to date with the files, and ends the transaction."""
        if self._state() != self._folder_state():
            # A time of its own: the file system's clock may give the next change the same.
            with contextlib.suppress(OSError):
                os.utime(self.packs_folder, ns=(time.time_ns(),) * 2)
            self.index.execute("UPDATE state SET packs = ?", (self._folder_state(),))
        self.index.commit()

    def rebuild(self, mode: int) -> None:
        """Makes the index again from the packs."""
        self.index.discard(mode)
        self.refresh()
        _log.info("%s: the index was made again from its packs", self.folder)

    def _commit(self) -> None:
        """Shows other connections what was changed."""
        self.index.commit()
        self.index.execute("BEGIN IMMEDIATE")

    def _state(self) -> Any:
        row = self.index.row("SELECT packs FROM state")
        return None if row is None else row["packs"]

    def _folder_state(self) -> str:
        status = Path(self.packs_folder).stat()
        return f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"

    # Reading files.

    def refresh(self) -> None:
        """Compares the index with the files, and reads packs that are new or differ."""
        self.index.execute("DELETE FROM file")
        there: dict[str, tuple[int, int]] = {}
        # Not scandir: an interrupt could leave its descriptor open.
        for name in os.listdir(self.packs_folder):  # noqa: PTH208
            path = f"{self.packs_folder}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            pack = block_pack_of(name)
            is_file = stat.S_ISREG(status.st_mode)
            if pack is not None and is_file and status.st_size:
                there[pack] = (status.st_ino, status.st_size)
            else:  # a pack without bytes is one that was being removed
                is_dead = is_file and (is_temporary(name) or pack is not None)
                self._put_file(path, status.st_size, _TEMPORARY if is_dead else "")
        known = {}
        for row in self.index.execute("SELECT * FROM pack").fetchall():
            if there.get(row["name"]) == (row["inode"], row["bytes"]):
                known[row["name"]] = row["id"]
            else:
                self._forget_pack(row["id"])
        found = [one for pack in there if pack not in known and (one := self._read(pack))]
        # The latest copy of a block counts.
        for pack, table, live, used_ns in sorted(found, key=lambda one: -one[1].created_ns):
            self._put_pack(pack, there[pack][0], table, live, used_ns)
        self.settle()
        self.index.execute("BEGIN IMMEDIATE")

    def _read(self, pack: str) -> tuple[str, Table, list[Entry], int] | None:
        """A pack's table, its blocks that were not freed, and its time; None: it has none now."""
        path = self.pack_path(pack)
        try:
            file = PackFile(path, pack, self._secret)
            table = file.table()
            live = [e for e in table.entries if not is_hole(file.descriptor, e.start, e.size)]
        except FileNotFoundError:
            return None
        except CorruptSnapshotError as error:
            _log.warning("%s; its blocks are lost, and gc() removes it", error)
            self._put_file(path, _bytes_on_disk(path), _DAMAGED)
            return None
        except (OSError, UnsupportedVersionError) as error:
            _log.warning("%s: not read: %s", path, error)
            self._put_file(path, _bytes_on_disk(path), "")
            return None
        return pack, table, live, file.mtime_ns

    def _put_file(self, path: str, size: int, kind: str) -> None:
        sql = "INSERT OR REPLACE INTO file VALUES (?, ?, ?)"
        # REPLACE runs no trigger for the row that it replaces.
        self.index.execute("DELETE FROM file WHERE path = ?", (os.fsencode(path),))
        self.index.execute(sql, (os.fsencode(path), size, kind))

    def add_temporary(self, path: str, size: int) -> None:
        """Counts a file that is being written."""
        self._put_file(path, size, _TEMPORARY)

    def forget_file(self, path: str) -> None:
        """Counts a file no longer."""
        self.index.execute("DELETE FROM file WHERE path = ?", (os.fsencode(path),))

    def add_pack(self, pack: str, table: Table, now_ns: int) -> int:
        """Adds a pack that was just published; returns how many of its blocks are new.

        The others were stored by somebody else meanwhile, and their bytes are freed.
        """
        inode = Path(self.pack_path(pack)).stat().st_ino
        added = self._put_pack(pack, inode, table, table.entries, now_ns)
        self._bury()
        return added

    def _put_pack(
        self, pack: str, inode: int, table: Table, live: Sequence[Entry], used_ns: int
    ) -> int:
        identity = table.identity
        number = self.index.insert(
            "pack",
            name=pack,
            identity=self._identity_number(identity),
            inode=inode,
            bytes=table.bytes,
            front=table.front,
        )
        labels = [identity.label(e.key, e.group, self._secret) for e in live]
        there = set(self.find(labels))
        rows, dying = [], []
        for label, entry in zip(labels, live):
            if label in there:
                dying.append((number, entry.start, span(entry.size)))
                continue
            there.add(label)
            rows.append(
                (label, number, entry.start, entry.size, span(entry.size), entry.check, used_ns)
            )
        self.index.executemany("INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self.index.executemany("INSERT INTO dying VALUES (?, ?, ?)", dying)
        if not rows and not dying:  # all was freed, but the file is there
            self.index.execute("INSERT INTO dying VALUES (?, 0, 0)", (number,))
        return len(rows)

    def _identity_number(self, identity: Identity) -> int:
        row = self.index.row("SELECT id FROM identity WHERE digest = ?", (identity.digest,))
        if row is not None:
            return int(row["id"])
        hidden = self._access.hide(identity.text)
        return self.index.insert("identity", digest=identity.digest, text=hidden)

    def _forget_pack(self, number: int) -> None:
        for table in ("block", "dying"):
            self.index.execute(f"DELETE FROM {table} WHERE pack = ?", (number,))
        self.index.execute("DELETE FROM pack WHERE id = ?", (number,))

    # Asking.

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """The answer to a query."""
        return self.index.execute(sql, values).fetchall()

    def find(self, labels: Sequence[bytes], since_ns: int | None = None) -> dict[bytes, Any]:
        """Rows of blocks by label: of those that are there, and were used since a time."""
        found: dict[bytes, Any] = {}
        for sql, values in queries(FIND, labels, since_ns):
            found.update((row["label"], row) for row in self.index.execute(sql, values))
        return found

    def of(self, identity: Identity) -> list[Any]:
        """Rows of all blocks of an identity."""
        sql = (
            "SELECT block.* FROM block JOIN pack ON pack.id = block.pack"
            " WHERE pack.identity = (SELECT id FROM identity WHERE digest = ?)"
        )
        return list(self.index.execute(sql, (identity.digest,)).fetchall())

    def totals(self) -> dict[str, int]:
        """Bytes of all files, and numbers of packs and blocks."""
        row = self.index.row("SELECT * FROM totals")
        assert row is not None
        return {key: int(row[key]) for key in row.keys()}  # noqa: SIM118  # sqlite3's own

    def named(self, rows: Iterable[Any]) -> list[tuple[Mapping[str, Any], int, int]]:
        """The rows of `IDENTITIES`: each identity, and the number and bytes of its blocks."""
        show = self._access.show
        return [(json.loads(show(row["text"])), row["blocks"], row["bytes"]) for row in rows]

    def packs(self) -> list[tuple[str, int]]:
        """Names and sizes of all packs, those whose table is damaged included."""
        found = {row["name"]: row["bytes"] for row in self.index.execute("SELECT * FROM pack")}
        for row in self.index.execute("SELECT * FROM file WHERE kind = ?", (_DAMAGED,)):
            if pack := block_pack_of(Path(os.fsdecode(row["path"])).name):
                found[pack] = row["bytes"]
        return sorted(found.items())

    # Changing.

    def touch(self, uses: Mapping[bytes, int]) -> None:
        """Records last uses, by label."""
        touch(self.index, uses)

    def make_room(self, budget: int | None, needed: int) -> int:
        """Evicts until `needed` more bytes fit into the budget; returns how many blocks went.

        Raises:
            CapacityError: they cannot fit; nothing was evicted.
        """
        if budget is None or self.totals()["bytes"] + needed <= budget:
            return 0
        self.sweep()
        row = self.index.row("SELECT TOTAL(bytes) AS bytes FROM file")
        fixed = 0 if row is None else int(row["bytes"])
        if fixed + needed > budget:
            raise CapacityError(
                f"byte_budget is {budget}; {needed} bytes are needed and {fixed} cannot go, of "
                "files being written or not ours; raise byte_budget, or put fewer blocks at once"
            )
        evicted = 0
        while (excess := self.totals()["bytes"] + needed - budget) > 0:
            victims = self._least_recently_used(excess)
            if not victims:
                raise CapacityError(
                    f"byte_budget is {budget}; {needed} bytes are needed, and {excess} more than "
                    "fit are taken by what cannot be freed now; see the log"
                )
            evicted += self.remove(victims)
        return evicted

    def _least_recently_used(self, excess: int) -> list[Any]:
        """Rows of as many blocks as free `excess` bytes, or of some of them."""
        found = []
        for row in self.index.execute("SELECT * FROM block ORDER BY used, start DESC"):
            found.append(row)
            excess -= row["span"]
            if excess <= 0 or len(found) == _MANY:
                break
        return found

    def expire(self, now_ns: int, ttl_seconds: float | None) -> int:
        """Removes blocks whose time to live is over; returns their number."""
        count, since = 0, since_of(now_ns, ttl_seconds)
        sql = "SELECT * FROM block WHERE used < ? LIMIT ?"
        while since is not None and (rows := self.index.execute(sql, (since, _MANY)).fetchall()):
            count += self.remove(rows)
        return count

    def remove(self, rows: Sequence[Any]) -> int:
        """Removes blocks: first their rows, then their bytes. Returns their number."""
        sql = "INSERT INTO dying VALUES (?, ?, ?)"
        self.index.executemany(sql, ((row["pack"], row["start"], row["span"]) for row in rows))
        sql = "DELETE FROM block WHERE label = ?"
        self.index.executemany(sql, ((row["label"],) for row in rows))
        self._commit()
        self._bury()
        return len(rows)

    def _bury(self, *, is_tolerant: bool = False) -> None:
        """Frees the bytes of blocks whose rows are gone, and removes packs without any.

        is_tolerant: only log what fails, and leave it for the next time.
        """
        sql = "SELECT pack, name, start, span FROM dying LEFT JOIN pack ON id = pack"
        rows = self.index.execute(f"{sql} ORDER BY pack, start").fetchall()
        for pack, ranges in itertools.groupby(rows, key=lambda row: (row["pack"], row["name"])):
            number, name = pack
            sql = "SELECT 1 FROM block WHERE pack = ? LIMIT 1"
            is_needed = self.index.row(sql, (number,)) is not None
            try:
                if name is not None and is_needed:
                    punch(self.pack_path(name), _merged(ranges))
                elif name is not None:
                    remove_pack(self.pack_path(name))
            except OSError as error:
                if not is_tolerant:
                    raise
                _log.warning("%s: cannot be freed: %s", self.pack_path(name), error)
                continue
            self.index.execute("DELETE FROM dying WHERE pack = ?", (number,))
            if not is_needed:
                self.index.execute("DELETE FROM pack WHERE id = ?", (number,))

    def sweep(self) -> Swept:
        """Removes files of dead writers, and packs whose table is damaged."""
        self._bury(is_tolerant=True)
        dead = [path for path in self._files(_TEMPORARY) if not in_use(path)]
        damaged = self._files(_DAMAGED)
        for path in dead + damaged:
            remove(path)
            self.forget_file(path)
        return Swept(len(dead), len(damaged))

    def _files(self, kind: str) -> list[str]:
        rows = self.index.execute("SELECT path FROM file WHERE kind = ?", (kind,))
        return [os.fsdecode(row["path"]) for row in rows]


TOTALS = (
    "SELECT *, (SELECT COUNT(*) FROM identity WHERE EXISTS"
    " (SELECT 1 FROM pack WHERE pack.identity = identity.id)) AS identities FROM totals"
)
IDENTITIES = (
    "SELECT text, COUNT(*) AS blocks, SUM(block.size) AS bytes FROM block"
    " JOIN pack ON pack.id = block.pack JOIN identity ON identity.id = pack.identity"
    " GROUP BY identity.id ORDER BY blocks DESC"
)
FIND = (
    "SELECT block.*, pack.name AS name, pack.inode AS inode"
    " FROM block JOIN pack ON pack.id = block.pack WHERE label IN ({}) AND used >= ?"
)
HAS = "SELECT label FROM block WHERE label IN ({}) AND used >= ?"


def queries(
    sql: str, labels: Sequence[bytes], since_ns: int | None
) -> Iterable[tuple[str, list[Any]]]:
    """`sql`, FIND or HAS, and its values, for some labels at a time."""
    since = -(2**62) if since_ns is None else since_ns
    for at in range(0, len(labels), _BATCH):
        some = labels[at : at + _BATCH]
        yield sql.format(", ".join("?" * len(some))), [*some, since]


def since_of(now_ns: int, ttl_seconds: float | None) -> int | None:
    """Blocks that were used last before this time have expired; None: none has."""
    if ttl_seconds is None:
        return None
    return max(math.ceil(now_ns - ttl_seconds * 1e9), -(2**62))


def touch(database: Any, uses: Mapping[bytes, int]) -> None:
    """Records last uses, by label, in a database."""
    sql = "UPDATE block SET used = ? WHERE label = ? AND used < ?"
    database.executemany(sql, ((used, label, used) for label, used in uses.items()))


def remove_pack(path: str) -> None:
    """Removes a pack, and frees its bytes even while somebody has it open."""
    try:
        os.truncate(path, 0)
    except FileNotFoundError:
        return
    remove(path)


def _merged(ranges: Iterable[Any]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for row in ranges:
        if merged and sum(merged[-1]) == row["start"]:
            merged[-1] = (merged[-1][0], merged[-1][1] + row["span"])
        elif row["span"]:
            merged.append((row["start"], row["span"]))
    return merged


def _bytes_on_disk(path: str) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return min(status.st_size, status.st_blocks * 512)
