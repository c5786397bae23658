"""Damage that a check found, and where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpager.cli.snapshot.opened import Opened
from kvpager.errors import CorruptSnapshotError, StorageError
from kvpager.stores import DirectoryStore

_SHOWN = 40  # lines of damage; --format json has all of it


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


def lines(damage: Sequence[Damage]) -> Iterable[str]:
    """A line for each, as many as a person reads."""
    for part in damage[:_SHOWN]:
        yield f"  {part}"
    if len(damage) > _SHOWN:
        yield f"  ... and {len(damage) - _SHOWN:,} more; --format json lists all"


def remember_damage(store: DirectoryStore, opened: Opened, chunk: int) -> None:
    """Tells a store of damage in a snapshot of it, so that the chunk is shared no more.

    One that may only be read is checked all the same.
    """
    with contextlib.suppress(StorageError):
        store.report_damage(opened.reader, chunk)
