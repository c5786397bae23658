"""Blocks for tests of chunk stores: made from their numbers, and compared to the byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpager.stores import ChunkStore, ReadResult

KIB = 1024
BLOCK = 16 * KIB
FRONT = 4 * KIB  # of a pack, before its blocks


def block(number: int, size: int = BLOCK) -> bytes:
    return random.Random(number).randbytes(size)


def name(number: int) -> bytes:
    return f"block-{number}".encode()


def blocks(numbers: Sequence[int], size: int = BLOCK) -> list[tuple[bytes, int, bytes]]:
    return [(name(number), 0, block(number, size)) for number in numbers]


def read(store: ChunkStore, key: bytes, size: int = BLOCK, group: int = 0) -> Any:
    """The bytes of a block, or the result of its read, whose destination was not touched."""
    into = bytearray(b"\xee" * size)
    (result,) = store.read([key], group, [into])
    if result is ReadResult.HIT:
        return bytes(into)
    assert into == b"\xee" * size
    return result


def there(store: ChunkStore, numbers: Sequence[int]) -> list[int]:
    """Those that are there, which are whole."""
    found = [n for n, has in zip(numbers, store.has([name(n) for n in numbers])) if has]
    assert [n for n in found if read(store, name(n)) != block(n)] == []
    return found


def packs(folder: str | Path) -> list[Path]:
    return sorted(Path(folder, "packs").glob("*.kvblocks"))


def bytes_on_disk(folder: str | Path) -> int:
    """Of all files that the budget counts."""
    return sum(path.stat().st_blocks * 512 for path in Path(folder, "packs").iterdir())


def remove_index(folder: str | Path) -> None:
    for path in Path(folder).glob("index.sqlite3*"):
        path.unlink()
