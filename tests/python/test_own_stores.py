"""Stores that are not kvpager's own: what they must pass, and the ranges that they read from."""

from __future__ import annotations

import gc
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_store import LAYERS, Author, C, text

from kvpager import CorruptSnapshotError, InvalidArgumentError, StorageError, _core
from kvpager.stores import DirectoryStore, FileStore, SnapshotReader
from kvpager.testing import store_suite

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_store.py"
every_check = pytest.mark.parametrize("check", store_suite(), ids=lambda check: check.__name__)


class Ranges:
    """A file's bytes that are counted, and damaged or refused as a test wants."""

    def __init__(self, path: str) -> None:
        self.data = Path(path).read_bytes()
        self.size = len(self.data)
        self.reads: list[tuple[int, int]] = []
        self.wanted: list[tuple[int, int]] = []
        self.answer: Callable[[int, int], Any] = lambda at, size: self.data[at : at + size]

    def read(self, offset: int, size: int) -> Any:
        self.reads.append((offset, size))
        return self.answer(offset, size)

    def will_need(self, offset: int, size: int) -> None:
        self.wanted.append((offset, size))


@pytest.fixture
def author() -> Author:
    return Author()


@pytest.fixture
def saved(author: Author, tmp_path: Path) -> tuple[str, list[int]]:
    """A file of eight chunks and a tail, and its tokens."""
    tokens = text(8 * C + 5)
    author.save(FileStore(tmp_path), "a.kvsnap", tokens)
    return str(tmp_path / "a.kvsnap"), tokens


@every_check
def test_the_directory_store_passes(check: Any, tmp_path: Path) -> None:
    check(lambda: DirectoryStore(tmp_path / "store"))


@every_check
def test_the_store_of_the_example_passes(check: Any) -> None:
    files: dict[str, bytes] = {}
    example = runpy.run_path(str(EXAMPLE))
    check(lambda: example["DictStore"](files))


class OpensTheOldest(DirectoryStore):
    def open(self, name: str) -> Any:
        self.first = getattr(self, "first", None) or super().open(name)
        return self.first


class ListsBackwards(DirectoryStore):
    def entries(self, **options: Any) -> Any:
        return super().entries(**options)[::-1]


class DeletesNothing(DirectoryStore):
    def delete(self, name: str, **options: Any) -> None:
        pass


class FindsAnything(DirectoryStore):
    def find_prefix(self, hashes: Any) -> Any:
        return self.open(self.entries()[0].name)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (OpensTheOldest, "readers_go_on_after_their_snapshot_is_replaced_and_deleted"),
        (ListsBackwards, "entries_are_sorted_and_say_what_was_saved"),
        (DeletesNothing, "a_missing_name_is_a_storage_error"),
        (FindsAnything, "a_prefix_never_crosses_salts"),
    ],
)
def test_a_store_that_breaks_a_promise_fails_the_check_that_keeps_it(
    tmp_path: Path, broken: Any, check: str
) -> None:
    one = broken(tmp_path / "store")
    (checked,) = (each for each in store_suite() if each.__name__ == check)
    with pytest.raises(AssertionError):
        checked(lambda: one)


def test_a_snapshot_read_by_ranges_has_the_bits_of_its_file(
    author: Author, saved: tuple[str, list[int]]
) -> None:
    path, tokens = saved
    author.check(SnapshotReader.open(path, opener=Ranges), tokens)
    author.check_restored(SnapshotReader.open(path, opener=Ranges), tokens)


def test_manifest_and_packs_are_both_opened_through_the_opener(
    author: Author, tmp_path: Path
) -> None:
    store, tokens, opened = DirectoryStore(tmp_path / "s"), text(6 * C), []
    author.save(store, "a", tokens)

    def opener(path: str) -> Ranges:
        opened.append(Path(path).parent.name)
        return Ranges(path)

    manifest = f"{store.path}/snapshots/a.kvsnap"
    reader = SnapshotReader.open(manifest, f"{store.path}/packs", opener)
    assert opened == ["snapshots", "packs"]
    author.check(reader, tokens)


def test_only_the_metadata_are_read_at_open_and_of_the_payload_what_is_asked_for(
    saved: tuple[str, list[int]],
) -> None:
    opened: list[Ranges] = []

    def opener(path: str) -> Ranges:
        opened.append(Ranges(path))
        return opened[0]

    reader = SnapshotReader.open(saved[0], opener=opener)
    at_open = len(opened[0].reads)
    assert at_open == 2
    payload = reader.layout.chunk_bytes
    assert sum(size for _, size in opened[0].reads) < opened[0].size - reader.chunks * payload
    reader.read_slice(3, 1)
    reader.read_chunk(5)
    assert [size for _, size in opened[0].reads[at_open:]] == [payload // LAYERS, payload]


@pytest.mark.parametrize("at", [None, "front", "metadata", "payload"])
def test_any_changed_bit_of_a_range_is_found(saved: tuple[str, list[int]], at: str | None) -> None:
    class Flipped(Ranges):
        def read(self, offset: int, size: int) -> bytes:
            data = bytearray(self.data[offset : offset + size])
            where = {0: "front", self.size - size: "metadata"}.get(offset, "payload")
            if where == at:
                data[size // 2 if where != "front" else 20] ^= 16
            return bytes(data)

    def read_all() -> list[Any]:
        return list(SnapshotReader.open(saved[0], opener=Flipped).verify(1))

    if at in ("front", "metadata"):
        with pytest.raises(CorruptSnapshotError, match=r"a\.kvsnap"):
            read_all()
    else:
        assert bool(read_all()) == (at == "payload")


class Interrupt(BaseException):
    """As KeyboardInterrupt, but not pytest's."""


def raising(error: BaseException) -> Callable[[int, int], Any]:
    def answer(offset: int, size: int) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (raising(OSError("gateway is down")), StorageError, "chunk 2 .*gateway is down"),
        (raising(StorageError("no such key")), StorageError, "chunk 2 .*no such key"),
        (raising(CorruptSnapshotError("it ended")), CorruptSnapshotError, "it ended"),
        (raising(KeyError("a bug")), KeyError, "a bug"),
        (raising(Interrupt("stop")), Interrupt, "stop"),
        (lambda at, size: b"short", StorageError, r"returned <class 'bytes'> of 5 bytes, expected"),
        (lambda at, size: None, StorageError, "NoneType"),
        (lambda at, size: np.zeros(2 * size, np.uint8)[::2], StorageError, "contiguous"),
    ],
)
def test_what_a_source_raises_or_returns_wrongly_is_an_error_of_that_read_alone(
    author: Author, saved: tuple[str, list[int]], answer: Any, kind: type, words: str
) -> None:
    ranges = Ranges(saved[0])
    reader = SnapshotReader.open(saved[0], opener=lambda path: ranges)
    right, ranges.answer = ranges.answer, answer
    with pytest.raises(kind, match=words):
        reader.read_chunk(2)
    ranges.answer = right
    author.check(reader, saved[1])


@pytest.mark.parametrize("size", [-1, 2**70, None, 1.5])
def test_a_size_that_is_none_is_refused_by_name(saved: tuple[str, list[int]], size: Any) -> None:
    ranges = Ranges(saved[0])
    ranges.size = size
    with pytest.raises(InvalidArgumentError, match=r"a\.kvsnap: size is .*expected"):
        SnapshotReader.open(saved[0], opener=lambda path: ranges)


def test_an_opener_that_finds_nothing_is_a_storage_error() -> None:
    def opener(path: str) -> Any:
        raise FileNotFoundError(f"no object {path}")

    with pytest.raises(StorageError, match="s3/a: cannot open the snapshot: no object s3/a"):
        SnapshotReader.open("s3/a", opener=opener)


def test_a_restored_sequence_survives_a_source_that_fails_and_comes_back(
    author: Author, saved: tuple[str, list[int]]
) -> None:
    path, tokens = saved
    ranges = Ranges(path)
    small = Author(pool_tokens=8 * C, host_bytes=0)
    reader = SnapshotReader.open(path, opener=lambda path: ranges)
    right, ranges.answer = ranges.answer, raising(OSError("gone"))
    with pytest.raises(StorageError, match="gone"):  # the tail is read at once
        small.check_restored(reader, tokens)
    ranges.answer = right
    small.check_restored(reader, tokens)


def test_a_source_is_dropped_with_its_last_reader(saved: tuple[str, list[int]]) -> None:
    dropped = threading.Event()

    class Noted(Ranges):
        def __del__(self) -> None:
            dropped.set()

    reader: Any = SnapshotReader.open(saved[0], opener=Noted)
    prefix: Any = _core.SnapshotReader.gather([(reader, 0), (reader, 1)], "two")
    del reader
    gc.collect()
    assert not dropped.is_set()
    prefix.read_chunk(1)
    del prefix
    gc.collect()
    assert dropped.is_set()
