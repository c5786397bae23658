"""A store of opaque blocks: what is put is read back to the byte, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from small_blocks import (
    BLOCK,
    FRONT,
    block,
    blocks,
    bytes_on_disk,
    name,
    packs,
    read,
    remove_index,
    there,
)

from kvpager import _core
from kvpager.cli import main
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
)
from kvpager.stores import (
    ChunkQueue,
    ChunkStore,
    DirectoryStore,
    ReadResult,
    StoreKey,
    holes,
)
from kvpager.stores.chunks import DamagedBlock, contents
from kvpager.stores.chunks.contents import FIND
from kvpager.stores.chunks.pack import PackFile, PackWriter
from kvpager.stores.lock import exclusive

HIT, MISS, REFUSED = ReadResult.HIT, ReadResult.MISS, ReadResult.REFUSED
KEY = bytes(range(32))  # of encrypted stores

Opener = Callable[..., ChunkStore]


@pytest.fixture(params=["plain", "encrypted"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens a store of the test's folder; the fixture closes it."""
    found = []

    def opened(identity: Any = None, **options: Any) -> ChunkStore:
        options.setdefault("key", KEY if request.param == "encrypted" else None)
        found.append(ChunkStore(tmp_path / "store", identity or {"model": "a"}, **options))
        return found[-1]

    yield opened
    for store in found:
        store.close()


@pytest.fixture
def store(opened: Opener) -> ChunkStore:
    return opened()


# Putting and reading.


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65536, 1_000_003])
def test_what_was_put_is_read_back(store: ChunkStore, size: int) -> None:
    store.put(blocks([1, 2, 3], size))
    assert [read(store, name(n), size) for n in (1, 2, 3)] == [block(n, size) for n in (1, 2, 3)]


def test_a_put_reports_what_it_did(store: ChunkStore) -> None:
    report = store.put(blocks([1, 2]))
    assert (report.stored, report.already_there, report.evicted) == (2, 0, 0)
    assert report.bytes_written == bytes_on_disk(store.path) == store.stats()["bytes"]


def test_what_is_there_is_not_written_again(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    before = bytes_on_disk(store.path)
    assert store.put(blocks([1, 2])).already_there == 2
    assert bytes_on_disk(store.path) == before
    assert store.put([*blocks([1, 3]), *blocks([3])]).stored == 1


def test_groups_have_blocks_of_their_own(store: ChunkStore) -> None:
    store.put([(b"k", 0, b"zero"), (b"k", 7, b"seven")])
    assert read(store, b"k", 4) == b"zero"
    assert read(store, b"k", 5, group=7) == b"seven"
    assert store.has([b"k"], 1) == [False]


def test_identities_share_a_folder_and_no_block(opened: Opener) -> None:
    a, b = opened({"model": "a", "rope": 1e4}), opened({"model": "b", "rope": 1e4})
    a.put(blocks([1]))
    assert b.has([name(1)]) == [False]
    assert read(b, name(1)) is MISS
    b.put([(name(1), 0, block(99))])
    assert (read(a, name(1)), read(b, name(1))) == (block(1), block(99))
    assert sorted(found[0]["model"] for found in a.identities()) == ["a", "b"]


def test_an_identity_is_its_values_in_any_order(opened: Opener) -> None:
    opened({"x": 1, "y": [2, None]}).put(blocks([1]))
    assert there(opened({"y": [2, None], "x": 1}), [1]) == [1]


def test_any_contiguous_buffer_is_a_block(store: ChunkStore) -> None:
    array = np.arange(4096, dtype=np.float16).reshape(2, 32, 64)
    store.put([(b"array", 0, array), (b"slice", 0, array[1]), (b"view", 0, memoryview(b"bytes"))])
    into = np.zeros_like(array)
    assert store.read([b"array"], 0, [into]) == [HIT]
    assert np.array_equal(into, array)
    assert read(store, b"slice", array[1].nbytes) == array[1].tobytes()


def test_a_garbage_cycle_with_a_block_is_collected() -> None:
    """Cycles of errors and frames hold blocks; collecting some kinds of views crashes CPython."""
    code = """
import gc
from kvpager.stores.chunks.store import checked_blocks
rows = memoryview(bytearray(8192)).cast("B", (2, 4096)).cast("B")
for _ in range(50):
    cycle = [checked_blocks([(b"key", 0, rows[:4096])])]
    cycle.append(cycle)
    del cycle
    gc.collect()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_read_of_many_says_of_each_what_became_of_it(store: ChunkStore) -> None:
    store.put(blocks([1, 3]))
    into = [bytearray(BLOCK), bytearray(BLOCK), bytearray(BLOCK - 1)]
    assert store.read([name(n) for n in (1, 2, 3)], 0, into) == [HIT, MISS, REFUSED]
    assert into == [block(1), bytes(BLOCK), bytes(BLOCK - 1)]
    assert store.stats()["refused"]["size"] == 1


def test_another_object_and_another_process_see_what_was_put(opened: Opener) -> None:
    first, second = opened(), opened()
    first.put(blocks([1]))
    assert there(second, [1]) == [1]
    second.delete([name(1)])
    assert there(first, [1]) == []


def test_deleted_blocks_are_gone_and_their_bytes_free(store: ChunkStore) -> None:
    store.put(blocks([1, 2, 3]))
    before = bytes_on_disk(store.path)
    assert store.delete([name(2), name(9)]) == 1
    assert there(store, [1, 2, 3]) == [1, 3]
    assert bytes_on_disk(store.path) == before - BLOCK == store.stats()["bytes"]
    store.delete([name(1), name(3)])
    assert packs(store.path) == []


def test_clear_removes_the_blocks_of_one_identity(opened: Opener) -> None:
    a, b = opened({"model": "a"}), opened({"model": "b"})
    a.put(blocks([1, 2]))
    a.put(blocks([3]))
    b.put(blocks([1]))
    assert a.clear() == 3
    assert there(a, [1, 2, 3]) == []
    assert there(b, [1]) == [1]
    assert a.clear() == 0


# What is refused.


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data[at : at + 1])


@pytest.mark.parametrize("at", [0, 1, BLOCK // 2, BLOCK - 1])
def test_a_flipped_bit_is_refused_and_the_next_put_repairs_it(store: ChunkStore, at: int) -> None:
    store.put(blocks([1, 2]))
    flip(packs(store.path)[0], FRONT + at)
    assert read(store, name(1)) is REFUSED
    assert store.stats()["refused"]["damaged"] == 1
    assert read(store, name(2)) == block(2)
    assert store.has([name(1)]) == [False]
    store.put(blocks([1]))
    assert read(store, name(1)) == block(1)


def test_a_damaged_version_raises_nothing(store: ChunkStore) -> None:
    store.put(blocks([1]))
    flip(packs(store.path)[0], 8)
    assert read(store, name(1)) in (block(1), REFUSED)
    store.put(blocks([2]))
    flip(packs(store.path)[-1], 8)
    flip(packs(store.path)[0], 8)
    store.verify()


def test_a_truncated_pack_returns_nothing_that_it_lacks(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    os.truncate(packs(store.path)[0], FRONT + BLOCK + 100)
    assert read(store, name(1)) == block(1)
    assert read(store, name(2)) in (MISS, REFUSED)


def test_blocks_in_each_others_places_are_refused(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    data = packs(store.path)[0].read_bytes()
    first, second = data[FRONT : FRONT + BLOCK], data[FRONT + BLOCK :]
    with packs(store.path)[0].open("r+b") as file:
        file.seek(FRONT)
        file.write(second + first)
    assert read(store, name(1)) is REFUSED
    assert read(store, name(2)) is REFUSED


def test_packs_in_each_others_places_are_refused(opened: Opener) -> None:
    a, b = opened({"model": "a"}), opened({"model": "b"})
    a.put([(b"k", 0, block(1))])
    (one,) = packs(a.path)
    b.put([(b"k", 0, block(2))])
    (other,) = set(packs(a.path)) - {one}
    swapped = one.read_bytes(), other.read_bytes()
    for path, data in zip((other, one), swapped):
        with path.open("r+b") as file:
            file.write(data)
    assert read(a, b"k") is REFUSED
    assert read(b, b"k") is REFUSED
    assert [sum(s.stats()["refused"].values()) for s in (a, b)] == [1, 1]


def test_an_index_that_lies_about_a_place_returns_nothing(
    store: ChunkStore, opened: Opener
) -> None:
    store.put([*blocks([1, 2]), (name(1), 5, block(3)), (b"short", 0, block(4, 100))])
    store.close()
    database = sqlite3.connect(Path(store.path, "index.sqlite3"))
    rows = database.execute("SELECT label, start, size, span, checked FROM block").fetchall()
    for row, (_, *other) in zip(rows, rows[1:] + rows[:1]):
        sql = "UPDATE block SET start = ?, size = ?, span = ?, checked = ? WHERE label = ?"
        database.execute(sql, (*other, row[0]))
    database.commit()
    database.close()
    store = opened()
    found = [read(store, name(1)), read(store, name(2)), read(store, name(1), group=5)]
    assert set(found) == {REFUSED}
    assert read(store, b"short", 100) is REFUSED


@pytest.mark.parametrize("size", [1, 100, 4096, 1_000_003])
def test_the_check_of_a_block_is_the_one_of_the_format(size: int) -> None:
    data = block(1, size)
    expected = xxhash.xxh3_128_digest(b"binding" + xxhash.xxh3_128_digest(data))
    assert _core.block_check(b"binding", data) == expected


def test_a_block_that_the_disk_cannot_read_is_refused_and_stays(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store", {}) as store:
        store.put(blocks([1, 2, 3]))
        _core.arm_fault("block.read", 1, errno.EIO)
        into = [bytearray(BLOCK) for _ in range(3)]
        assert store.read([name(n) for n in (1, 2, 3)], 0, into) == [HIT, REFUSED, HIT]
        assert into == [block(1), bytes(BLOCK), block(3)]
        assert store.stats()["refused"]["unreadable"] == 1
        assert there(store, [1, 2, 3]) == [1, 2, 3]
        _core.arm_fault("block.read", 0, errno.EIO)
        with pytest.raises(StorageError, match="Input/output error"):
            store.verify()


def test_verify_finds_damage_of_every_identity(opened: Opener) -> None:
    a, b = opened({"model": "a"}), opened({"model": "b"})
    a.put(blocks([1, 2]))
    (pack,) = packs(a.path)
    b.put(blocks([3]))
    flip(pack, FRONT + BLOCK + 5)
    assert b.verify() == [DamagedBlock(str(pack), name(2), 0, "its bytes are not what was written")]
    assert b.verify() == []
    assert (there(a, [1, 2]), there(b, [3])) == ([1], [3])


# Budget, last uses, time to live.


def test_the_budget_holds_and_the_least_recently_used_goes(opened: Opener) -> None:
    store = opened(byte_budget=20 * BLOCK)
    store.put(blocks(range(8)))
    store.put(blocks(range(8, 16)))
    store.read([name(n) for n in range(4)], 0, [bytearray(BLOCK) for _ in range(4)])
    report = store.put(blocks(range(16, 24)))
    assert there(store, range(24)) == [*range(4), *range(8, 15), *range(16, 24)]
    assert report.evicted == 5
    assert 19 * BLOCK < bytes_on_disk(store.path) == store.stats()["bytes"] <= 20 * BLOCK


def test_later_blocks_of_a_put_go_before_those_that_they_need(opened: Opener) -> None:
    store = opened(byte_budget=12 * BLOCK)
    store.put(blocks(range(8)))
    store.put(blocks(range(8, 14)))
    left = there(store, range(8))
    assert left == list(range(len(left)))
    assert 0 < len(left) < 8


def test_touched_blocks_stay(opened: Opener) -> None:
    store = opened(byte_budget=10 * BLOCK)
    for n in range(6):
        store.put(blocks([n]))
    store.touch([name(0), name(1)])
    store.put(blocks(range(6, 10)))
    assert {0, 1} <= set(there(store, range(10)))


def test_what_does_not_fit_is_refused_and_costs_nothing(opened: Opener) -> None:
    store = opened(byte_budget=8 * BLOCK)
    store.put(blocks(range(4)))
    with pytest.raises(CapacityError, match=f"byte_budget is {8 * BLOCK}; the blocks of one put"):
        store.put(blocks(range(10, 20)))
    with pytest.raises(CapacityError, match="byte_budget is"):
        store.put([(b"large", 0, bytes(9 * BLOCK))])
    assert there(store, range(20)) == [0, 1, 2, 3]


def test_a_smaller_budget_evicts_at_once(opened: Opener) -> None:
    opened(byte_budget="unlimited").put(blocks(range(16)))
    store = opened(byte_budget=8 * BLOCK)
    assert bytes_on_disk(store.path) <= 8 * BLOCK
    assert len(there(store, range(16))) == 7


def test_expired_blocks_are_missing_and_collected(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(ttl="1h")
    store.put(blocks([1]))
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3599 * 10**9)
    store.put(blocks([2]))
    assert there(store, [1, 2]) == [1, 2]
    monkeypatch.setattr(time, "time_ns", lambda: now + 9000 * 10**9)
    assert there(store, [1, 2]) == []
    assert store.put(blocks([1])).stored == 1
    assert store.gc().expired == 1
    assert there(store, [1, 2]) == [1]


# Others at the same time.


def while_it_is_written(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Calls once, before the next put writes what it has reserved."""
    real = PackWriter.write

    def write(writer: PackWriter) -> None:
        monkeypatch.setattr(PackWriter, "write", real)
        call()
        real(writer)

    monkeypatch.setattr(PackWriter, "write", write)


def test_two_puts_at_once_share_the_budget(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = opened(byte_budget=10 * BLOCK), opened()
    store.put(blocks(range(6)))
    while_it_is_written(monkeypatch, lambda: other.put(blocks(range(20, 24))))
    store.put(blocks(range(10, 14)))
    assert {*range(10, 14), *range(20, 24)} <= set(there(store, range(30)))
    assert bytes_on_disk(store.path) <= 10 * BLOCK
    while_it_is_written(monkeypatch, lambda: other.put(blocks(range(30, 35))))
    with pytest.raises(CapacityError, match=r"and \d+ cannot go, of files being written"):
        store.put(blocks(range(40, 45)))


def test_a_collection_leaves_what_is_being_written(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(), opened()
    while_it_is_written(monkeypatch, other.gc)
    assert store.put(blocks([1])).stored == 1
    assert there(other, [1]) == [1]


def test_blocks_that_two_put_at_once_are_kept_once(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(), opened()
    while_it_is_written(monkeypatch, lambda: other.put(blocks([1, 2])))
    report = store.put(blocks([1, 2, 3]))
    assert (report.stored, report.already_there) == (1, 2)
    assert there(store, [1, 2, 3]) == [1, 2, 3]
    assert store.stats()["bytes"] == bytes_on_disk(store.path) == 3 * BLOCK + 2 * FRONT
    remove_index(store.path)
    assert there(opened(), [1, 2, 3]) == [1, 2, 3]


def test_a_block_that_is_evicted_while_it_is_read_is_a_miss(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = opened(), opened()
    store.put(blocks([1, 2]))
    assert there(reader, [1, 2]) == [1, 2]
    seen, real = [], contents.punch

    def punch(path: str, ranges: Any) -> None:
        (start, size) = ranges[0]
        real(path, [(start, 4096)])
        seen.append(read(reader, name(1)))
        real(path, [(start, size)])

    monkeypatch.setattr(contents, "punch", punch)
    find = reader._blocks
    rows = find(FIND, reader._labels([name(1)], 0))
    monkeypatch.setattr(reader, "_blocks", lambda *_: rows)  # found before it was evicted
    store.delete([name(1)])
    assert seen == [MISS]
    assert sum(reader.stats()["refused"].values()) == 0


def test_a_block_that_is_put_again_while_it_is_read_stays(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = opened(), opened()
    store.put(blocks([1]))
    assert there(reader, [1]) == [1]
    opened_pack = reader._pack

    def put_again(*place: Any) -> PackFile:
        store.delete([name(1)])
        store.put(blocks([1]))
        return opened_pack(*place)

    monkeypatch.setattr(reader, "_pack", put_again)
    assert read(reader, name(1)) is MISS
    assert there(store, [1]) == [1]


def test_the_bytes_of_a_removed_pack_are_free_though_it_is_open(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    with packs(store.path)[0].open("rb") as file:
        store.delete([name(1), name(2)])
        assert os.fstat(file.fileno()).st_blocks == 0


def test_what_asks_or_reads_does_not_wait_for_the_lock(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    flip(packs(store.path)[0], FRONT)
    store._lock_timeout = 0.0
    with exclusive(f"{store.path}/lock", 10):
        assert store.has([name(1), name(3)]) == [True, False]
        assert read(store, name(2)) == block(2)
        assert read(store, name(1)) is REFUSED
        assert store.has([name(1)]) == [False]
        store.touch([name(2)])
        assert store.stats()["blocks"] == 1
        with pytest.raises(StorageError, match="has been locked"):
            store.put(blocks([3]))


# The index is an index.


@pytest.mark.parametrize("damage", ["deleted", "garbage"])
def test_a_lost_index_is_made_again_with_what_the_packs_hold(opened: Opener, damage: str) -> None:
    first = opened()
    first.put(blocks(range(4)))
    first.put(blocks(range(4, 8)))
    first.delete([name(1), name(5)])
    total = first.stats()["bytes"]
    first.close()
    remove_index(first.path)
    if damage == "garbage":
        Path(first.path, "index.sqlite3").write_bytes(b"x" * 8192)
    store = opened()
    assert there(store, range(8)) == [0, 2, 3, 4, 6, 7]
    assert store.stats()["bytes"] == total == bytes_on_disk(store.path)


def with_front(pack: Path, change: Callable[[bytearray], None], *, seals: bool) -> None:
    """Changes header and metadata of a plain pack; `seals`: as somebody who knows the format."""
    data = bytearray(pack.read_bytes())
    size = int.from_bytes(data[32:36], "little")
    front = data[:72] + data[128 : 128 + size]
    change(front)
    check = xxhash.xxh3_128_digest(bytes(front)) if seals else bytes(data[72:88])
    with pack.open("r+b") as file:
        file.write(front[:72] + check)
        file.seek(128)
        file.write(front[72:])


@pytest.mark.parametrize("seals", [False, True])
def test_any_front_of_a_pack_gives_the_blocks_that_were_put_or_none(
    tmp_path: Path, seals: bool
) -> None:
    dice = random.Random(seals)
    with ChunkStore(tmp_path / "store", {"model": "a"}) as store:
        store.put([*blocks([1, 2]), (name(3), 7, block(3))])
    (pack,) = packs(store.path)
    original, answers = pack.read_bytes(), set()
    for _ in range(60):

        def change(front: bytearray) -> None:
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(len(front))
                front[at] = dice.choice([0, 1, 0x7F, 0xFF, front[at] ^ (1 << dice.randrange(8))])

        with_front(pack, change, seals=seals)
        remove_index(store.path)
        with ChunkStore(tmp_path / "store", {"model": "a"}) as other:
            for number, group in ((1, 0), (2, 0), (3, 7)):
                found = read(other, name(number), group=group)
                assert found in (block(number), MISS, REFUSED)
                answers.add(found if isinstance(found, ReadResult) else HIT)
            other.verify()
            other.gc()
            other.put(blocks([9]))
            assert there(other, [9]) == [9]
        for path in packs(store.path):
            path.unlink()
        pack.write_bytes(original)
    assert MISS in answers
    assert (REFUSED in answers) == seals  # a table that is not trusted is not looked at


def test_an_index_that_is_deleted_under_an_open_store_is_made_again(store: ChunkStore) -> None:
    store.put(blocks([1, 2]))
    remove_index(store.path)
    assert there(store, [1, 2]) == [1, 2]
    store.put(blocks([3]))
    assert there(store, [1, 2, 3]) == [1, 2, 3]


def test_packs_that_are_moved_by_hand_are_found_and_missed(
    store: ChunkStore, tmp_path: Path
) -> None:
    store.put(blocks([1, 2]))
    (pack,) = packs(store.path)
    moved = pack.rename(tmp_path / pack.name)
    store.gc()
    assert there(store, [1, 2]) == []
    assert store.stats()["bytes"] == 0
    moved.rename(pack)
    store.gc()
    assert there(store, [1, 2]) == [1, 2]


@pytest.mark.parametrize("file", [f"{'0' * 32}.kvblocks", ".kvsnap-0.tmp"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_stays_and_stops_nothing(
    opened: Opener, file: str, make: Callable[[Path], None]
) -> None:
    store = opened(byte_budget=4 * BLOCK)
    other = Path(store.path, "packs", file)
    make(other)
    for number in range(6):
        store.put(blocks([number]))
    store.gc()
    assert other.exists()
    assert 5 in there(store, range(6))


# Arguments.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.put([("text", 0, b"x")]), r"the key of blocks\[0\] is 'text'; expected 1 to"),
        (lambda s: s.put([(b"", 0, b"x")]), r"the key of blocks\[0\] is b''"),
        (lambda s: s.put([(b"k", -1, b"x")]), r"the group of blocks\[0\] is -1; expected 0 to"),
        (lambda s: s.put([(b"k", True, b"x")]), r"the group of blocks\[0\] is True"),
        (lambda s: s.put([(b"k", 0, b"")]), r"the data of blocks\[0\] has 0 bytes; expected 1 to"),
        (lambda s: s.put([(b"k", 0, "x")]), r"the data of blocks\[0\] is a str"),
        (lambda s: s.put([(b"k", 0)]), r"blocks\[0\] is .*; expected a tuple"),
        (lambda s: s.put(5), "blocks is 5; expected tuples"),
        (
            lambda s: s.put([(b"k", 0, np.zeros((4, 4))[:, 0])]),
            r"the data of blocks\[0\] is a ndarray .*; expected a contiguous buffer",
        ),
        (lambda s: s.has(b"k"), "keys is b'k'; expected a sequence of bytes"),
        (lambda s: s.has(["k"]), r"keys\[0\] is 'k'; expected 1 to"),
        (lambda s: s.has([b"k"], 1 << 32), "group is 4294967296; expected 0 to 4294967295"),
        (lambda s: s.read([b"k"], 0, []), "into has 0 buffers; expected 1"),
        (lambda s: s.read([b"k"], 0, [b"x"]), r"into\[0\] is read-only"),
        (lambda s: s.read([b"k"], 0, [None]), r"into\[0\] is a NoneType"),
        (lambda s: s.delete(None), "keys is None"),
    ],
)
def test_wrong_arguments_are_named(
    store: ChunkStore, call: Callable[[ChunkStore], object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(store)


@pytest.mark.parametrize(
    ("identity", "options", "message"),
    [
        (["a"], {}, "identity is .*; expected a mapping of JSON values"),
        ({"a": object()}, {}, "identity is .*; expected a mapping of JSON values"),
        ({"a": float("nan")}, {}, "identity is .*; expected a mapping of JSON values"),
        ({}, {"byte_budget": "much"}, "byte_budget is 'much'"),
        ({}, {"ttl": "soon"}, "ttl is 'soon'"),
        ({}, {"mode": 0o777}, "mode is 0o777"),
    ],
)
def test_wrong_options_make_no_store(
    tmp_path: Path, identity: Any, options: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ChunkStore(tmp_path / "store", identity, **options)
    assert not (tmp_path / "store").exists()


def test_a_folder_of_another_kind_of_store_is_refused(tmp_path: Path) -> None:
    ChunkStore(tmp_path / "blocks", {}).close()
    DirectoryStore(tmp_path / "snapshots")
    with pytest.raises(InvalidArgumentError, match=r"is a ChunkStore; expected a DirectoryStore"):
        DirectoryStore(tmp_path / "blocks")
    with pytest.raises(InvalidArgumentError, match=r"is a DirectoryStore; expected a ChunkStore"):
        ChunkStore(tmp_path / "snapshots", {})


def test_a_missing_store_is_not_made_without_create(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no store here"):
        ChunkStore(tmp_path / "store", {}, create=False)


def test_the_error_about_a_large_block_that_came_without_its_key_is_short(
    store: ChunkStore,
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"blocks\[0\] is b'.* characters\)") as error:
        store.put([block(1, 1 << 20)])  # type: ignore[list-item]
    assert len(str(error.value)) < 500


def test_a_closed_store_says_so(store: ChunkStore) -> None:
    store.close()
    store.close()
    with pytest.raises(InvalidArgumentError, match="is closed"):
        store.has([b"k"])


@pytest.mark.parametrize("step", ["create", "write", "publish"])
def test_a_put_that_another_thread_closes_the_store_under_is_stored_whole(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store, made = opened(), getattr(PackWriter, step)
    closer = threading.Thread(target=store.close)

    def closing(pack: PackWriter, *values: Any) -> None:
        closer.start()
        if step == "write":  # the lock is free meanwhile
            closer.join()
        made(pack, *values)

    monkeypatch.setattr(PackWriter, step, closing)
    assert store.put(blocks([1])).stored == 1
    closer.join()
    with pytest.raises(InvalidArgumentError, match="is closed"):
        store.has([name(1)])
    assert there(opened(), [1]) == [1]


def test_a_store_whose_folder_is_gone_can_be_closed(store: ChunkStore) -> None:
    store.put(blocks([1]))
    shutil.rmtree(store.path)
    store.close()


def test_verify_leaves_out_a_pack_that_is_removed_while_it_is_read(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(), opened()
    store.put(blocks([1]))

    def removed(pack: Any) -> Any:
        other.clear()
        raise CorruptSnapshotError("half of it is gone")

    monkeypatch.setattr(PackFile, "table", removed)
    assert store.verify() == []


def test_a_wrong_key_opens_no_encrypted_store(tmp_path: Path) -> None:
    ChunkStore(tmp_path / "store", {}, key=KEY).close()
    with pytest.raises(StorageError, match="it is encrypted with key"):
        ChunkStore(tmp_path / "store", {}, key=bytes(32))
    with pytest.raises(InvalidArgumentError, match="key is None"):
        ChunkStore(tmp_path / "store", {})


def test_an_encrypted_store_shows_neither_blocks_nor_keys_nor_identity(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store", {"model": "secret-model"}, key=KEY) as store:
        store.put([(b"secret-key", 0, b"secret-data" * 1000)])
        store.touch([b"secret-key"])
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or b"secret-" not in path.read_bytes()


def test_a_new_master_key_opens_what_an_older_one_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = KEY, bytes(32)
    with ChunkStore(tmp_path / "store", {}, key=old) as store:
        store.put(blocks([1]))
        store.rewrap(StoreKey([new, old]))
    with ChunkStore(tmp_path / "store", {}, key=new) as store:
        assert there(store, [1]) == [1]
    monkeypatch.setenv("KVPAGER_STORE_KEY", f"{old.hex()} {new.hex()}")
    assert main(["snapshot", "rekey", str(tmp_path / "store")]) == 0
    with ChunkStore(tmp_path / "store", {}, key=old) as store:
        assert there(store, [1]) == [1]
    monkeypatch.delenv("KVPAGER_STORE_KEY")
    with (
        ChunkStore(tmp_path / "plain", {}) as plain,
        pytest.raises(InvalidArgumentError, match="is a store without encryption"),
    ):
        plain.rewrap(new)


# Queues.


@pytest.fixture
def queue(store: ChunkStore) -> Iterator[ChunkQueue]:
    with ChunkQueue(store, threads=2, depth=4) as queue:
        yield queue


def test_jobs_end_with_what_they_did(queue: ChunkQueue, store: ChunkStore) -> None:
    assert queue.put("put", blocks([1, 2]))
    assert queue.drain(30)
    into = [bytearray(BLOCK) for _ in range(3)]
    assert queue.read("read", [name(n) for n in (1, 2, 3)], 0, into)
    assert queue.drain(30)
    put, got = queue.finished()
    assert (put.job_id, put.stored, put.error) == ("put", (name(1), name(2)), None)
    assert (got.job_id, got.results, got.bytes) == ("read", (HIT, HIT, MISS), 2 * BLOCK)
    assert into[:2] == [block(1), block(2)]
    assert queue.finished() == []


class Held:
    """Holds the store's reads before they open a block's pack."""

    def __init__(self, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Semaphore(0), threading.Semaphore(0)
        real = store._pack

        def pack(*place: Any) -> PackFile:
            self.reached.release()
            assert self.go.acquire(timeout=60)
            return real(*place)

        monkeypatch.setattr(store, "_pack", pack)


def test_whoever_asked_is_called_when_a_job_has_ended(store: ChunkStore) -> None:
    ended: list[Any] = []
    with ChunkQueue(store, on_done=lambda: ended.extend(queue.finished())) as queue:
        queue.put("put", blocks([1]))
        assert queue.drain(30)
    assert [job.job_id for job in ended] == ["put"]


def test_a_full_queue_takes_nothing_and_does_not_wait(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(blocks([1]))
    held = Held(store, monkeypatch)
    with ChunkQueue(store, threads=1, depth=2) as queue:
        into = [bytearray(BLOCK) for _ in range(3)]
        assert queue.read(0, [name(1)], 0, into[:1])
        assert queue.read(1, [name(1)], 0, into[1:2])
        assert not queue.read(2, [name(1)], 0, into[2:])
        with pytest.raises(InvalidArgumentError, match="job_id is 1, which another job has"):
            queue.read(1, [name(1)], 0, into[2:])
        held.go.release(2)
        assert queue.drain(30)
        assert [job.job_id for job in queue.finished()] == [0, 1]
        assert into == [block(1), block(1), bytes(BLOCK)]


def test_nothing_is_written_to_what_an_abandoned_read_was_given(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(blocks([1, 2]))
    held = Held(store, monkeypatch)
    with ChunkQueue(store, threads=1) as queue:
        into = [bytearray(BLOCK), bytearray(BLOCK)]
        queue.read("job", [name(1), name(2)], 0, into)
        assert held.reached.acquire(timeout=30)
        assert queue.abandon("job")
        held.go.release(2)
        assert queue.drain(30)
        (job,) = queue.finished()
        assert (job.results, job.bytes) == ((MISS, MISS), 0)
        assert isinstance(job.error, CancelledError)
        assert into == [bytes(BLOCK), bytes(BLOCK)]
        assert not queue.abandon("job")


def test_a_read_that_is_abandoned_at_any_instant_writes_nothing_later(store: ChunkStore) -> None:
    numbers = range(64)
    store.put(blocks(numbers))
    ends = set()
    with ChunkQueue(store, threads=1) as queue:
        for delay in range(40):
            into = [bytearray(BLOCK) for _ in numbers]
            queue.read("job", [name(n) for n in numbers], 0, into)
            time.sleep(delay * 2e-4)
            queue.abandon("job")
            then = [bytes(one) for one in into]
            assert queue.drain(30)
            (job,) = queue.finished()
            assert into == then
            hits = job.results.count(HIT)
            assert job.results == (HIT,) * hits + (MISS,) * (len(numbers) - hits)
            assert into == [block(n) if n < hits else bytes(BLOCK) for n in numbers]
            assert isinstance(job.error, CancelledError) == (hits < len(numbers))
            ends.add(hits)
    assert len(ends) > 1


def test_a_job_behind_its_deadline_reads_no_more(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(blocks([1, 2]))
    held = Held(store, monkeypatch)
    with ChunkQueue(store, threads=1, deadline_seconds=0.2) as queue:
        into = [bytearray(BLOCK), bytearray(BLOCK)]
        queue.read("job", [name(1), name(2)], 0, into)
        time.sleep(0.3)
        held.go.release(2)
        assert queue.drain(30)
        (job,) = queue.finished()
        assert isinstance(job.error, TimeoutError)
        assert job.results == (MISS, MISS)
        assert into == [bytes(BLOCK), bytes(BLOCK)]


def test_a_job_that_fails_ends_with_its_error(opened: Opener) -> None:
    store = opened(byte_budget=4 * BLOCK)
    with ChunkQueue(store) as queue:
        queue.put("large", blocks(range(9)))
        assert queue.drain(30)
        (job,) = queue.finished()
        assert isinstance(job.error, CapacityError)
        assert job.stored == ()


def test_a_closed_queue_takes_no_more(store: ChunkStore) -> None:
    queue = ChunkQueue(store)
    queue.close()
    with pytest.raises(InvalidArgumentError, match="the queue is closed"):
        queue.put(1, blocks([1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0; expected 1 to 64"),
        ({"depth": 0}, "depth is 0; expected an integer, 1 or more"),
        ({"deadline_seconds": 0}, "deadline_seconds is 0; expected a number above 0"),
    ],
)
def test_wrong_options_of_a_queue_are_named(store: ChunkStore, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ChunkQueue(store, **options)


# Permissions, and folders that cannot be written.


def modes(folder: Path) -> tuple[set[int], set[int]]:
    everything = [folder, *folder.rglob("*")]
    return tuple(  # type: ignore[return-value]
        {path.stat().st_mode & 0o777 for path in everything if path.is_dir() == is_folder}
        for is_folder in (False, True)
    )


def test_files_are_their_owners_alone_unless_a_mode_widens_them(tmp_path: Path) -> None:
    with ChunkStore(tmp_path / "store", {}) as store:
        store.put(blocks([1]))
        there(store, [1])
        assert modes(tmp_path / "store") == ({0o600}, {0o700})
    for path in packs(store.path):
        path.unlink()
    with ChunkStore(tmp_path / "store", {}, mode="640") as store:
        store.put(blocks([2]))
        assert modes(tmp_path / "store") == ({0o640}, {0o750})


def test_a_folder_that_cannot_be_written_is_read(
    store: ChunkStore, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(blocks([1, 2, 3]))
    store.delete([name(3)])
    flip(packs(store.path)[0], FRONT)
    store.close()
    real = os.open, _core.OwnedFile, sqlite3.connect

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(store.path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real[0](path, flags, *more, **named)

    def refuse_file(path: str, flags: int, *more: Any) -> Any:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real[1](path, flags, *more)

    def connect(address: str, **options: Any) -> sqlite3.Connection:
        if "mode=rw" in address:
            raise sqlite3.OperationalError("unable to open database file")
        return real[2](address, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(_core, "OwnedFile", refuse_file)
    monkeypatch.setattr(sqlite3, "connect", connect)
    store = opened()
    assert read(store, name(2)) == block(2)
    assert read(store, name(1)) is REFUSED
    assert read(store, name(3)) is MISS
    store.touch([name(2)])
    assert store.stats()["blocks"] == 2
    with pytest.raises(StorageError, match="Read-only file system"):
        store.put(blocks([4]))
    with pytest.raises(StorageError, match="Read-only file system"):
        store.delete([name(2)])
    assert read(store, name(2)) in (MISS, block(2))


def test_a_folder_that_cannot_free_parts_of_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, ranges: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)

    monkeypatch.setattr(holes, "punch", refuse)
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot free a part of a file"):
            ChunkStore(tmp_path / "store", {})


# Commands.


def test_commands_read_a_store_of_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "store")
    for model in ("a", "b"):
        with ChunkStore(folder, {"model": model}) as store:
            store.put(blocks([1, 2]))
    assert main(["snapshot", "ls", folder]) == 0
    shown = capsys.readouterr().out
    assert '{"model": "a"}' in shown
    assert "4 blocks in 2 packs" in shown
    assert main(["snapshot", "verify", folder]) == 0
    assert "whole: every byte is what was written" in capsys.readouterr().out
    flip(packs(folder)[0], FRONT)
    assert main(["snapshot", "verify", folder, "--format", "json"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert damage["key"] == name(1).hex()
    assert main(["snapshot", "gc", folder]) == 0
    assert "0 B freed" in capsys.readouterr().out
    assert main(["snapshot", "gc", folder, "--dry-run"]) == 1
    assert main(["snapshot", "inspect", folder]) == 1
    assert "a store of blocks" in capsys.readouterr().err
    assert main(["snapshot", "reindex", folder]) == 1
    assert "is a ChunkStore; expected a DirectoryStore" in capsys.readouterr().err
