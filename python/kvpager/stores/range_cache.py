"""Payload of a bucket's packs in local files, within a budget of bytes that holds at every instant.

A pack of the bucket is a sparse file of its true size here, which has front and metadata alone;
what is fetched of its payload goes to a file of its own, so that the pack's file keeps its time. A
pack that was saved here is whole. Which ranges are present is in the database, never guessed from
holes. A row is added before its bytes are written, and removed after they were: so the rows are
never less than what is on the disk. Bytes leave by punching a hole. A reader looks whether its row
is still there once it has read, since another process may have punched the hole meanwhile.

Packs of an encrypted store are encrypted here too, and ranges are those of the encrypted bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvpager import _core
from kvpager.errors import CapacityError, CorruptSnapshotError
from kvpager.stores.access import Access, LocalRanges
from kvpager.stores.base import ByteRanges
from kvpager.stores.bucket import Bucket
from kvpager.stores.encryption import PlainRanges
from kvpager.stores.files import PRIVATE, make_folder, remove
from kvpager.stores.holes import punch
from kvpager.stores.local_database import LocalDatabase
from kvpager.stores.lock import Hold, in_use
from kvpager.stores.names import SNAPSHOT_SUFFIX

FRONT_BYTES = 4096
PIECE_BYTES = 16 << 20  # of what a save wrote; as much leaves the cache at once
_LAYOUT_ENTRY = 64 + 2 * 32 + 8  # the offset of a file's third section
_OWNER_SUFFIX = ".owner"
_IN_BUCKET = "EXISTS (SELECT 1 FROM object WHERE path = 'packs/' || range.pack || '.kvsnap')"


def pack_object(pack: str) -> str:
    """The object of a pack."""
    return f"packs/{pack}{SNAPSHOT_SUFFIX}"


def metadata_start(front: bytes, where: str) -> tuple[int, int]:
    """Where the metadata of a snapshot file begin, and its size, by its first 4096 bytes."""
    start = int.from_bytes(front[_LAYOUT_ENTRY : _LAYOUT_ENTRY + 8], "little")
    size = int.from_bytes(front[24:32], "little")
    if len(front) != FRONT_BYTES or front[:8] != b"\x89KVSNAP\n" or not FRONT_BYTES <= start < size:
        raise CorruptSnapshotError(f"{where}: its first {len(front)} bytes are no snapshot's")
    return start, size


class Payload(NamedTuple):
    """Where the payload of a pack's file begins and ends, and the size of the file.

    An encrypted pack's payload ends with the block before those of its metadata.
    """

    start: int
    end: int
    size: int

    @classmethod
    def of(cls, file: ByteRanges, path: str, access: Access) -> Payload:
        """Reads it in the file's front. Raises StorageError, CorruptSnapshotError."""
        plain = access.plain(file, path)
        front = bytes(plain.read(0, min(FRONT_BYTES, plain.size)))
        end, size = metadata_start(front, path)
        if not isinstance(plain, PlainRanges):
            return cls(FRONT_BYTES, end, size)
        return cls(plain.block_start(FRONT_BYTES), plain.block_start(end), file.size)


class RangeCache:
    """Which ranges of which packs are in the files of a folder. Used by any number of threads."""

    def __init__(
        self,
        database: LocalDatabase,
        folder: str,
        packs: str,
        byte_budget: int | None,
        access: Access,
    ) -> None:
        """`folder`: of the cache; `packs`: of the packs' files; `access`: of these."""
        self._database = database
        self._access = access
        self._folder = folder
        self._packs = packs
        make_folder(f"{folder}/payload", PRIVATE)
        self.byte_budget = byte_budget
        self._touched: dict[int, int] = {}
        self._owner = secrets.token_hex(8)
        self._owner_file = _core.OwnedFile(
            self._owner_path(self._owner), os.O_RDWR | os.O_CREAT | os.O_EXCL
        )
        self._owner_file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        weakref.finalize(self, remove, self._owner_path(self._owner))
        self._recover()

    def payload_path(self, pack: str) -> str:
        """The file of what was fetched of a pack."""
        return f"{self._folder}/payload/{pack}"

    def _owner_path(self, owner: str) -> str:
        return f"{self._folder}/{owner}{_OWNER_SUFFIX}"

    @property
    def bytes(self) -> int:
        """Bytes of payload that are present, those about to be written or removed included."""
        return int(self._database.rows("SELECT bytes FROM state")[0][0])

    def covering(self, pack: str, start: int, end: int) -> list[Any]:
        """Rows of ranges that are present and touch [start, end), in order."""
        rows = self._database.rows(
            "SELECT id, start, size, saved FROM range WHERE pack = ?1 AND start < ?2"
            " AND start + size > ?3 AND ready ORDER BY start",
            (pack, end, start),
        )
        self._touched.update((row["id"], time.time_ns()) for row in rows)
        return rows

    def is_present(self, row: int) -> bool:
        """Whether a row that `covering` returned still is."""
        return bool(self._database.rows("SELECT 1 FROM range WHERE id = ? AND ready", (row,)))

    def reserve(self, pack: str, start: int, size: int, *, saved: bool = False) -> int | None:
        """Makes room for a range that is not present; None if there is none, or it has a row.

        Returns the row's number, for `fill` or `release`.
        """
        for _ in range(8):  # others may take the room that was made
            with self._database.transaction() as database:
                self._note_uses(database)
                taken = database.execute(
                    "SELECT 1 FROM range WHERE pack = ? AND start < ? AND start + size > ?",
                    (pack, start + size, start),
                ).fetchone()
                if taken:
                    return None
                (there,) = database.execute("SELECT bytes FROM state").fetchone()
                excess = 0 if self.byte_budget is None else there + size - self.byte_budget
                if excess <= 0:
                    return self._insert(database, pack, start, size, saved, ready=False)
                victims = self._victims(database, excess)
            if not victims and not self._recover():
                return None
            self._remove(victims)
        return None

    def _insert(
        self, database: Any, pack: str, start: int, size: int, saved: bool, *, ready: bool
    ) -> int:
        values = (pack, start, size, saved, ready, self._owner, time.time_ns())
        sql = "INSERT INTO range (pack, start, size, saved, ready, owner, used) VALUES"
        return int(database.execute(f"{sql} (?, ?, ?, ?, ?, ?, ?)", values).lastrowid)

    def _note_uses(self, database: Any) -> None:
        touched, self._touched = self._touched, {}
        database.executemany(
            "UPDATE range SET used = ? WHERE id = ?", [(used, row) for row, used in touched.items()]
        )

    def _victims(self, database: Any, excess: int) -> list[Any]:
        """The least recently used ranges of `excess` bytes, marked as being removed.

        None where there are not so many; what the bucket lacks stays.
        """
        found, freed = [], 0
        sql = f"SELECT * FROM range WHERE ready AND {_IN_BUCKET} ORDER BY used"
        for row in database.execute(sql):
            found.append(row)
            freed += row["size"]
            if freed >= excess:
                self._mark(database, found)
                return found
        return []

    def _mark(self, database: Any, rows: Iterable[Any]) -> None:
        database.executemany(
            "UPDATE range SET ready = 0, owner = ? WHERE id = ?",
            [(self._owner, row["id"]) for row in rows],
        )

    def _remove(self, rows: Sequence[Any]) -> None:
        """Punches the holes of rows that are marked, then removes them."""
        for row in rows:
            pack = row["pack"]
            own = f"{self._packs}/{pack}{SNAPSHOT_SUFFIX}"
            path = own if row["saved"] else self.payload_path(pack)
            punch(path, [(row["start"], row["size"])])
        with self._database.transaction() as database:
            database.executemany("DELETE FROM range WHERE id = ?", [(row["id"],) for row in rows])

    def fill(self, row: int, file: _core.OwnedFile, start: int, data: Any) -> None:
        """Writes a reserved range. file: of the pack's payload."""
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(file.fileno(), view, start)
            view, start = view[count:], start + count
        with self._database.transaction() as database:
            database.execute("UPDATE range SET ready = 1 WHERE id = ?", (row,))

    def release(self, row: int) -> None:
        """Gives a reserved range up."""
        self._remove(self._database.rows("SELECT * FROM range WHERE id = ?", (row,)))

    def _payload(self, pack: str) -> Payload:
        path = f"{self._packs}/{pack}{SNAPSHOT_SUFFIX}"
        return Payload.of(LocalRanges(path), path, self._access)

    def written(self, row: int, pack: str) -> None:
        """Tells that a save wrote and published a pack.

        row: of the room that was reserved for it.
        """
        first, end, _ = self._payload(pack)
        with self._database.transaction() as database:
            database.execute("DELETE FROM range WHERE id = ?", (row,))
            for start in range(first, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - start)
                self._insert(database, pack, start, size, True, ready=True)

    def is_whole(self, pack: str) -> bool:
        """Whether all payload of a pack is present as it was saved here."""
        try:
            start, end, _ = self._payload(pack)
        except (OSError, CorruptSnapshotError):
            return False
        sql = "SELECT TOTAL(size) FROM range WHERE pack = ? AND saved AND ready"
        return bool(self._database.rows(sql, (pack,))[0][0] == end - start)

    def forget(self, pack: str) -> None:
        """Removes what is present of a pack, but what the bucket lacks."""
        with self._database.transaction() as database:
            sql = f"SELECT * FROM range WHERE pack = ? AND ready AND {_IN_BUCKET}"
            rows = database.execute(sql, (pack,)).fetchall()
            self._mark(database, rows)
        self._remove(rows)

    def removed(self, pack: str) -> None:
        """Tells that a pack's file is gone."""
        remove(self.payload_path(pack))
        with self._database.transaction() as database:
            database.execute("DELETE FROM range WHERE pack = ?", (pack,))
            database.execute("DELETE FROM object WHERE path = ?", (pack_object(pack),))

    def require_room(self, pack: str, size: int) -> int:
        """Like `reserve` for all the payload of a new pack. Raises CapacityError."""
        row = self.reserve(pack, FRONT_BYTES, size, saved=True)
        if row is None:
            raise CapacityError(
                f"cache_bytes is {self.byte_budget}; {size} bytes are needed for what is saved, "
                f"and {self.bytes} are taken, some of which cannot go now; raise cache_bytes"
            )
        return row

    def _recover(self) -> bool:
        """Removes what dead processes left, and after a reboot what was not synced."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with self._database.transaction() as database:
            sql = "SELECT DISTINCT owner FROM range WHERE ready = 0"
            owners = [row["owner"] for row in database.execute(sql)]
            dead = [one for one in owners if one != self._owner and not self._is_alive(one)]
            rows = []
            for owner in dead:
                sql = "SELECT * FROM range WHERE ready = 0 AND owner = ?"
                rows += database.execute(sql, (owner,)).fetchall()
            if database.execute("SELECT boot FROM state").fetchone()[0] != boot:
                rows += database.execute("SELECT * FROM range WHERE ready AND NOT saved").fetchall()
                database.execute("UPDATE state SET boot = ?", (boot,))
            self._mark(database, rows)
        self._remove(rows)
        for owner in dead:
            remove(self._owner_path(owner))
        return bool(rows)

    def _is_alive(self, owner: str) -> bool:
        return in_use(self._owner_path(owner))


@dataclass(eq=False)
class _Flight:
    """A range that is being fetched. Its bytes; None if it was not fetched after all."""

    start: int
    end: int
    bytes: Future[Any] = field(default_factory=Future)


class Fetcher:
    """Reads payload of packs: from the cache, or from the bucket into it, each range once."""

    def __init__(self, bucket: Bucket, cache: RangeCache, pool: ThreadPoolExecutor) -> None:
        self._bucket = bucket
        self._cache = cache
        self._pool = pool
        self._lock = threading.Lock()
        self._flights: dict[str, list[_Flight]] = {}

    def read(self, files: PackFiles, start: int, end: int) -> Any:
        """The payload bytes [start, end) of a pack."""
        parts = []
        with self._lock:
            pieces, own = self._plan(files.pack, start, end)
        for flight in own:
            self._fetch(files, flight, needed=True)
        for first, last, source in pieces:
            data: Any = None
            if isinstance(source, _Flight):
                data = source.bytes.result()
                if data is not None and (first, last) != (source.start, source.end):
                    data = memoryview(data)[first - source.start : last - source.start]
            else:
                if source["saved"]:
                    data = files.own.read(first, last - first)
                else:
                    data = os.pread(files.payload.fileno(), last - first, first)
                if len(data) != last - first or not self._cache.is_present(source["id"]):
                    data = None
            parts.append(self.read(files, first, last) if data is None else data)
        return parts[0] if len(parts) == 1 else b"".join(map(bytes, parts))

    def will_need(self, files: PackFiles, start: int, end: int) -> None:
        """Begins to fetch what is neither present nor on its way, as far as there is room."""
        with self._lock:
            _, own = self._plan(files.pack, start, end)
        for flight in own:
            self._pool.submit(self._fetch, files, flight, needed=False)

    def _plan(
        self, pack: str, start: int, end: int
    ) -> tuple[list[tuple[int, int, Any]], list[_Flight]]:
        """Pieces of a range with their sources, and flights that begin with this call."""
        rows = self._cache.covering(pack, start, end)
        sources: list[tuple[int, int, Any]]
        sources = [(row["start"], row["start"] + row["size"], row) for row in rows]
        flights = self._flights.setdefault(pack, [])
        sources += [(one.start, one.end, one) for one in flights]
        pieces: list[tuple[int, int, Any]] = []
        own: list[_Flight] = []
        at = start
        for first, last, source in sorted(sources, key=lambda one: one[:2]):
            first, last = max(first, at), min(last, end)
            if first >= last:
                continue
            if at < first:
                own.append(_Flight(at, first))
                pieces.append((at, first, own[-1]))
            pieces.append((first, last, source))
            at = last
        if at < end:
            own.append(_Flight(at, end))
            pieces.append((at, end, own[-1]))
        flights += own
        return pieces, own

    def _fetch(self, files: PackFiles, flight: _Flight, *, needed: bool) -> None:
        """Ends a flight. needed: also if there is no room for its bytes."""
        pack = files.pack
        data, row = None, None
        try:
            size = flight.end - flight.start
            row = self._cache.reserve(pack, flight.start, size)
            if needed or row is not None:
                data = self._bucket.get_range(pack_object(pack), flight.start, size)
            if row is not None:
                self._cache.fill(row, files.payload, flight.start, data)
                row = None
        except BaseException as error:
            flight.bytes.set_exception(error)
            if not needed:
                return  # a read repeats it, or raises it
            raise
        finally:
            if row is not None:
                self._cache.release(row)
            with self._lock:
                self._flights[pack].remove(flight)
            if not flight.bytes.done():
                flight.bytes.set_result(data)


class PackFiles:
    """The local files of a pack that is being read.

    Attributes:
        own: the pack's own file, which is held so that it is not removed.
        payload: the file of what was fetched.
    """

    def __init__(self, pack: str, path: str, payload_path: str) -> None:
        self.pack = pack
        self.own = LocalRanges(path)
        hold = Hold()
        weakref.finalize(self, hold.release)
        with contextlib.suppress(BlockingIOError):  # the catalogue reads it while it is published
            hold.add([path])
        self.payload = _core.OwnedFile(payload_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


class PackRanges:
    """The bytes of one pack, for a reader. Front and metadata are in its file.

    Attributes:
        size: of the pack.
    """

    def __init__(self, fetcher: Fetcher, files: PackFiles, path: str, access: Access) -> None:
        self._fetcher = fetcher
        self._files = files
        self._start, self._end, self.size = Payload.of(files.own, path, access)

    def read(self, offset: int, size: int) -> Any:
        """These bytes."""
        end = offset + size
        first, last = max(offset, self._start), min(end, self._end)
        own = self._files.own
        if first >= last:
            return own.read(offset, size)
        payload = self._fetcher.read(self._files, first, last)
        if (first, last) == (offset, end):
            return payload
        before, after = own.read(offset, first - offset), own.read(last, end - last)
        return before + bytes(payload) + after

    def will_need(self, offset: int, size: int) -> None:
        """Begins to fetch these bytes."""
        first, last = max(offset, self._start), min(offset + size, self._end)
        if first < last:
            self._fetcher.will_need(self._files, first, last)
