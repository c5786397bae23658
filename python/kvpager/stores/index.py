"""The SQLite database of a directory store: STORE/index.sqlite3, beside what it is an index of.

It is opened and used only while the store's lock is held. Where it cannot be written, as in a
folder that may only be read, a private copy in memory takes its place. A damaged one is made anew.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvpager._support.process import MadeIn
from kvpager.errors import StorageError
from kvpager.stores.files import widen
from kvpager.stores.names import INDEX_FILE, INDEX_FILES

_VERSION = 2
_LOCKED = ("locked", "locking protocol")

# Conditions of indexes; SQLite uses these for a query that repeats them.
UNSOUND_PACK = "(NOT present OR error IS NOT NULL OR damaged <> '[]' OR damage_ns < 0)"
SPARSE_PACK = "(2 * needed < chunks * (needed > 0))"
UNSOUND_SNAPSHOT = "(error IS NOT NULL OR note_error IS NOT NULL OR saved_as <> name)"

_TABLES = """
CREATE TABLE state (packs TEXT, snapshots TEXT);
INSERT INTO state VALUES ('', '');
CREATE TABLE model (id INTEGER PRIMARY KEY, fingerprint TEXT UNIQUE);
-- Temporary files, sidecars and lists of damage of nothing, and files that are none of ours.
CREATE TABLE file (path BLOB PRIMARY KEY, bytes INTEGER, kind TEXT) WITHOUT ROWID;
CREATE INDEX file_kind ON file (kind) WHERE kind <> '';

-- present: whether there is such a file; else only snapshots that need it. inode: 0 if it is none.
CREATE TABLE pack (
  id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, present INTEGER DEFAULT 0,
  inode INTEGER DEFAULT 0, bytes INTEGER DEFAULT 0, mtime_ns INTEGER DEFAULT 0,
  chunks INTEGER DEFAULT 0, kind TEXT DEFAULT '', hashes BLOB DEFAULT x'',
  checksums BLOB DEFAULT x'', error TEXT, corrupt INTEGER DEFAULT 0,
  damaged TEXT DEFAULT '[]', damage_bytes INTEGER DEFAULT 0, damage_ns INTEGER DEFAULT 0,
  users INTEGER DEFAULT 0, counts BLOB DEFAULT x'', needed INTEGER DEFAULT 0,
  referenced INTEGER DEFAULT 0);
CREATE INDEX pack_unneeded ON pack (id) WHERE users = 0;
CREATE INDEX pack_sparse ON pack (id) WHERE {sparse_pack};
CREATE INDEX pack_unsound ON pack (id) WHERE {unsound_pack};

-- key: the first 8 bytes of a chunk's chain hash. twice: keys that several packs have.
CREATE TABLE place (key INTEGER, pack INTEGER, chunk INTEGER, PRIMARY KEY (key, pack, chunk))
  WITHOUT ROWID;
CREATE TABLE twice (key INTEGER PRIMARY KEY);

-- inode: 0 if it is no regular file. note_*: of its sidecar, if it has one. names: JSON list of
-- saved_as and companion_of as users know them; encrypted, as segment is, in an encrypted store.
CREATE TABLE snapshot (
  id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, inode INTEGER, bytes INTEGER,
  mtime_ns INTEGER, tokens INTEGER, chunks INTEGER, digest TEXT, companions TEXT,
  companion_of TEXT, segment TEXT, saved_as TEXT, names TEXT, salt TEXT, model INTEGER, error TEXT,
  corrupt INTEGER, note_inode INTEGER DEFAULT 0, note_bytes INTEGER DEFAULT 0,
  note_ns INTEGER DEFAULT 0, pinned INTEGER DEFAULT 0, ttl REAL, note_error TEXT,
  used_ns INTEGER DEFAULT 0, owner TEXT);
CREATE INDEX snapshot_used ON snapshot (used_ns, name) WHERE owner IS NULL;
CREATE INDEX snapshot_ends ON snapshot (used_ns + ttl * 1e9) WHERE ttl IS NOT NULL;
CREATE INDEX snapshot_default ON snapshot (used_ns)
  WHERE ttl IS NULL AND NOT pinned AND owner IS NULL;
CREATE INDEX snapshot_orphan ON snapshot (id) WHERE companion_of IS NOT NULL AND owner IS NULL;
CREATE INDEX snapshot_owner ON snapshot (owner) WHERE owner IS NOT NULL;
CREATE INDEX snapshot_unsound ON snapshot (id) WHERE {unsound_snapshot};

-- chunks: of the pack, uint32, in the snapshot's order. top: the largest of them.
CREATE TABLE use (snapshot INTEGER, number INTEGER, pack INTEGER, chunks BLOB, top INTEGER,
  PRIMARY KEY (snapshot, number)) WITHOUT ROWID;
CREATE INDEX use_of_pack ON use (pack, top);
"""

# What each row of a table adds to the totals of the store.
_TOTALS = {
    "file": {"bytes": "{0}.bytes"},
    "pack": {
        "bytes": "{0}.bytes + {0}.damage_bytes",
        "packs": "{0}.present",
        "pack_bytes": "{0}.bytes",
        "chunks": "{0}.chunks",
        "needed": "{0}.needed",
        "referenced": "{0}.referenced",
    },
    "snapshot": {
        "bytes": "{0}.bytes + {0}.note_bytes",
        "snapshots": "({0}.companion_of IS NULL)",
        "companions": "({0}.companion_of IS NOT NULL)",
        "pinned": "({0}.pinned AND {0}.companion_of IS NULL)",
    },
}


def with_totals(
    tables: str, totals: Mapping[str, Mapping[str, str]], events: str = "INSERT DELETE UPDATE"
) -> str:
    """SQL of tables, and of one table `totals` that triggers keep up to date.

    totals: by table, what each of its rows (`{0}`) adds to which column.
    events: that change rows, among INSERT, DELETE and UPDATE.
    """
    names = dict.fromkeys(name for adds in totals.values() for name in adds)
    parts = [tables, f"CREATE TABLE totals ({', '.join(f'{name} INTEGER' for name in names)});"]
    parts.append(f"INSERT INTO totals VALUES ({', '.join('0' * len(names))});")
    changes = {"INSERT": "+NEW", "DELETE": "-OLD", "UPDATE": "+NEW -OLD"}
    for table, adds in totals.items():
        for event in events.split():
            sets = ", ".join(
                f"{name} = {name} "
                + " ".join(f"{row[0]} ({each.format(row[1:])})" for row in changes[event].split())
                for name, each in adds.items()
            )
            parts.append(
                f"CREATE TRIGGER {table}_{event} AFTER {event} ON {table} "
                f"BEGIN UPDATE totals SET {sets}; END;"
            )
    return "\n".join(parts)


def _snapshots() -> str:
    tables = _TABLES.format(
        sparse_pack=SPARSE_PACK, unsound_pack=UNSOUND_PACK, unsound_snapshot=UNSOUND_SNAPSHOT
    )
    return with_totals(tables, _TOTALS)


class Index:
    """The connection to a store's database. Used by one thread at a time.

    A forked child opens one of its own: SQLite's must not be used, nor closed, by two processes.
    One whose file was replaced opens the new file.
    """

    def __init__(
        self, folder: str, schema: Callable[[], str] = _snapshots, version: int = _VERSION
    ) -> None:
        """`schema`: returns the SQL that makes its tables; `version`: of these."""
        self._folder = folder
        self._schema, self._version = schema, version
        self._inode = 0  # of the open file; 0: it is a private copy
        self._path = f"{folder}/{INDEX_FILE}"
        self._made_in = MadeIn()
        self._database: sqlite3.Connection | None = None
        self._finalizer = weakref.finalize(self, _close, None, self._made_in)

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        """Runs a statement. REQUIRES: `begin`."""
        assert self._database is not None
        return self._database.execute(sql, values)

    def executemany(self, sql: str, rows: Any) -> None:
        """Runs a statement for each row. REQUIRES: `begin`."""
        assert self._database is not None
        self._database.executemany(sql, rows)

    def insert(self, table: str, **values: Any) -> int:
        """Adds a row; returns its number. REQUIRES: `begin`."""
        places = ", ".join("?" * len(values))
        sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})"
        return self.execute(sql, tuple(values.values())).lastrowid or 0

    def update(self, table: str, name: str, **values: Any) -> None:
        """Sets columns of the row with this name. REQUIRES: `begin`."""
        sets = ", ".join(f"{column} = ?" for column in values)
        self.execute(f"UPDATE {table} SET {sets} WHERE name = ?", (*values.values(), name))

    def row(self, sql: str, values: Any = ()) -> sqlite3.Row | None:
        """The first row of an answer; None without any. REQUIRES: `begin`."""
        found: sqlite3.Row | None = self.execute(sql, values).fetchone()
        return found

    def begin(self, mode: int) -> None:
        """Begins a transaction; opens or makes the database where needed.

        mode: permissions of a new one.
        """
        if self._made_in.forked:
            _abandoned.append(self._database)
            self._finalizer.detach()
            self._made_in, self._database = MadeIn(), None
        if self._database is not None and self._inode not in (0, self._inode_now()):
            self.close()
        if self._database is not None:
            self.rollback()  # what an interrupt may have left
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.DatabaseError as error:
                self._refuse_locked(error)
                self.close()
            else:
                return
        try:
            self._open(mode)
        except (sqlite3.DatabaseError, OSError) as error:
            self._refuse_locked(error)
            self.begin_private()

    @property
    def is_private(self) -> bool:
        """Whether it is a copy in memory, because the file cannot be written."""
        return self._database is not None and self._inode == 0

    def _inode_now(self) -> int:
        try:
            return Path(self._path).stat().st_ino
        except OSError:
            return -1

    def commit(self) -> None:
        """Ends the transaction."""
        assert self._database is not None
        self._database.execute("COMMIT")

    def rollback(self) -> None:
        """Takes back what the transaction has changed, if one has begun."""
        if self._database is not None and self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Closes the connection; `begin` opens it again."""
        self._finalizer()
        self._database = None

    def discard(self, mode: int) -> None:
        """Begins a transaction of an empty database in place of a damaged one."""
        self.close()
        with contextlib.suppress(OSError):
            self._remove()
        self.begin(mode)

    def _remove(self) -> None:
        for file in INDEX_FILES:
            Path(self._folder, file).unlink(missing_ok=True)

    def share(self, mode: int) -> None:
        """Widens its files' permissions."""
        for file in INDEX_FILES:
            if Path(self._folder, file).exists():
                widen(f"{self._folder}/{file}", mode)

    def _open(self, mode: int) -> None:
        path = Path(self._path)
        for _ in range(2):
            if not path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
                widen(self._path, mode)
            self._connect(f"{path.as_uri()}?mode=rw")
            try:
                self.execute("PRAGMA journal_mode = WAL")
                self.execute("PRAGMA synchronous = NORMAL")
                if self._made():
                    self.execute("BEGIN IMMEDIATE")
                    self._inode = self._inode_now()
                    return
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                pass  # it is damaged
            self.close()
            self._remove()
        raise sqlite3.DatabaseError(f"{path}: damaged as often as it is made")

    def begin_private(self) -> None:
        """Begins a transaction of a copy in memory; an empty one if the file cannot be read."""
        self.close()
        self._inode = 0
        self._connect(":memory:")
        assert self._database is not None
        try:
            uri = f"{Path(self._path).as_uri()}?mode=ro&immutable=1"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as source:
                source.backup(self._database)
            is_ours = self._made()
        except sqlite3.DatabaseError:
            is_ours = False
        if not is_ours:
            self.close()
            self._connect(":memory:")
            self._made()
        self.execute("BEGIN IMMEDIATE")

    def _connect(self, address: str) -> None:
        database = sqlite3.connect(
            address, uri=True, isolation_level=None, check_same_thread=False, timeout=10
        )
        database.row_factory = sqlite3.Row
        self._database = database
        self._finalizer = weakref.finalize(self, _close, database, self._made_in)

    def _made(self) -> bool:
        """Makes the tables of an empty database; whether it has ours."""
        assert self._database is not None
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if not version and not self._database.execute("SELECT 1 FROM sqlite_master").fetchone():
            self._database.executescript(
                f"BEGIN; {self._schema()} PRAGMA user_version = {self._version}; COMMIT;"
            )
            return True
        return bool(version == self._version)

    def _refuse_locked(self, error: Exception) -> None:
        """Raises StorageError for what no other database can help with."""
        if isinstance(error, sqlite3.OperationalError) and any(
            words in str(error) for words in _LOCKED
        ):
            raise StorageError(
                f"{self._path}: {error}; a store needs a file system with the locks that SQLite "
                "uses, which NFS and its like may lack"
            ) from error


_abandoned: list[sqlite3.Connection | None] = []  # of parents: not to be closed in this process


def _close(database: sqlite3.Connection | None, made_in: MadeIn) -> None:
    if database is None:
        return
    if made_in.forked:
        _abandoned.append(database)
    else:
        database.close()
