"""The SQLite database of an object store's local folder: which bytes and objects it has."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpager._support.process import MadeIn
from kvpager.errors import StorageError

_VERSION = 1

_TABLES = """
CREATE TABLE state (address TEXT, boot TEXT, serial INTEGER, bytes INTEGER);
INSERT INTO state VALUES ('', '', 0, 0);

-- Payload of packs. ready: 0 while it is written or removed by `owner`. saved: whether a save wrote
-- and synced it, in the pack's own file; else it was fetched, into the pack's file of payload.
CREATE TABLE range (
  id INTEGER PRIMARY KEY AUTOINCREMENT, pack TEXT NOT NULL, start INTEGER, size INTEGER,
  saved INTEGER, ready INTEGER, owner TEXT, used INTEGER);
CREATE INDEX range_place ON range (pack, start);
CREATE INDEX range_used ON range (used) WHERE ready > 0;
CREATE INDEX range_unready ON range (owner) WHERE ready = 0;
CREATE TRIGGER range_added AFTER INSERT ON range
  BEGIN UPDATE state SET bytes = bytes + NEW.size; END;
CREATE TRIGGER range_removed AFTER DELETE ON range
  BEGIN UPDATE state SET bytes = bytes - OLD.size; END;

-- Objects of the bucket that the folder has a copy of, or an upload of. serial: of the change.
CREATE TABLE object (
  path TEXT PRIMARY KEY, size INTEGER, etag TEXT, generation TEXT, modified REAL,
  serial INTEGER) WITHOUT ROWID;
-- Snapshots that are saved in the folder and not yet in the bucket. error: why they cannot be.
CREATE TABLE pending (name TEXT PRIMARY KEY, overwrite INTEGER, error TEXT) WITHOUT ROWID;
"""


class LocalDatabase:
    """A database that threads and processes share. A forked child opens a connection of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._forget()
        with self.transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise StorageError(
                    f"{path}: of version {version}, this release knows {_VERSION}; use another "
                    "folder as the cache"
                )
            if not version:
                for statement in _statements():
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_VERSION}")

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._made_in = MadeIn()
        self._connection: sqlite3.Connection | None = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Within, no other thread or process changes the database."""
        if self._made_in.forked:
            _abandoned.append(self._connection)
            self._forget()
        with self._lock:
            try:
                database = self._connection or self._open()
                database.execute("BEGIN IMMEDIATE")
                try:
                    yield database
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
                database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StorageError(f"{self._path}: {error}") from error

    def rows(self, sql: str, values: Any = ()) -> list[Any]:
        """The answer to a query."""
        with self._lock:
            if self._connection is None or self._made_in.forked:
                with self.transaction() as database:
                    return database.execute(sql, values).fetchall()
            try:
                return self._connection.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise StorageError(f"{self._path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        uri = f"{Path(self._path).as_uri()}?mode=rwc"
        database = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=60
        )
        database.row_factory = sqlite3.Row
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        self._connection = database
        return database

    def close(self) -> None:
        """Closes the connection; the next call opens another."""
        with self._lock:
            if self._connection is not None and not self._made_in.forked:
                self._connection.close()
                self._connection = None


_abandoned: list[sqlite3.Connection | None] = []  # of parents: not to be closed in this process


def _statements() -> list[str]:
    found, part = [], ""
    for line in _TABLES.splitlines():
        part += line + "\n"
        if sqlite3.complete_statement(part):
            found.append(part)
            part = ""
    return found
