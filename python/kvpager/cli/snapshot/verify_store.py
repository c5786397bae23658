"""The check of a whole store: every pack is read once, then every snapshot's own part.

It takes no lock, so other processes can go on; files that they remove meanwhile are skipped.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.cli.snapshot.address import PACKS, SNAPSHOTS, Address, stored_names
from kvpager.cli.snapshot.opened import Opened, open_or_damaged
from kvpager.cli.terminal import shifted
from kvpager.errors import CorruptSnapshotError, StorageError
from kvpager.stores import DirectoryStore
from kvpager.stores.base import ProgressCallback
from kvpager.stores.names import SNAPSHOT_SUFFIX, pack_of


@dataclass
class StoreCheck:
    """What was read of a store, and what is wrong with it."""

    snapshots: int = 0
    packs: int = 0
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)


def verify_store(folder: Path, threads: int, progress: ProgressCallback | None) -> StoreCheck:
    """Checks every byte of every pack and snapshot. The store records the damage found.

    Raises:
        StorageError, UnsupportedVersionError: an existing file cannot be read.
    """
    check = StoreCheck()
    store = DirectoryStore(folder, create=False)
    files = sorted(path for path in (folder / PACKS).glob("*") if pack_of(path.name))
    total = sum(_size(path) for path in files)
    packs: dict[str, CheckedPack] = {}
    for path in files:
        opened = _open(Address(str(path), path))
        if opened is not None:
            told = shifted(progress, check.bytes_read, total)
            pack = CheckedPack(path, opened, threads, told)
            packs[str(pack_of(path.name))] = pack
            check.packs += 1
            check.bytes_read += _size(path)
            for reader, chunk in pack.damaged_chunks():
                remember_damage(store, reader, chunk)
    for name in stored_names(folder):
        path = folder / SNAPSHOTS / (name + SNAPSHOT_SUFFIX)
        opened = _open(Address(name, path, folder, name))
        if opened is not None:
            check.snapshots += 1
            check.bytes_read += _size(path)
            check.damage += _check_snapshot(opened, name, packs, threads)
    for pack in packs.values():
        check.damage += pack.unclaimed()
    return check


def _check_snapshot(
    opened: Opened | CorruptSnapshotError,
    name: str,
    packs: dict[str, CheckedPack],
    threads: int,
) -> list[Damage]:
    """Its own bytes, and those that its packs hold for it."""
    if isinstance(opened, CorruptSnapshotError):
        return [whole_file(name, name, opened)]
    reader = opened.reader
    used = [packs.get(pack) for pack, _ in reader.packs]
    if not used or any(pack is not None and pack.corrupt for pack in used):
        # A self-contained file; or a pack with damaged tables, though its chunks may be intact.
        return [
            of_chunk(opened, name, chunk, layer if layer >= 0 else None, message)
            for chunk, layer, message in reader.verify(threads)
        ]
    found = []
    slices, summaries = reader.slice_checksums, reader.summary_checksums.tolist()
    for chunk, (number, place) in enumerate(reader.places.tolist()):
        pack = used[number]
        if pack is None:  # newer than the list of packs, so that it was written just now
            continue
        start, stop = opened.token_range(chunk)
        found += [
            Damage(str(pack.path), name, chunk, start, stop, layer, message)
            for layer, message in pack.claim(place, slices[chunk], summaries[chunk])
        ]
    return found + _check_tail(opened, name)


def _check_tail(opened: Opened, name: str) -> list[Damage]:
    layers = range(opened.reader.layout.layers if opened.reader.tail_tokens else 0)
    return [part for layer in layers for part in _check_tail_slice(opened, name, layer)]


def _check_tail_slice(opened: Opened, name: str, layer: int) -> list[Damage]:
    tail = opened.reader.chunks - 1
    try:
        opened.reader.read_slice(tail, layer)
    except CorruptSnapshotError as error:
        return [of_chunk(opened, name, tail, layer, str(error))]
    return []


def _open(address: Address) -> Opened | CorruptSnapshotError | None:
    """None where the file went away meanwhile."""
    try:
        return open_or_damaged(address)
    except StorageError:
        if address.path.exists():
            raise
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


Wrong = tuple["int | None", str]  # layer (None: the summary), message


class CheckedPack:
    """The damage of each chunk of a pack, and which of it belongs to a snapshot.

    Attributes:
        path: the file.
        corrupt: why it cannot be opened at all; its chunks may be sound all the same.
    """

    def __init__(
        self,
        path: Path,
        opened: Opened | CorruptSnapshotError,
        threads: int,
        progress: ProgressCallback | None,
    ) -> None:
        """Reads the pack whole."""
        self.path = path
        self.corrupt = opened if isinstance(opened, CorruptSnapshotError) else None
        self._wrong: dict[int, list[Wrong]] = defaultdict(list)
        self._claimed: set[int] = set()
        self._opened: Opened | None = None
        if isinstance(opened, Opened):
            self._opened = opened
            self._slices: npt.NDArray[Any] = opened.reader.slice_checksums
            self._summaries: npt.NDArray[Any] = opened.reader.summary_checksums
            for chunk, layer, message in opened.reader.verify(threads, progress):
                self._wrong[chunk].append((layer if layer >= 0 else None, message))

    def damaged_chunks(self) -> list[tuple[Opened, int]]:
        """Damaged chunks, in order, each with the file to read it from."""
        return [(self._opened, chunk) for chunk in sorted(self._wrong) if self._opened is not None]

    def claim(self, chunk: int, slices: npt.NDArray[Any], summary: int) -> list[Wrong]:
        """What is wrong with a chunk for a snapshot that was saved with these checksums."""
        self._claimed.add(chunk)
        if chunk in self._wrong:
            return self._wrong[chunk]
        other: list[int | None] = [
            int(layer) for layer in np.flatnonzero(self._slices[chunk] != slices)
        ]
        if int(self._summaries[chunk]) != summary:
            other.append(None)
        message = f"pack {self.path.name} holds other bytes than the snapshot was saved with"
        return [(layer, message) for layer in other]

    def unclaimed(self) -> list[Damage]:
        """Damage of the file's own tables, and of chunks that no snapshot needs."""
        if self.corrupt is not None:
            return [whole_file(str(self.path), None, self.corrupt)]
        return [
            of_chunk(opened, None, chunk, layer, message)
            for opened, chunk in self.damaged_chunks()
            if chunk not in self._claimed
            for layer, message in self._wrong[chunk]
        ]


_SHOWN = 40  # damage_lines of damage; --format json has all of it


@dataclass(frozen=True)
class Damage:
    """One part of a snapshot that is not what was written.

    Attributes:
        file: that holds the bytes.
        snapshot: that needs them; None: of a pack that no snapshot needs.
        chunk: in the snapshot, or in the pack without one; None: the file as a whole.
        start: first position it concerns, None without a chunk.
        stop: position after the last.
        layer: 0-based; None: the summary, or all.
        message: what was found.
    """

    file: str
    snapshot: str | None
    chunk: int | None
    start: int | None
    stop: int | None
    layer: int | None
    message: str

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)

    def __str__(self) -> str:
        told = self.message.removeprefix(f"{self.file}: ").removeprefix("corrupt snapshot: ")
        name = self.file if self.snapshot is None else self.snapshot
        if self.chunk is None:
            return f"{name}: {told}"
        if f"chunk {self.chunk} (tokens [{self.start}, {self.stop})" in told:
            return f"{name}: {told}"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{name}: chunk {self.chunk} (tokens [{self.start}, {self.stop})){layer}: {told}"


def whole_file(path: str, snapshot: str | None, error: CorruptSnapshotError) -> Damage:
    """Damage that keeps a file from being opened at all."""
    return Damage(path, snapshot, None, None, None, None, str(error))


def of_chunk(
    opened: Opened, snapshot: str | None, chunk: int, layer: int | None, message: str
) -> Damage:
    """Damage of one chunk's slice, or of its summary."""
    start, stop = opened.token_range(chunk)
    return Damage(opened.reader.path, snapshot, chunk, start, stop, layer, message)


def damage_lines(damage: Sequence[Damage]) -> Iterable[str]:
    """A line for each, up to a limit."""
    for part in damage[:_SHOWN]:
        yield f"  {part}"
    if len(damage) > _SHOWN:
        yield f"  ... and {len(damage) - _SHOWN:,} more; --format json lists all"


def remember_damage(store: DirectoryStore, opened: Opened, chunk: int) -> None:
    """Records damage in the snapshot's store, so that the chunk is not shared any more.

    Does nothing to a read-only store.
    """
    with contextlib.suppress(StorageError):
        store.report_damage(opened.reader, chunk)
