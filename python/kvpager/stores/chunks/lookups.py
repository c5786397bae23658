"""A second connection to a chunk store's index, for what must not wait for the store's lock."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager._support.process import MadeIn
from kvpager.stores.chunks.contents import touch
from kvpager.stores.names import INDEX_FILE

_FLUSH_SECONDS, _MANY = 1.0, 20_000  # uses are recorded so often, or when there are so many
_PATIENCE_SECONDS = 5.0


class Lookups:
    """Finds blocks, and records their uses and damage. Used by any number of threads.

    Its methods raise sqlite3.DatabaseError or OSError while the index is missing or damaged: then
    the caller takes the store's lock, which makes it again.
    """

    def __init__(self, folder: str) -> None:
        self._path = f"{folder}/{INDEX_FILE}"
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._made_in = MadeIn()
        self._database: sqlite3.Connection | None = None
        self._inode = 0
        self._used: dict[bytes, int] = {}
        self._packs: dict[str, int] = {}
        self._flushed = time.monotonic()

    def _connected(self) -> sqlite3.Connection:
        inode = Path(self._path).stat().st_ino
        if self._database is None or inode != self._inode:
            if self._database is not None:
                self._database.close()
                self._database = None
            uri = f"{Path(self._path).as_uri()}?mode=rw"
            database = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0
            )
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA synchronous = NORMAL")
            # A checkpoint waits for the disk; who has the store's lock makes it.
            database.execute("PRAGMA wal_autocheckpoint = 0")
            self._database, self._inode = database, inode
        return self._database

    def _check_process(self) -> None:
        if self._made_in.forked:
            _abandoned.append(self._database)
            self._forget()

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """The answer to a query."""
        self._check_process()
        with self._lock:
            return self._connected().execute(sql, values).fetchall()

    def used(self, labels: Iterable[bytes], packs: Iterable[str], now_ns: int) -> None:
        """Notes uses of blocks; records them from time to time. packs: paths of their packs.

        A pack's time is the last use of its blocks once the index is lost.
        """
        self._check_process()
        with self._lock:
            self._used.update(dict.fromkeys(labels, now_ns))
            self._packs.update(dict.fromkeys(packs, now_ns))
            is_due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        if is_due or len(self._used) > _MANY:
            self.flush()

    def take_used(self) -> Mapping[bytes, int]:
        """Uses that were not recorded yet; the caller records them."""
        self._check_process()
        with self._lock:
            used, self._used = self._used, {}
            return used

    def flush(self) -> None:
        """Records uses, unless somebody changes the index just now."""
        self._check_process()
        with self._lock:
            packs, self._packs = self._packs, {}
        for path, used_ns in packs.items():
            with contextlib.suppress(OSError):
                os.utime(path, ns=(used_ns, used_ns))
        with self._lock, contextlib.suppress(sqlite3.DatabaseError, OSError):
            self._flushed = time.monotonic()
            if self._used:
                database = self._connected()
                database.execute("BEGIN IMMEDIATE")
                try:
                    touch(database, self._used)
                finally:
                    database.execute("COMMIT")
                self._used = {}

    def drop(self, row: Any) -> bool:
        """Removes the row of a block that is damaged; its bytes go when the lock is taken next.

        row: as FIND gives it.

        Returns whether the block was still there.
        """
        self._check_process()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with self._lock:
                database = self._connected()
                if not database.execute(_IS_THERE, _place(row)).fetchone():
                    return False
                try:
                    database.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    if time.monotonic() > deadline:
                        raise
                else:
                    return _drop(database, row)
            time.sleep(0.002)

    def close(self) -> None:
        """Records uses and closes the connection."""
        self.flush()
        with self._lock:
            if self._database is not None and not self._made_in.forked:
                self._database.close()
            self._database = None


# By the name of the pack: its number may be that of another one by now.
_PACK = "(SELECT id FROM pack WHERE name = ?)"
_WHERE = f"WHERE label = ? AND start = ? AND pack = {_PACK}"
_IS_THERE = f"SELECT 1 FROM block {_WHERE}"


def _place(row: Any) -> tuple[Any, ...]:
    return row["label"], row["start"], row["name"]


def _drop(database: sqlite3.Connection, row: Any) -> bool:
    try:
        cursor = database.execute(f"DELETE FROM block {_WHERE}", _place(row))
        is_there = cursor.rowcount > 0
        if is_there:
            values = (row["name"], row["start"], row["span"])
            database.execute(f"INSERT INTO dying VALUES ({_PACK}, ?, ?)", values)
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
    return is_there


_abandoned: list[sqlite3.Connection | None] = []  # of parents: not to be closed in this process
