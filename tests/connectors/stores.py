"""What tests do to the folder of a chunk store, and to its calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvpager.stores.chunks import ChunkStore


class Held(threading.Event):
    """Calls wait until it is set. waiting: set by the first that does."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()


def held_back(monkeypatch: pytest.MonkeyPatch, name: str) -> Held:
    """Has a method of every store wait for the event."""
    event = Held()
    method = getattr(ChunkStore, name)

    def waiting(self: ChunkStore, *args: Any, **kwargs: Any) -> Any:
        event.waiting.set()
        assert event.wait(60)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(ChunkStore, name, waiting)
    return event


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "packs").glob("*.kvblocks"), key=lambda path: path.stat().st_mtime_ns)


def damage(folder: Path) -> None:
    """Flips a bit of the last block of the last pack, before what it is padded with."""
    pack = packs(folder)[-1]
    data = bytearray(pack.read_bytes())
    data[len(data.rstrip(b"\0")) - 1] ^= 1
    pack.write_bytes(data)


def swap(folder: Path) -> None:
    """Gives the files of two packs of one size each other's contents."""
    first, second = packs(folder)
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)
