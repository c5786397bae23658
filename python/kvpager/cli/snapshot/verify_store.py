"""The check of a whole store: every pack is read once, then every snapshot's own part.

It takes no lock, so that others work on; files that disappear meanwhile are theirs to remove.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvpager.cli.snapshot import damage as damages
from kvpager.cli.snapshot.address import PACKS, SNAPSHOTS, Address, stored_names
from kvpager.cli.snapshot.checked_pack import CheckedPack
from kvpager.cli.snapshot.damage import Damage, remember_damage
from kvpager.cli.snapshot.opened import Opened, open_or_damaged
from kvpager.cli.snapshot.progress import shifted
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
    """Checks every byte of every pack and snapshot. The store remembers damage that is found.

    Raises:
        StorageError, UnsupportedVersionError: a file that is there cannot be read.
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
        return [damages.whole_file(name, name, opened)]
    reader = opened.reader
    used = [packs.get(pack) for pack, _ in reader.packs]
    if not used or any(pack is not None and pack.corrupt for pack in used):
        # Whole in itself; or, a pack's own tables are damaged, but not all of its chunks need be.
        return [
            damages.of_chunk(opened, name, chunk, layer if layer >= 0 else None, message)
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
        return [damages.of_chunk(opened, name, tail, layer, str(error))]
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
