"""`kvpager snapshot verify`: reads every byte and checks it."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpager._support.words import byte_rate, byte_size, counted, duration
from kvpager.cli.failure import DIFFERENT, or_impossible
from kvpager.cli.options import positive
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Commands, option
from kvpager.cli.snapshot import blocks
from kvpager.cli.snapshot.address import (
    PACKS,
    Address,
    find_snapshot,
    is_store,
    stored_names,
)
from kvpager.cli.snapshot.opened import Opened, companions_of, open_or_damaged
from kvpager.cli.terminal import Look, work_progress
from kvpager.errors import CorruptSnapshotError, StorageError
from kvpager.stores import DirectoryStore
from kvpager.stores.base import ProgressCallback
from kvpager.stores.names import SNAPSHOT_SUFFIX, pack_of
from kvpager.stores.opening import NamedStore, open_store

_MOST_THREADS = 16  # a disk is busy long before
_SHOWN = 40  # lines of damage; --format json has all of it

Wrong = tuple[int, int, str]  # chunk, layer (-1: the summary), message


def add(verbs: Commands) -> None:
    """Adds the verb."""
    parser = verbs.add(
        "verify",
        run,
        "read every byte and list all damage",
        "Reads every byte of a snapshot and its companions, or of a whole store, and checks it. Of "
        "a store every pack is read once, however many snapshots share it, and the store remembers "
        "damage: the chunk is shared no more, and written again by the next save that has it. Of a "
        "store of other engines' blocks, damaged ones are removed.",
        epilog="Exit codes: 0 all is whole, 1 damage was found, 2 wrong command line, 3 it could "
        "not be checked (no such file, no permission, another format version).",
    )
    about = "a snapshot file, STORE/NAME, or STORE for all that a directory store keeps"
    option(parser, "snapshot SNAPSHOT", about)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    about = f"that read and check at a time (default: one per processor, {threads} here)"
    option(parser, "--threads N", about, type=positive, default=threads)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    path = Path(args.snapshot)
    if blocks.holds_blocks(args.snapshot):
        with or_impossible():
            return blocks.verify_blocks(args)
    with or_impossible(), work_progress(args, "verify") as progress:
        start = time.perf_counter()
        if is_store(path):
            found, values = _check_store(path, args.threads, progress)
        else:
            found, values = _check_snapshot(find_snapshot(args.snapshot), args.threads, progress)
        seconds = time.perf_counter() - start
    values = {
        "command": "snapshot verify",
        "path": args.snapshot,
        **values,
        "seconds": seconds,
        "bytes_per_second": values["bytes_read"] / seconds,
        "threads": args.threads,
        "whole": not found,
        "damage": [asdict(part) for part in found],
    }
    emit_result(args, values, lambda shown: _lines(shown, values, found))
    return DIFFERENT if found else 0


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

    def __str__(self) -> str:
        told = self.message.removeprefix(f"{self.file}: ").removeprefix("corrupt snapshot: ")
        where = f"chunk {self.chunk} (tokens [{self.start}, {self.stop})"
        if self.chunk is not None and where not in told:
            layer = "" if self.layer is None else f", layer {self.layer}"
            told = f"{where}){layer}: {told}"
        return f"{self.snapshot or self.file}: {told}"


def _whole_file(path: Path, snapshot: str | None, error: CorruptSnapshotError) -> Damage:
    """Damage that keeps a file from being opened at all."""
    return Damage(str(path), snapshot, None, None, None, None, str(error))


def _of_chunks(
    opened: Opened, snapshot: str | None, wrong: Iterable[Wrong], file: str = ""
) -> list[Damage]:
    """Damage of slices or summaries; `file` holds their bytes, if not the snapshot's own."""
    return [
        Damage(
            file or opened.reader.path,
            snapshot,
            chunk,
            *opened.token_range(chunk),
            layer if layer >= 0 else None,
            message,
        )
        for chunk, layer, message in wrong
    ]


def _remember(store: NamedStore, opened: Opened, chunks: Iterable[int]) -> None:
    """Records damaged chunks, so that they are not shared any more, unless the store is read-only.

    opened: a snapshot or a pack of the store.
    """
    with contextlib.suppress(StorageError):
        for chunk in sorted(set(chunks)):
            store.report_damage(opened.reader, chunk)


# One snapshot.


def _check_snapshot(
    address: Address, threads: int, progress: ProgressCallback | None
) -> tuple[list[Damage], dict[str, Any]]:
    """All damage of a snapshot and its companions, and what was checked."""
    values: dict[str, Any] = dict.fromkeys(("kind", "tokens", "chunks", "logical_digest"))
    opened = open_or_damaged(address)
    if isinstance(opened, CorruptSnapshotError):
        values["bytes_read"] = address.path.stat().st_size
        return [_whole_file(address.path, address.text, opened)], values
    reader = opened.reader
    values = {
        "kind": opened.kind,
        "tokens": len(reader.tokens),
        "chunks": reader.chunks,
        "logical_digest": reader.logical_digest,
        "companions": [],
    }
    parts, unopened = [opened], []
    for companion in companions_of(opened):
        values["companions"].append({"kind": companion.kind, "state": companion.state})
        if companion.damage is not None:
            place = companion.address
            unopened.append(_whole_file(place.path, place.text, companion.damage))
        elif companion.opened is not None:
            parts.append(companion.opened)
    found = [damage for part in parts for damage in _check_bytes(part, threads, progress)]
    read = sum(part.reader.payload_bytes_read + part.metadata_bytes for part in parts)
    return found + unopened, values | {"bytes_read": read}


def _check_bytes(
    opened: Opened, threads: int, progress: ProgressCallback | None = None
) -> list[Damage]:
    """Damage of an opened snapshot's chunks, which its store records."""
    address = opened.address
    wrong = opened.reader.verify(threads, progress)
    if address.store is not None and wrong:
        store = open_store(str(address.store), create=False)
        _remember(store, opened, (chunk for chunk, _, _ in wrong))
    return _of_chunks(opened, address.text, wrong)


# A whole store. No lock is taken, so other processes can go on; files that they remove meanwhile
# are skipped.


def _check_store(
    folder: Path, threads: int, progress: ProgressCallback | None
) -> tuple[list[Damage], dict[str, Any]]:
    """All damage of every pack, read once, and of every snapshot's own part.

    Raises:
        StorageError, UnsupportedVersionError: an existing file cannot be read.
    """
    store = DirectoryStore(folder, create=False)
    files = sorted(path for path in (folder / PACKS).glob("*") if pack_of(path.name))
    total = sum(map(_size, files))
    packs: dict[str, CheckedPack | CorruptSnapshotError] = {}
    found: list[Damage] = []
    read = snapshots = 0
    for address, opened, size in _there(Address(str(path), path) for path in files):
        if isinstance(opened, Opened):
            pack = CheckedPack(opened, threads, _shifted(progress, read, total))
            _remember(store, opened, pack.wrong)
            packs[address.path.stem] = pack
        else:
            packs[address.path.stem] = opened
        read += size
    for address, opened, size in _there(
        Address(name, Path(store.path_of(name)), folder, name) for name in stored_names(folder)
    ):
        if isinstance(opened, Opened):
            found += _check_stored(opened, packs, threads)
        else:
            found.append(_whole_file(address.path, address.text, opened))
        snapshots += 1
        read += size
    for name, checked in packs.items():
        if isinstance(checked, CheckedPack):
            found += checked.unclaimed()
        else:
            found.append(_whole_file(folder / PACKS / (name + SNAPSHOT_SUFFIX), None, checked))
    values = {"kind": "store", "snapshots": snapshots, "packs": len(packs), "bytes_read": read}
    return found, values


def _there(
    addresses: Iterable[Address],
) -> Iterator[tuple[Address, Opened | CorruptSnapshotError, int]]:
    """Files that did not go away meanwhile: opened, and their bytes."""
    for address in addresses:
        if (opened := _open(address)) is not None:
            yield address, opened, _size(address.path)


def _open(address: Address) -> Opened | CorruptSnapshotError | None:
    """None where the file went away."""
    try:
        return open_or_damaged(address)
    except StorageError:
        if address.path.exists():
            raise
        return None


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _shifted(progress: ProgressCallback | None, before: int, total: int) -> ProgressCallback | None:
    """For one file of several: `before` bytes were done, of `total` in all."""
    return progress and (lambda done, _: progress(before + done, total))


def _check_stored(
    opened: Opened, packs: Mapping[str, CheckedPack | CorruptSnapshotError], threads: int
) -> list[Damage]:
    """Damage of a snapshot's own bytes, and of those that its packs hold for it."""
    reader, name = opened.reader, opened.address.text
    used = [packs.get(pack) for pack, _ in reader.packs]
    if not used or any(isinstance(pack, CorruptSnapshotError) for pack in used):
        # A self-contained file; or a pack with damaged tables, though its chunks may be intact.
        return _check_bytes(opened, threads)
    found = []
    slices, summaries = reader.slice_checksums, reader.summary_checksums
    for chunk, (number, place) in enumerate(reader.places.tolist()):
        pack = used[number]
        if isinstance(pack, CheckedPack):  # else written just now, after packs were listed
            wrong = pack.claim(place, slices[chunk], summaries[chunk])
            found += _of_chunks(opened, name, ((chunk, at, why) for _, at, why in wrong), pack.path)
    return found + _check_tail(opened)


def _check_tail(opened: Opened) -> list[Damage]:
    reader = opened.reader
    tail = reader.chunks - 1

    def why(layer: int) -> str:
        try:
            reader.read_slice(tail, layer)
        except CorruptSnapshotError as error:
            return str(error)
        return ""

    layers = range(reader.layout.layers if reader.tail_tokens else 0)
    wrong = [(tail, layer, found) for layer in layers if (found := why(layer))]
    return _of_chunks(opened, opened.address.text, wrong)


class CheckedPack:
    """A pack that was read whole.

    Attributes:
        path: the file.
        wrong: its damage by chunk.
    """

    def __init__(self, opened: Opened, threads: int, progress: ProgressCallback | None) -> None:
        self._opened, reader = opened, opened.reader
        self.path = reader.path
        self._slices, self._summaries = reader.slice_checksums, reader.summary_checksums
        self.wrong: dict[int, list[Wrong]] = defaultdict(list)
        for one in reader.verify(threads, progress):
            self.wrong[one[0]].append(one)
        self._claimed: set[int] = set()

    def claim(self, chunk: int, slices: Any, summary: Any) -> list[Wrong]:
        """What is wrong with a chunk for a snapshot that was saved with these checksums."""
        self._claimed.add(chunk)
        if chunk in self.wrong:
            return self.wrong[chunk]
        other = np.flatnonzero(self._slices[chunk] != slices).tolist()
        other += [-1] if self._summaries[chunk] != summary else []
        name = Path(self.path).name
        message = f"pack {name} holds other bytes than the snapshot was saved with"
        return [(chunk, layer, message) for layer in other]

    def unclaimed(self) -> list[Damage]:
        """Damage of chunks that no snapshot needs."""
        left = sorted(self.wrong.keys() - self._claimed)
        return [part for c in left for part in _of_chunks(self._opened, None, self.wrong[c])]


# What a person reads.


def _lines(shown: Look, values: dict[str, Any], found: Sequence[Damage]) -> Iterator[str]:
    yield from shown.fields(_facts(values), 8)
    if not found:
        yield "whole: every byte is what was written"
        return
    yield f"DAMAGED: {counted(len(found), 'part')}"
    yield from (f"  {part}" for part in found[:_SHOWN])
    if len(found) > _SHOWN:
        yield f"  ... and {len(found) - _SHOWN:,} more; --format json lists all"


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if values["kind"] == "store":
        what = f"{counted(values['snapshots'], 'snapshot')}, {counted(values['packs'], 'pack')}"
    elif values["kind"] is None:
        what = "cannot be opened"
    else:
        tokens, chunks = counted(values["tokens"], "token"), counted(values["chunks"], "chunk")
        what = f"{values['kind']}, {tokens} in {chunks}"
    yield "checked", f"{values['path']}: {what}"
    read, seconds = values["bytes_read"], values["seconds"]
    cost = f"{byte_size(read)} in {duration(seconds)}, {byte_rate(read, seconds)}"
    yield "read", f"{cost} with {counted(values['threads'], 'thread')}"
    if values.get("logical_digest"):
        yield "digest", values["logical_digest"]
    for companion in values.get("companions", []):
        yield companion["kind"], companion["state"]
