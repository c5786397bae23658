"""The chunk store: opaque blocks by key, verified whenever they are read, within a byte budget."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager import _core
from kvpager._support.arguments import as_flag, as_integer, listed, refusal, usable_path
from kvpager._support.process import MadeIn
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.stores.base import ProgressCallback
from kvpager.stores.chunks import pack as format_of_packs
from kvpager.stores.chunks.contents import (
    FIND,
    HAS,
    IDENTITIES,
    TOTALS,
    Contents,
    queries,
    since_of,
)
from kvpager.stores.chunks.lookups import Lookups
from kvpager.stores.chunks.pack import (
    Buffers,
    Identity,
    PackFile,
    PackWriter,
    Wanted,
    read_blocks,
)
from kvpager.stores.chunks.reports import ChunkGcReport, DamagedBlock, PutReport, ReadResult
from kvpager.stores.encryption import StoreKey, make_key, new_secret, secret_of
from kvpager.stores.files import share
from kvpager.stores.holes import is_hole
from kvpager.stores.lock import TIMEOUT_SECONDS, checked_timeout, exclusive
from kvpager.stores.locked import Locked, system_errors
from kvpager.stores.names import SETTINGS_FILE
from kvpager.stores.settings import BLOCKS, StoreSettings, open_or_create

if TYPE_CHECKING:
    from typing_extensions import Self

_OPEN_PACKS = 128
_SETTINGS_SECONDS = 1.0
# A pack was read when it came into the index: it had a version that this release knows.
_DAMAGES = (CorruptSnapshotError, UnsupportedVersionError)
_COUNTS = (
    "stored",
    "already_there",
    "bytes_written",
    "evicted",
    "expired",
    "hits",
    "misses",
    "bytes_read",
)
DAMAGED, SWAPPED, SIZE, UNREADABLE = "damaged", "swapped", "size", "unreadable"

Block = tuple[bytes, int, memoryview]  # key, group, bytes


class ChunkStore:
    """A folder of opaque blocks of K/V, by key and group, for other engines than kvpager's own.

    Blocks are verified whenever they are read: a block that is damaged, or belongs to another key,
    group or identity, is refused and never returned. Any number of threads and processes may use
    one folder at once, under one identity or several, which see only their own blocks and share the
    budget. If a process is killed at any instant, what `put` reported stored is complete, or was
    evicted. The store is a cache: the least recently used blocks go when room is needed. See
    docs/stores.md.

    Args:
        path: of the folder; made if it does not exist. Its file system must be able to free parts
            of files (ext4, XFS, Btrfs, tmpfs and overlays of them can).
        identity: all that decides whether blocks may be used: model, weights, layout, dtype. A
            mapping of JSON values; every other one has other blocks.
        byte_budget: most bytes of all files of the store together, at every instant; an int, a size
            such as "50GiB", or "unlimited". Applies to all users of the folder. None: the store's
            recorded setting, "unlimited" in a new one.
        ttl: how long a block lives after its last use; seconds, a duration such as "7d", or
            "never". None: the store's recorded setting, "never" in a new one.
        key: encrypts all files of a new store, and opens an encrypted one; a StoreKey, or 32 bytes.
            None: the key of KVPAGER_STORE_KEY or KVPAGER_STORE_KEY_FILE; without one a new store is
            plain.
        mode: permissions of files written from now on, such as 0o640 or "640", regardless of the
            umask. None: the store's recorded setting, 0o600 in a new one.
        create: whether to make a missing or empty folder a store.
        lock_timeout: seconds that a call waits for another thread or process that holds the store's
            lock; then it raises StorageError. `has` and `read` do not take it.

    Raises:
        InvalidArgumentError: an argument is out of range, or the folder is another kind of store or
            has other things in it.
        StorageError: the folder is missing and `create` is False, its file system cannot free parts
            of files, or a system call failed.
        UnsupportedVersionError: a newer version made the store.

    Example:
        >>> with ChunkStore("blocks", {"model": digest}, byte_budget="50GiB") as store:
        ...     store.put([(key, 0, block)])
        ...     store.read([key], 0, [destination])
        [<ReadResult.HIT: 'hit'>]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Mapping[str, Any],
        *,
        byte_budget: int | str | None = None,
        ttl: float | str | None = None,
        key: StoreKey | bytes | None = None,
        mode: int | str | None = None,
        create: bool = True,
        lock_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        as_flag(create, "create")
        self._lock_timeout = checked_timeout("lock_timeout", lock_timeout)
        wanted = StoreSettings(kind=BLOCKS).updated(byte_budget, ttl, mode)
        self._identity = Identity(_canonical(identity))
        self.path = os.path.abspath(usable_path(path, "path"))  # noqa: PTH100  # resolve() follows links
        found = make_key(key)
        if found is not None:
            wanted = replace(wanted, encryption=found.wrap(new_secret()))
        with system_errors(self.path):
            open_or_create(self.path, wanted, create=create, lock_timeout=self._lock_timeout)
        self._settings = self._read_settings()
        self._secret = secret_of(
            self.path,
            self._settings.encryption,
            found,
            is_given=key is not None,
            file=f"{self.path}/{SETTINGS_FILE}",
        )
        self._contents = Contents(self.path, self._secret)
        self._lookups = Lookups(self.path)
        self._packs: collections.OrderedDict[str, PackFile] = collections.OrderedDict()
        self._local = threading.local()
        self._made_in = MadeIn()
        self._lock = threading.Lock()  # of what follows, and of _packs
        self._is_closed = False
        self._counts = collections.Counter[str]()
        self._refused = collections.Counter[str]()
        with self._locked() as (contents, settings, _):
            changed = settings.updated(byte_budget, ttl, mode)
            if changed != settings:
                self._count(evicted=contents.make_room(changed.byte_budget, 0))
                changed.write(self.path)
            if mode is not None:
                share(self.path, changed.mode)
                contents.index.share(changed.mode)

    # Writing.

    def put(self, blocks: Iterable[tuple[bytes, int, Any]]) -> PutReport:
        """Stores blocks, as one new pack; all are durable and visible when it returns.

        Blocks that the store has are not written again, but count as used. The bytes must not
        change until it returns (a block that did is refused when it is read).

        Args:
            blocks: (key, group, data) of each; key: 1 to 1,024 bytes; group: 0 or more; data: any
                contiguous buffer of at least a byte, such as bytes, a memoryview or a numpy array.

        Raises:
            InvalidArgumentError: a block is not as it should be, or the store is closed.
            CapacityError: the blocks are larger than the budget; nothing was evicted.
            StorageError: a system call failed. Nothing half-written is visible then; blocks that
                were evicted stay so.
        """
        self._require_open()
        blocks = checked_blocks(blocks)
        by_label: dict[bytes, Block] = {}
        for block in blocks:
            by_label.setdefault(self._label(block[0], block[1]), block)
        pack: PackWriter | None = None
        try:
            with self._locked() as (contents, settings, now_ns):
                new = self._new_of(by_label, contents, settings, now_ns)
                if not new:
                    self._count(already_there=len(blocks))
                    return PutReport(already_there=len(blocks))
                pack = PackWriter(contents.packs_folder, self._identity, new, self._secret)
                evicted = _make_room(contents, settings, pack.bytes)
                contents.add_temporary(pack.temporary, pack.bytes)
                pack.create(settings.mode)
            with system_errors(pack.temporary):
                pack.write()
            with self._locked() as (contents, _, now_ns):
                pack.publish()
                contents.forget_file(pack.temporary)
                stored = contents.add_pack(pack.id, pack.table, now_ns)
        except BaseException:
            if pack is not None:
                self._undo(pack)
            raise
        finally:
            if self._is_closed:  # by another thread, meanwhile
                self.close()
        report = PutReport(stored, len(blocks) - stored, pack.bytes, evicted)
        self._count(
            stored=stored,
            already_there=report.already_there,
            evicted=evicted,
            bytes_written=pack.bytes,
        )
        return report

    def _new_of(
        self,
        by_label: Mapping[bytes, Block],
        contents: Contents,
        settings: StoreSettings,
        now_ns: int,
    ) -> list[Block]:
        """The blocks that the store lacks; the others are marked as used, expired ones removed."""
        there = contents.find(list(by_label), since_of(now_ns, settings.ttl_seconds))
        contents.touch({**self._lookups.take_used(), **dict.fromkeys(there, now_ns)})
        missing = [label for label in by_label if label not in there]
        contents.remove(list(contents.find(missing).values()))
        return [by_label[label] for label in missing]

    def _undo(self, pack: PackWriter) -> None:
        """Removes what a put that failed has left, as far as the store can be used now."""
        with contextlib.suppress(OSError), self._locked() as (contents, _, _):
            pack.discard()
            contents.forget_file(pack.temporary)

    # Reading.

    def has(self, keys: Sequence[bytes], group: int = 0) -> list[bool]:
        """Whether the store has a block of each key. Opens no file but the index.

        Args:
            keys: of the blocks.
            group: of all of them.

        Raises:
            InvalidArgumentError: a key or the group is not as it should be.
        """
        self._require_open()
        labels = self._labels(checked_keys(keys), checked_group(group))
        there = {row["label"] for row in self._blocks(HAS, labels)}
        return [label in there for label in labels]

    def read(
        self,
        keys: Sequence[bytes],
        group: int,
        into: Sequence[Any],
        *,
        gate: _core.ReadGate | None = None,
    ) -> list[ReadResult]:
        """Reads blocks, each into a buffer of the store's own, verifies them and copies them.

        Args:
            keys: of the blocks.
            group: of all of them.
            into: for each key a writable contiguous buffer of exactly the block's size; it is
                written only if the block's result is HIT.
            gate: may end the read early, as `ChunkQueue` does; None: nothing does.

        Returns:
            HIT, MISS or REFUSED for each key. A refused block that is damaged is removed, so that
            the next put stores it again.

        Raises:
            InvalidArgumentError: a key, the group or a buffer is not as it should be.
        """
        self._require_open()
        keys, group = checked_keys(keys), checked_group(group)
        into = checked_destinations(into, len(keys))
        labels = self._labels(keys, group)
        rows = {row["label"]: row for row in self._blocks(FIND, labels)}
        results = [ReadResult.MISS] * len(keys)
        wanted: dict[int, Wanted] = {}
        try:
            for i, label in enumerate(labels):
                if label in rows:
                    found = self._wanted(rows[label], keys[i], group, into[i])
                    if isinstance(found, Wanted):
                        wanted[i] = found
                    else:
                        results[i] = found
            words = read_blocks(gate or _core.ReadGate(), [*wanted.values()], self._buffers())
            for (i, block), word in zip(wanted.items(), words):
                if word == DAMAGED:
                    results[i] = self._judge(rows[labels[i]], block.pack, keys[i], group)
                else:
                    results[i] = self._refuse(word) if word == UNREADABLE else ReadResult(word)
        finally:
            hits = [i for i, result in enumerate(results) if result is ReadResult.HIT]
            size = sum(len(into[i]) for i in hits)
            misses = results.count(ReadResult.MISS)
            self._count(hits=len(hits), misses=misses, bytes_read=size)
            if hits:
                packs = {wanted[i].pack.path for i in hits}
                self._lookups.used([labels[i] for i in hits], packs, time.time_ns())
        return results

    def _wanted(self, row: Any, key: bytes, group: int, into: memoryview) -> Wanted | ReadResult:
        """What is to be read of a block's pack, or the result without reading."""
        size = row["size"]
        if size != len(into):
            return self._refuse(SIZE)
        try:
            pack = self._pack(row["name"], row["inode"])
        except FileNotFoundError:
            return ReadResult.MISS
        except _DAMAGES:  # the front of an encrypted pack
            return self._judge(row, None, key, group)
        except OSError:
            return self._refuse(UNREADABLE)
        binding = self._identity.binding(key, group, size)
        return Wanted(pack, row["start"], binding, row["checked"], into)

    def _judge(self, row: Any, pack: PackFile | None, key: bytes, group: int) -> ReadResult:
        """The result of a block whose bytes on disk do not fit; it is removed from the store."""
        try:
            if not self._lookups.drop(row):  # it was evicted while it was read
                return ReadResult.MISS
        except (sqlite3.DatabaseError, OSError):
            pass
        if pack is None:
            return self._refuse(DAMAGED)
        try:
            if is_hole(pack.descriptor, row["start"], row["size"]):
                return ReadResult.MISS  # freed by somebody with another index, now deleted
            table = pack.table()
            entry = next((one for one in table.entries if one.start == row["start"]), None)
            if entry is not None and (table.identity.digest, entry.key, entry.group) != (
                self._identity.digest,
                key,
                group,
            ):
                return self._refuse(SWAPPED)
        except (OSError, *_DAMAGES):
            pass
        return self._refuse(DAMAGED)

    def _refuse(self, reason: str) -> ReadResult:
        with self._lock:
            self._refused[reason] += 1
        return ReadResult.REFUSED

    def _pack(self, name: str, inode: int) -> PackFile:
        """An open pack, of the last ones that were read."""
        with self._lock:
            found = self._packs.get(name)
            if found is not None and found.inode == inode:
                self._packs.move_to_end(name)
                return found
        found = PackFile(self._contents.pack_path(name), name, self._secret)
        with self._lock:
            self._packs[name] = found
            while len(self._packs) > _OPEN_PACKS:
                self._packs.popitem(last=False)
        return found

    def _buffers(self) -> Buffers:
        """This thread's."""
        found: Buffers | None = getattr(self._local, "buffers", None)
        if found is None:
            found = self._local.buffers = Buffers()
        return found

    # Keeping.

    def touch(self, keys: Sequence[bytes], group: int = 0) -> None:
        """Marks a use of each block that is there. See `has`."""
        self._require_open()
        labels = self._labels(checked_keys(keys), checked_group(group))
        self._lookups.used(labels, (), time.time_ns())

    def delete(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Removes blocks; returns how many there were. See `has`."""
        self._require_open()
        labels = self._labels(checked_keys(keys), checked_group(group))
        with self._locked() as (contents, _, _):
            return contents.remove(list(contents.find(labels).values()))

    def clear(self) -> int:
        """Removes all blocks of this identity; returns how many there were."""
        self._require_open()
        with self._locked() as (contents, _, _):
            return contents.remove(contents.of(self._identity))

    def gc(self) -> ChunkGcReport:
        """Removes expired blocks, files of dead writers, and packs whose table is damaged.

        Puts do the same when they need room.
        """
        self._require_open()
        with self._locked() as (contents, settings, now_ns):
            contents.touch(self._lookups.take_used())
            before = contents.totals()["bytes"]
            contents.refresh()
            swept = contents.sweep()
            expired = contents.expire(now_ns, settings.ttl_seconds)
            evicted = contents.make_room(settings.byte_budget, 0)
            freed = before - contents.totals()["bytes"]
        self._count(evicted=evicted, expired=expired)
        return ChunkGcReport(freed, expired, evicted, *swept)

    def rewrap(self, key: StoreKey | bytes) -> None:
        """Makes the first of these the store's key; see `DirectoryStore.rewrap`."""
        self._require_open()
        with self._locked() as (_, settings, _):
            settings.rewrapped(key, self.path).write(self.path)

    def verify(self, progress: ProgressCallback | None = None) -> list[DamagedBlock]:
        """Reads all blocks of all identities; returns those that are damaged, which it removes.

        progress: called with bytes of files done, and of all.

        Raises:
            StorageError: a pack cannot be read.
        """
        self._require_open()
        with self._locked() as (contents, _, _):
            packs = contents.packs()
        total, done = sum(size for _, size in packs), 0
        found: list[DamagedBlock] = []
        for name, size in packs:
            with system_errors(self._contents.pack_path(name)):
                found += self._verify_pack(name)
            done += size
            if progress is not None:
                progress(done, total)
        return found

    def _verify_pack(self, name: str) -> list[DamagedBlock]:
        path = self._contents.pack_path(name)
        try:
            pack = PackFile(path, name, self._secret)
            table = pack.table()
        except FileNotFoundError:  # removed meanwhile
            return []
        except _DAMAGES as error:
            with self._locked() as (contents, _, _):  # nor is it just being removed
                is_there = name in (one for one, _ in contents.packs())
            return [DamagedBlock(path, None, 0, str(error))] if is_there else []
        found = []
        labels = [table.identity.label(e.key, e.group, self._secret) for e in table.entries]
        rows = {row["label"]: row for row in self._blocks(FIND, labels, every=True)}
        room = memoryview(bytearray(max((entry.size for entry in table.entries), default=0)))
        for label, entry in zip(labels, table.entries):
            row = rows.get(label)
            if row is None or (row["name"], row["start"]) != (name, entry.start):
                continue  # it was freed, or another copy counts
            binding = table.identity.binding(entry.key, entry.group, entry.size)
            block = Wanted(pack, entry.start, binding, row["checked"], room[: entry.size])
            (word,) = read_blocks(_core.ReadGate(), [block], self._buffers())
            if word == UNREADABLE:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            if word == DAMAGED and self._lookups.drop(row):
                words = "its bytes are not what was written"
                found.append(DamagedBlock(path, entry.key, entry.group, words))
        return found

    def stats(self) -> dict[str, Any]:
        """Numbers about the store, and counts of this object's calls since it was made.

        Of the folder: bytes (of all files), byte_budget, ttl_seconds, packs, blocks, identities.
        Of this object: stored, already_there, bytes_written, evicted, expired, hits, misses,
        bytes_read (verified and copied), and refused: counts by reason ("damaged", "swapped" for
        bytes of another block, "size", "unreadable").
        """
        self._require_open()
        (row,) = self._rows(TOTALS)
        settings = self._current_settings()
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTS}
            refused = dict.fromkeys((DAMAGED, SWAPPED, SIZE, UNREADABLE), 0) | self._refused
        return {
            **dict(row),
            "byte_budget": settings.byte_budget,
            "ttl_seconds": settings.ttl_seconds,
            **counts,
            "refused": refused,
        }

    def identities(self) -> list[tuple[Mapping[str, Any], int, int]]:
        """Each identity that has blocks in the folder, with their number and bytes."""
        self._require_open()
        return self._contents.named(self._rows(IDENTITIES))

    @property
    def byte_budget(self) -> int | None:
        """Most bytes of all files of the store together; None: unlimited."""
        return self._read_settings().byte_budget

    def close(self) -> None:
        """Records last uses and closes all files. May be called twice."""
        self._is_closed = True
        self._lookups.close()
        with self._lock:
            self._packs.clear()
        try:
            # A call of another thread that uses the index ends first.
            with exclusive(f"{self.path}/lock", self._lock_timeout):
                self._contents.index.close()
        except StorageError:
            pass
        except OSError:  # the folder is gone
            self._contents.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ChunkStore({self.path!r})"

    # Within.

    def _require_open(self) -> None:
        if self._made_in.forked:  # a thread that the child lacks may have had the lock
            self._made_in, self._lock = MadeIn(), threading.Lock()
        if self._is_closed:
            raise InvalidArgumentError(f"{self!r} is closed; make another one")

    def _label(self, key: bytes, group: int) -> bytes:
        return self._identity.label(key, group, self._secret)

    def _labels(self, keys: Sequence[bytes], group: int) -> list[bytes]:
        return [self._label(key, group) for key in keys]

    def _locked(self) -> AbstractContextManager[tuple[Contents, StoreSettings, int]]:
        return Locked(self.path, self._contents, self._lock_timeout, BLOCKS)

    def _read_settings(self) -> StoreSettings:
        with system_errors(self.path):
            self._settings_time = time.monotonic()
            self._settings = StoreSettings.read(self.path, BLOCKS)
            return self._settings

    def _current_settings(self) -> StoreSettings:
        """Settings as they were a moment ago, so that a call need not read the file."""
        is_old = time.monotonic() - self._settings_time > _SETTINGS_SECONDS
        return self._read_settings() if is_old else self._settings

    def _blocks(self, sql: str, labels: Sequence[bytes], *, every: bool = False) -> list[Any]:
        """Rows of blocks, by FIND or HAS. every: also of expired ones."""
        ttl = None if every else self._current_settings().ttl_seconds
        since = since_of(time.time_ns(), ttl)
        return [row for query in queries(sql, labels, since) for row in self._rows(*query)]

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """The answer to a query of the index, without waiting for whoever changes it."""
        if not self._contents.index.is_private:
            try:
                return self._lookups.rows(sql, values)
            except (sqlite3.DatabaseError, OSError):  # it is missing, damaged, or made just now
                pass
        with self._locked() as (contents, _, _):
            return contents.rows(sql, values)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def _make_room(contents: Contents, settings: StoreSettings, needed: int) -> int:
    budget = settings.byte_budget
    if budget is not None and needed > budget:
        raise CapacityError(
            f"byte_budget is {budget}; the blocks of one put need {needed} bytes; put fewer at "
            "once, or raise byte_budget"
        )
    return contents.make_room(budget, needed)


def _canonical(identity: Mapping[str, Any]) -> str:
    if not isinstance(identity, Mapping):
        raise refusal("identity", identity, "a mapping of JSON values")
    try:
        return json.dumps(dict(identity), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("identity", identity, f"a mapping of JSON values ({error})") from error


def checked_group(group: int) -> int:
    """The group. Raises InvalidArgumentError."""
    return as_integer(group, "group", 0, format_of_packs.MOST_GROUP)


def checked_keys(keys: Iterable[bytes]) -> list[bytes]:
    """The keys. Raises InvalidArgumentError."""
    found = listed(keys, "keys", "a sequence of bytes")
    return [_checked_key(key, f"keys[{i}]") for i, key in enumerate(found)]


def _checked_key(key: object, name: str) -> bytes:
    most = format_of_packs.MOST_KEY_BYTES
    if not isinstance(key, (bytes, bytearray)) or not 1 <= len(key) <= most:
        raise refusal(name, key, f"1 to {most:,} bytes")
    return bytes(key)


def checked_blocks(blocks: Iterable[tuple[bytes, int, Any]]) -> list[Block]:
    """The blocks, their data as bytes. Raises InvalidArgumentError."""
    found = []
    for i, block in enumerate(listed(blocks, "blocks", "tuples (key, group, data)")):
        name = f"blocks[{i}]"
        try:
            key, group, data = block
        except (TypeError, ValueError) as error:
            raise refusal(name, block, "a tuple (key, group, data)") from error
        key = _checked_key(key, f"the key of {name}")
        group = as_integer(group, f"the group of {name}", 0, format_of_packs.MOST_GROUP)
        view = _flat(data, f"the data of {name}")
        if not 1 <= len(view) <= format_of_packs.MOST_BLOCK_BYTES:
            raise InvalidArgumentError(
                f"the data of {name} has {len(view)} bytes; expected 1 to "
                f"{format_of_packs.MOST_BLOCK_BYTES:,}"
            )
        found.append((key, group, view))
    return found


def checked_destinations(into: Iterable[Any], count: int) -> list[memoryview]:
    """The destinations, as bytes. Raises InvalidArgumentError."""
    found = []
    for i, one in enumerate(listed(into, "into", "a sequence of writable buffers")):
        view = _flat(one, f"into[{i}]")
        if view.readonly:
            raise InvalidArgumentError(f"into[{i}] is read-only; expected a writable buffer")
        found.append(view)
    if len(found) != count:
        raise InvalidArgumentError(f"into has {len(found)} buffers; expected {count}, one a key")
    return found


def _flat(data: object, name: str) -> memoryview:
    """A buffer's bytes."""
    try:
        # memoryview.cast refuses some formats. PickleBuffer.raw takes them, but crashes CPython
        # when a view of it is collected in a cycle, as that of an error and its frames.
        return memoryview(np.frombuffer(data, np.uint8))  # type: ignore[call-overload]
    except (TypeError, BufferError, ValueError) as error:
        kind = type(data).__name__
        raise InvalidArgumentError(
            f"{name} is a {kind} ({error}); expected a contiguous buffer, such as bytes, a "
            "memoryview or a numpy array"
        ) from error
