"""A directory store: what it shares, what it keeps, what it lets go, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_store import CHUNK, Author, C, files, packs, size, text

from kvpager import _core
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.stores import DirectoryStore, FileStore, SnapshotStore
from kvpager.stores.chunk_index import ChunkIndex, Place
from kvpager.stores.eviction import Held, Room, choose_victims
from kvpager.stores.lock import Hold, exclusive, in_use
from kvpager.stores.plan import MAX_PACKS, MERGED_PACKS, plan_write
from kvpager.stores.settings import parse_ttl

FRONT = 4096  # of a file that holds nothing yet
SLACK = 2048  # by which a save asks for more room than it then takes


@pytest.fixture
def author() -> Author:
    return Author()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder)


@contextlib.contextmanager
def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """A block that runs so much later."""
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() + int(seconds * 1e9))
        yield


def names(store: SnapshotStore) -> list[str]:
    return [entry.name for entry in store.entries()]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# What is saved comes back.


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 5 * C, 5 * C + 3])
def test_a_snapshot_comes_back_bit_for_bit_from_another_store_object(
    author: Author, folder: Path, length: int
) -> None:
    tokens = text(length)
    report = author.save(DirectoryStore(folder), "turn", tokens)
    reader = DirectoryStore(folder, create=False).open("turn")
    author.check(reader, tokens)
    Author().check_restored(reader, tokens)
    assert report.tokens == length
    assert report.chunks == report.chunks_written == -(-length // C)
    assert report.bytes_written == sum(
        bytes_ for file, bytes_ in files(folder).items() if file.endswith(".kvsnap")
    )
    assert report.logical_digest == reader.logical_digest
    assert report.path == reader.path


def test_the_logical_digest_is_that_of_the_same_content_in_one_file(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(3 * C + 5)
    author.save(store, "first", tokens[: 2 * C])
    report = author.save(store, "turn", tokens)
    alone = author.save(FileStore(), os.fspath(tmp_path / "alone.kvsnap"), tokens)
    assert report.logical_digest == alone.logical_digest


def test_a_snapshot_exported_to_one_file_and_imported_again_is_the_same(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(3 * C + 5)
    saved = author.save(store, "turn", tokens)
    reader = store.open("turn")
    texts = {"fingerprint": reader.fingerprint, "session": reader.session}
    FileStore(tmp_path).save("out.kvsnap", reader, **texts)
    exported = FileStore(tmp_path).open("out.kvsnap")
    author.check(exported, tokens)
    report = DirectoryStore(tmp_path / "other").save("in", exported, **texts)
    assert report.logical_digest == saved.logical_digest == exported.logical_digest
    author.check(DirectoryStore(tmp_path / "other").open("in"), tokens)


# What is shared is not written again.


def test_successive_turns_write_only_new_chunks(author: Author, store: DirectoryStore) -> None:
    tokens = text(20 * C)
    for length in range(4 * C, 20 * C, 2 * C + 3):
        before = size(store.path)
        chunks = length // C
        known = max(0, (length - 2 * C - 3) // C) if length > 4 * C else 0
        report = author.save(store, "turn", tokens[:length])
        assert report.chunks_written == chunks - known + (length % C > 0)
        assert report.bytes_shared == known * CHUNK
        grown = size(store.path) - before
        assert (chunks - known) * CHUNK <= grown
        # Two files' fronts, tables and texts beside the chunks, and a tail.
        assert report.bytes_written <= (report.chunks_written + 1) * (CHUNK + 600) + 3 * FRONT
        author.check(store.open("turn"), tokens[:length])


def test_a_save_that_adds_nothing_but_a_tail_writes_only_a_manifest(
    author: Author, store: DirectoryStore
) -> None:
    tokens = text(6 * C + 5)
    author.save(store, "turn", tokens[: 6 * C])
    before = packs(store.path)
    report = author.save(store, "turn", tokens)
    assert packs(store.path) == before
    assert report.chunks_written == 1
    assert report.bytes_written == Path(report.path).stat().st_size < 2 * FRONT + CHUNK


def test_sessions_with_a_common_beginning_share_its_chunks(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(8 * C, seed=1)
    for n in range(4):
        author.save(store, f"s{n}", text(10 * C, seed=2 + n, start=prompt))
    stats = store.stats()
    assert stats["chunks"] == stats["chunks_needed"] == 8 + 4 * 2
    assert stats["chunks_referenced"] == 4 * 10
    assert stats["dedupe_ratio"] == 40 / 16
    shared = {entry.name: entry.bytes_shared for entry in store.entries()}
    assert all(8 * CHUNK < each < 9 * (CHUNK + 600) + FRONT for each in shared.values())
    own = {entry.name: entry.bytes_own for entry in store.entries()}
    assert all(2 * CHUNK < each < 2 * CHUNK + 3 * FRONT for each in own.values())


def test_equal_tokens_under_another_salt_or_fingerprint_share_nothing(
    author: Author, store: DirectoryStore
) -> None:
    tokens = text(4 * C)
    for n, other in enumerate([author, Author(salt="tenant"), Author(fingerprint="another")]):
        assert other.save(store, f"s{n}", tokens).bytes_shared == 0


def test_a_snapshot_of_very_many_turns_never_needs_many_packs(
    author: Author, store: DirectoryStore
) -> None:
    turns = MAX_PACKS + 3 * MERGED_PACKS
    tokens = text((turns + 1) * C)
    written = 0
    for turn in range(1, turns + 1):
        written += author.save(store, "turn", tokens[: turn * C]).chunks_written
        assert len(store.open("turn").packs) <= MAX_PACKS
    author.check(store.open("turn"), tokens[: turns * C])
    assert written <= 3 * turns  # merging copies each chunk a logarithm of times
    assert len(packs(store.path)) <= MAX_PACKS  # what was merged is gone


# Names.


@pytest.mark.parametrize("name", ["a", "0", "planner-7.turn_2", "x" * 200, "a.json", "b.kvsnap"])
def test_names_of_letters_digits_dots_and_dashes_are_taken(
    author: Author, store: DirectoryStore, name: str
) -> None:
    author.save(store, name, text(C))
    assert names(store) == [name]
    author.check(store.open(name), text(C))


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "../a", "a b", "ä", "x" * 201, "a\n", None, 3]
)
def test_any_other_name_is_refused_by_every_call(
    author: Author, store: DirectoryStore, name: Any
) -> None:
    before = files(store.path)
    calls: list[Callable[[], object]] = [
        lambda: author.save(store, name, text(C)),
        lambda: store.open(name),
        lambda: store.delete(name),
        lambda: store.pin(name),
        lambda: store.unpin(name),
        lambda: store.set_ttl(name, 1),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="name is"):
            call()
    assert files(store.path) == before


def test_a_missing_name_is_an_error_that_says_what_was_meant(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "planner", text(C))
    for call in (store.open, store.delete, store.pin):
        with pytest.raises(StorageError, match="no snapshot 'planer'; did you mean 'planner'"):
            call("planer")


# The folder.


def test_a_missing_folder_is_made_or_refused_as_asked(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no store here"):
        DirectoryStore(tmp_path / "a" / "b", create=False)
    assert not (tmp_path / "a").exists()
    DirectoryStore(tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "lock",
        "packs",
        "snapshots",
        "store.json",
    ]


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("draft")
    with pytest.raises(InvalidArgumentError, match=r"not empty \(it has 'thesis.tex'\)"):
        DirectoryStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=os.strerror(errno.ENOTDIR)):
        DirectoryStore(tmp_path / "file")


def test_a_creation_that_was_interrupted_is_finished_by_the_next(
    author: Author, folder: Path
) -> None:
    (folder / "packs").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / ".kvsnap-0123456789abcdef.tmp").write_text('{"kvp')
    store = DirectoryStore(folder)
    author.save(store, "turn", text(C))
    assert store.gc().temporaries == 0  # the save has swept it
    assert not (folder / ".kvsnap-0123456789abcdef.tmp").exists()


def test_a_store_of_a_newer_version_is_refused_by_name(store: DirectoryStore) -> None:
    Path(store.path, "store.json").write_text('{"kvpager_store": 2}')
    with pytest.raises(UnsupportedVersionError, match="kvpager_store is 2, this version knows 1"):
        DirectoryStore(store.path)
    with pytest.raises(UnsupportedVersionError, match="kvpager_store is 2"):
        store.entries()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"kvpager_store": 0}', '{"kvpager_store": "1"}', "{}"]
    + ['{"kvpager_store": 1, "byte_budget": ' + value + "}" for value in ('"5"', "-1", "1.5")]
    + ['{"kvpager_store": 1, "ttl_seconds": ' + value + "}" for value in ('"5"', "-1", "NaN")],
)
def test_damaged_settings_are_refused_by_name(store: DirectoryStore, content: str) -> None:
    Path(store.path, "store.json").write_text(content)
    with pytest.raises(CorruptSnapshotError, match=r"store\.json"):
        DirectoryStore(store.path)


def test_settings_are_kept_until_others_are_given(folder: Path) -> None:
    first = DirectoryStore(folder, byte_budget="1MiB", ttl="7d")
    assert (first.byte_budget, first.ttl_seconds) == (2**20, 7 * 86400)
    again = DirectoryStore(folder)
    assert (again.byte_budget, again.ttl_seconds) == (2**20, 7 * 86400)
    DirectoryStore(folder, byte_budget=5_000_000)
    assert (first.byte_budget, first.ttl_seconds) == (5_000_000, 7 * 86400)
    DirectoryStore(folder, byte_budget="unlimited", ttl="never")
    assert (first.byte_budget, first.ttl_seconds) == (None, None)
    assert json.loads((folder / "store.json").read_text()) == {
        "kvpager_store": 1,
        "byte_budget": None,
        "ttl_seconds": None,
    }


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (1.5, 1.5), ("90s", 90), ("90", 90), ("1.5h", 5400), ("30m", 1800), ("2w", 1209600)],
)
def test_a_time_to_live_is_seconds_or_a_duration(given: Any, seconds: float) -> None:
    assert parse_ttl("ttl", given) == seconds


@pytest.mark.parametrize("given", [-1, math.nan, math.inf, True, "", "d", "7 days", "7D", [7]])
def test_any_other_time_to_live_is_refused_before_anything_is_made(
    folder: Path, given: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match="ttl is"):
        DirectoryStore(folder, ttl=given)
    with pytest.raises(InvalidArgumentError, match="byte_budget is"):
        DirectoryStore(folder, byte_budget="lots")
    assert not folder.exists()


def test_a_file_system_without_flock_is_named_as_the_cause(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError, match=r"needs a file system with flock\(\)"):
        store.entries()


def test_a_store_that_may_only_be_read_is_read(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "turn", text(3 * C))

    def refuse(what: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if writes(*args):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])
            return what(*args, **more)

        return call

    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    monkeypatch.setattr(os, "open", refuse(os.open, lambda _, flags, *__: bool(flags & writing)))
    monkeypatch.setattr(os, "utime", refuse(os.utime, lambda *_: True))
    author.check(store.open("turn"), text(3 * C))
    assert names(store) == ["turn"]
    assert store.find_prefix(author.hashes(text(3 * C))) is not None


# Locks.


def test_in_use_sees_holds_of_this_process_and_none_once_released(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "file")
    Path(path).touch()
    assert not in_use(path)
    with Hold() as first, Hold() as second:
        first.add([path])
        second.add([path])
        assert in_use(path)
        first.release()
        assert in_use(path)
        second.release()
        assert not in_use(path)
    assert not in_use(os.fspath(tmp_path / "missing"))


def test_a_forked_child_does_not_go_on_holding_the_lock(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "lock")
    read, write = os.pipe()
    with exclusive(path):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
    assert not in_use(path)  # though the child has a copy of the descriptor
    os.write(write, b".")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)


# The plan.


def test_a_plan_takes_the_fewest_packs_and_merges_the_smallest_when_there_are_too_many() -> None:
    index = ChunkIndex()
    hashes = [bytes([n]) * 16 for n in range(100)]
    for n in range(80):
        index.add(f"{n:032x}", hashes[n : n + 1], hashes[n : n + 1])
    index.add("f" * 32, hashes[70:80], hashes[70:80])  # has the last ten of them together
    plan = plan_write(hashes, hashes, index.places)
    assert {plan.shared[n].pack for n in range(70, 80)} == {"f" * 32}
    assert len(plan.shared_packs) + 1 == MERGED_PACKS
    assert set(plan.write) | set(plan.shared) == set(range(100))
    assert not set(plan.write) & set(plan.shared)
    few = plan_write(hashes[:63], hashes[:63], index.places)
    assert few.write == ()
    assert few.shared[5] == Place(f"{5:032x}", 0)


def test_the_index_knows_every_copy_until_its_pack_goes() -> None:
    index = ChunkIndex()
    index.add("a", [b"h1", b"h2"], [b"c1", b"c2"])
    index.add("b", [b"h2", b"h2"], [b"c2", b"other"])
    assert index.places(b"h2", b"c2") == [Place("a", 1), Place("b", 0)]
    assert index.places(b"h1", b"c2") == []
    index.discard("a", [b"h1", b"h2"], [b"c1", b"c2"])
    assert index.places(b"h2", b"c2") == [Place("b", 0)]
    assert index.places(b"h1", b"c1") == []


def room(needed: int, budget: int, packs: dict[str, int], held: list[Held], **more: Any) -> Room:
    total = sum(packs.values()) + sum(each.bytes for each in held)
    busy = more.pop("busy", ())
    return Room(needed, total, budget, packs, frozenset(more.pop("wanted", ())), busy.__contains__)


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    packs = {"p": 100, "q": 100, "shared": 100}
    held = [
        Held("old", 10, ("p",), 1),
        Held("older", 10, ("shared",), 0),
        Held("new", 10, ("q", "shared"), 2),
    ]
    assert choose_victims(held, room(0, 330, packs, held)) == []
    assert choose_victims(held, room(10, 330, packs, held)) == ["older"]
    # `older` frees its manifest alone, since `new` shares its pack: then it can stay as well.
    assert choose_victims(held, room(100, 330, packs, held)) == ["old"]
    assert choose_victims(held, room(120, 330, packs, held)) == ["older", "old"]
    assert choose_victims(held, room(330, 330, packs, held)) == ["older", "old", "new"]


def test_pinned_ones_packs_in_use_and_packs_that_are_wanted_stay() -> None:
    packs = {"p": 100, "q": 100, "r": 100}
    held = [
        Held("pinned", 10, ("p",), 0, "pinned"),
        Held("busy", 10, ("q",), 1),
        Held("free", 10, ("r",), 2),
    ]
    assert choose_victims(held, room(50, 330, packs, held, busy=["q"])) == ["free"]
    with pytest.raises(CapacityError) as refused:
        choose_victims(held, room(150, 330, packs, held, busy=["q"]))
    for part in ("byte_budget is 330", "150 bytes are needed", "take 330", "of which 110 may go"):
        assert part in str(refused.value)
    assert "pinned: pinned" in str(refused.value)
    assert "open elsewhere: busy" in str(refused.value)
    # What is about to be written needs r, so that evicting `free` frees its manifest alone.
    assert choose_victims(held, room(10, 330, packs, held, wanted=["r"], busy=["r"])) == ["busy"]


# The budget.


def fill(author: Author, store: DirectoryStore, count: int, chunks: int = 4) -> None:
    for n in range(count):
        author.save(store, f"s{n}", text(chunks * C, seed=n))


def one(author: Author, tmp_path: Path, chunks: int = 4) -> int:
    """Bytes that a snapshot of so many chunks takes."""
    store = DirectoryStore(tmp_path / "measured")
    author.save(store, "s0", text(chunks * C))
    return size(store.path)


def test_the_least_recently_used_snapshot_makes_room(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    each = one(author, tmp_path)
    store = DirectoryStore(folder, byte_budget=4 * each + SLACK)
    fill(author, store, 4)
    assert names(store) == ["s0", "s1", "s2", "s3"]
    store.open("s0")
    author.save(store, "s4", text(4 * C, seed=4))
    assert names(store) == ["s0", "s2", "s3", "s4"]
    assert size(folder) <= 4 * each + SLACK
    with pytest.raises(StorageError, match="no snapshot 's1'"):
        store.open("s1")
    author.check(store.open("s0"), text(4 * C, seed=0))


def test_a_find_of_a_prefix_counts_as_a_use(author: Author, tmp_path: Path, folder: Path) -> None:
    store = DirectoryStore(folder, byte_budget=3 * one(author, tmp_path) + SLACK)
    fill(author, store, 3)
    assert store.find_prefix(author.hashes(text(4 * C, seed=0))) is not None
    author.save(store, "s3", text(4 * C, seed=3))
    assert names(store) == ["s0", "s2", "s3"]


def test_pinned_snapshots_stay_and_what_cannot_fit_is_refused_by_the_byte(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    each = one(author, tmp_path)
    store = DirectoryStore(folder, byte_budget=3 * each + SLACK)
    fill(author, store, 3)
    for n in range(3):
        store.pin(f"s{n}")
    before = files(folder)
    with pytest.raises(CapacityError) as refused:
        author.save(store, "s3", text(4 * C, seed=3))
    assert f"byte_budget is {3 * each + SLACK}" in str(refused.value)
    assert "pinned: s0, s1, s2" in str(refused.value)
    assert files(folder) == before
    store.unpin("s1")
    author.save(store, "s3", text(4 * C, seed=3))
    assert names(store) == ["s0", "s2", "s3"]


def test_a_pin_and_a_time_to_live_go_over_to_the_next_turn(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(2 * C))
    store.pin("turn")
    store.set_ttl("turn", "1h")
    author.save(store, "turn", text(3 * C))
    (entry,) = store.entries()
    assert (entry.pinned, entry.ttl_seconds, entry.tokens) == (True, 3600, 3 * C)


def test_a_snapshot_that_somebody_reads_is_not_evicted(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    store = DirectoryStore(folder, byte_budget=2 * one(author, tmp_path) + SLACK)
    fill(author, store, 2)
    readers = [store.open("s0"), store.open("s1")]
    before = files(folder)
    with pytest.raises(CapacityError, match="open elsewhere: s0, s1"):
        author.save(store, "s2", text(4 * C, seed=2))
    assert files(folder) == before
    author.check(readers.pop(), text(4 * C, seed=1))
    author.save(store, "s2", text(4 * C, seed=2))
    assert names(store) == ["s0", "s2"]
    author.check(readers.pop(), text(4 * C, seed=0))


def test_a_snapshot_may_grow_turn_by_turn_while_an_older_turn_of_it_is_being_read(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    """As a restored session does, which reads lazily for as long as it lives."""
    tokens = text(40 * C)
    store = DirectoryStore(folder, byte_budget=2 * one(author, tmp_path, chunks=20))
    author.save(store, "turn", tokens[: 4 * C])
    reader = store.open("turn")
    for turn in range(5, 16):
        author.save(store, "turn", tokens[: turn * C])
        author.save(store, "other", text(4 * C, seed=turn))
    author.check(reader, tokens[: 4 * C])
    author.check(store.open("turn"), tokens[: 15 * C])


def test_the_snapshot_being_replaced_stays_when_the_new_one_does_not_fit(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    store = DirectoryStore(folder, byte_budget=one(author, tmp_path) + SLACK)
    author.save(store, "s0", text(4 * C))
    with pytest.raises(CapacityError, match="kept until this is done: s0"):
        author.save(store, "s0", text(4 * C, seed=9))
    author.check(store.open("s0"), text(4 * C))


def test_a_smaller_budget_evicts_at_once_or_is_refused(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    each = one(author, tmp_path)
    store = DirectoryStore(folder)
    fill(author, store, 4)
    store.pin("s0")
    DirectoryStore(folder, byte_budget=2 * each + SLACK)
    assert names(store) == ["s0", "s3"]
    with pytest.raises(CapacityError, match="pinned: s0"):
        DirectoryStore(folder, byte_budget=each // 2)
    assert store.byte_budget == 2 * each + SLACK
    assert names(store) == ["s0", "s3"]


# Time to live.


def test_an_expired_snapshot_is_invisible_and_goes_with_the_next_save_or_gc(
    author: Author, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(folder, ttl="1h")
    fill(author, store, 4)
    store.pin("s0")
    store.set_ttl("s1", "never")
    store.set_ttl("s2", "2h")
    with later(monkeypatch, 5400):
        assert names(store) == ["s0", "s1", "s2"]
        with pytest.raises(StorageError, match="the time to live is over of snapshot 's3'"):
            store.open("s3")
        assert store.find_prefix(author.hashes(text(4 * C, seed=3))) is None
        assert "snapshots/s3.kvsnap" in files(folder)
        store.open("s2")  # a use: its two hours begin again
    with later(monkeypatch, 5400 + 3600):
        report = store.gc()
        assert report.expired == ("s3",)
        assert report.packs_removed == 1
        assert report.bytes_freed > 4 * CHUNK
        assert names(store) == ["s0", "s1", "s2"]
    with later(monkeypatch, 5400 + 7300):
        store.set_ttl("s1", None)
        author.save(store, "s4", text(C, seed=4))
        assert names(store) == ["s0", "s4"]


def test_when_and_how_a_snapshot_was_used_is_listed(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.time() - 1
    report = author.save(store, "turn", text(2 * C + 1))
    with later(monkeypatch, 100):
        store.open("turn")
    store.set_ttl("turn", 50)
    (entry,) = store.entries() or [None]
    assert entry is not None
    assert before < entry.created < time.time() + 1
    assert before + 99 < entry.last_used < time.time() + 101
    assert (entry.tokens, entry.chunks, entry.pinned, entry.ttl_seconds, entry.error) == (
        *(2 * C + 1, 3, False, 50, None),
    )
    assert entry.logical_digest == report.logical_digest


# Deleting.


def test_deleting_removes_what_only_that_snapshot_needed(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(4 * C, seed=7)
    author.save(store, "a", prompt)
    author.save(store, "b", text(8 * C, seed=8, start=prompt))
    author.save(store, "c", text(4 * C, seed=9))
    with_a_and_b = size(store.path)
    store.delete("c")
    assert len(packs(store.path)) == 2
    assert size(store.path) < with_a_and_b - 4 * CHUNK
    store.delete("a")
    assert len(packs(store.path)) == 2  # b needs both
    author.check(store.open("b"), text(8 * C, seed=8, start=prompt))
    store.delete("b")
    assert files(store.path) == {}


def test_what_only_a_replaced_snapshot_needed_goes_with_it(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(4 * C, seed=1))
    author.save(store, "turn", text(4 * C, seed=2))
    assert len(packs(store.path)) == 1
    author.check(store.open("turn"), text(4 * C, seed=2))


def test_a_pinned_snapshot_is_not_deleted(author: Author, store: DirectoryStore) -> None:
    author.save(store, "turn", text(C))
    store.pin("turn")
    with pytest.raises(InvalidArgumentError, match="'turn' is pinned; unpin it first"):
        store.delete("turn")
    store.unpin("turn")
    store.delete("turn")
    assert names(store) == []


def test_a_reader_reads_on_when_its_snapshot_is_deleted_and_gc_has_run(
    author: Author, store: DirectoryStore
) -> None:
    tokens = text(5 * C + 3)
    author.save(store, "turn", tokens)
    reader = store.open("turn")
    store.delete("turn")
    store.gc()
    assert len(packs(store.path)) == 1  # held by the reader
    author.check(reader, tokens)
    del reader
    assert store.gc().packs_removed == 1
    assert files(store.path) == {}


# Garbage.


def test_gc_sweeps_what_a_dead_writer_left_and_nothing_a_live_one_writes(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(2 * C))
    kept = files(store.path)
    content = author.content(text(C))
    alive = _core.SnapshotWriter(f"{store.path}/packs/{'a' * 32}.kvsnap", content.layout, 9000)
    Path(store.path, "packs", ".kvsnap-00ff.tmp").write_bytes(b"x" * 1000)
    Path(store.path, "snapshots", ".kvsnap-00fe.tmp").write_bytes(b"x" * 500)
    Path(store.path, "snapshots", "gone.json").write_text('{"pinned": true, "ttl_seconds": null}')
    Path(store.path, "packs", f"{'b' * 32}.damaged").write_text("[1]")
    report = store.gc()
    assert (report.temporaries, report.sidecars) == (2, 2)
    assert report.bytes_freed == 1500 + len('{"pinned": true, "ttl_seconds": null}') + len("[1]")
    assert sum(files(store.path).values()) == sum(kept.values()) + 9000
    alive.discard()
    assert files(store.path) == kept


def test_a_pack_that_no_snapshot_needs_is_swept_but_not_one_that_is_held(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(2 * C))
    Path(store.path, "snapshots", "turn.kvsnap").unlink()  # as after a crash before it was there
    Path(store.path, "snapshots", "turn.json").unlink()
    (pack,) = packs(store.path)
    with Hold() as hold:
        hold.add([os.fspath(pack)])
        assert store.gc().packs_removed == 0
    assert store.gc().packs_removed == 1
    assert files(store.path) == {}


def sparse(author: Author, store: DirectoryStore) -> list[int]:
    """A store whose first pack is needed in one part of eight; the tokens of what needs it."""
    prompt = text(C, seed=1)
    author.save(store, "long", text(8 * C, seed=2, start=prompt))
    tokens = text(3 * C + 5, seed=3, start=prompt)
    author.save(store, "short", tokens)
    store.delete("long")
    return tokens


def test_gc_copies_what_is_needed_of_a_sparse_pack_and_frees_the_rest(
    author: Author, store: DirectoryStore
) -> None:
    tokens = sparse(author, store)
    (before,) = store.entries()
    bytes_before = size(store.path)
    old = set(packs(store.path))
    seen: list[tuple[int, int]] = []
    report = store.gc(lambda done, total: seen.append((done, total)))
    assert (report.packs_compacted, report.chunks_moved) == (1, 1)
    assert report.bytes_freed == bytes_before - size(store.path) > 6 * CHUNK
    assert len(set(packs(store.path)) & old) == 1
    assert seen
    assert all(0 <= done <= total for done, total in seen)
    (after,) = store.entries()
    assert (after.logical_digest, after.created) == (before.logical_digest, before.created)
    assert after.last_used == before.last_used
    author.check(store.open("short"), tokens)
    assert store.gc().bytes_freed == 0


def test_compaction_leaves_a_reader_its_bytes_and_finishes_when_it_is_done(
    author: Author, store: DirectoryStore
) -> None:
    tokens = sparse(author, store)
    reader = store.open("short")
    report = store.gc()
    assert report.packs_compacted == 0
    assert [why for _, why in report.skipped] == ["in use"]
    author.check(reader, tokens)
    author.check(store.open("short"), tokens)
    del reader
    assert store.gc().packs_removed == 1


def test_compaction_that_has_no_room_is_skipped_and_says_so(
    author: Author, store: DirectoryStore
) -> None:
    tokens = sparse(author, store)
    DirectoryStore(store.path, byte_budget=size(store.path) + 100)
    report = store.gc()
    assert report.packs_compacted == 0
    assert "no room within the budget" in report.skipped[0][1]
    author.check(store.open("short"), tokens)


def test_a_progress_callback_that_raises_stops_a_save_or_a_gc_and_leaves_nothing(
    author: Author, store: DirectoryStore
) -> None:
    def stop(done: int, total: int) -> None:
        raise TimeoutError("enough")

    tokens = sparse(author, store)
    before = files(store.path)
    with pytest.raises(TimeoutError, match="enough"):
        store.gc(stop)
    with pytest.raises(TimeoutError, match="enough"):
        author.save(store, "short", text(4 * C, seed=5), progress=stop)
    with pytest.raises(TimeoutError, match="enough"):
        author.save(store, "new", tokens, progress=stop)  # which writes a manifest alone
    assert files(store.path) == before


def test_chunks_that_two_writers_saved_at_once_are_kept_once_after_gc(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(6 * C)
    other = Author()
    others = DirectoryStore(store.path)

    def meanwhile(done: int, total: int) -> None:
        if done == total and names(store) == []:
            other.save(others, "b", tokens)

    author.save(store, "a", tokens, progress=meanwhile)
    assert len(packs(store.path)) == 2
    report = store.gc()
    assert report.packs_removed == 1
    assert report.bytes_freed > 6 * CHUNK
    assert len(packs(store.path)) == 1
    for name in ("a", "b"):
        author.check(store.open(name), tokens)


# Damage.


def damage(store: DirectoryStore, pack: Path, kind: str) -> None:
    if kind == "truncated":
        os.truncate(pack, pack.stat().st_size - 1)
    elif kind == "zeros":
        pack.write_bytes(bytes(pack.stat().st_size))
    elif kind == "header":
        flip(pack, 30)
    elif kind == "missing":
        pack.unlink()


@pytest.mark.parametrize("kind", ["truncated", "zeros", "header", "missing"])
@pytest.mark.parametrize("fresh", [False, True], ids=["known before", "found so"])
def test_a_damaged_pack_breaks_its_own_snapshots_and_no_others(
    author: Author, store: DirectoryStore, kind: str, fresh: bool
) -> None:
    author.save(store, "bad", text(4 * C, seed=1))
    (pack,) = packs(store.path)
    author.save(store, "good", text(4 * C, seed=2))
    damage(store, pack, kind)
    if fresh:
        store = DirectoryStore(store.path)
    entries = {entry.name: entry.error for entry in store.entries()}
    assert entries["good"] is None
    assert entries["bad"] is not None
    assert pack.name in entries["bad"]
    with pytest.raises((CorruptSnapshotError, StorageError), match=pack.name):
        store.open("bad")
    assert store.find_prefix(author.hashes(text(4 * C, seed=1))) is None
    author.check(store.open("good"), text(4 * C, seed=2))
    report = store.gc()
    assert any(pack.name in why for _, why in report.damaged)
    assert pack.exists() == (kind != "missing")
    # The same chunks are written again, and the name is whole again.
    again = author.save(store, "again", text(4 * C, seed=1))
    assert again.chunks_written == 4
    author.check(store.open("again"), text(4 * C, seed=1))
    removed = dict(store.gc(remove_damaged=True).damaged_removed)
    assert f"{store.path}/snapshots/bad.kvsnap" in removed
    assert not pack.exists()
    assert names(store) == ["again", "good"]
    assert store.gc().damaged == ()


@pytest.mark.parametrize("kind", ["truncated", "zeros", "header"])
def test_a_damaged_manifest_is_kept_and_listed_and_so_are_the_packs_it_may_need(
    author: Author, store: DirectoryStore, kind: str
) -> None:
    author.save(store, "bad", text(4 * C, seed=1))
    author.save(store, "good", text(4 * C, seed=2))
    manifest = Path(store.path, "snapshots", "bad.kvsnap")
    damage(store, manifest, kind)
    assert [(e.name, e.error is None) for e in store.entries()] == [("bad", False), ("good", True)]
    with pytest.raises(CorruptSnapshotError, match=r"bad\.kvsnap"):
        store.open("bad")
    report = store.gc()
    assert [Path(path).name for path, _ in report.damaged] == ["bad.kvsnap"]
    assert len(packs(store.path)) == 2
    # Its chunks are still good to share, and a new snapshot takes the name.
    assert author.save(store, "other", text(4 * C, seed=1)).chunks_written == 0
    author.check(store.open("other"), text(4 * C, seed=1))
    report = store.gc(remove_damaged=True)
    assert [Path(path).name for path, _ in report.damaged_removed] == ["bad.kvsnap"]
    assert names(store) == ["good", "other"]


def test_under_a_budget_packs_of_a_damaged_manifest_go_before_sound_snapshots(
    author: Author, tmp_path: Path, folder: Path
) -> None:
    store = DirectoryStore(folder, byte_budget=3 * one(author, tmp_path) + SLACK)
    fill(author, store, 3)
    damage(store, folder / "snapshots" / "s1.kvsnap", "zeros")
    author.save(store, "s3", text(3 * C, seed=3))
    assert names(store) == ["s0", "s1", "s2", "s3"]
    for name, seed, chunks in (("s0", 0, 4), ("s2", 2, 4), ("s3", 3, 3)):
        author.check(store.open(name), text(chunks * C, seed=seed))
    assert (folder / "snapshots" / "s1.kvsnap").exists()


def test_a_manifest_that_only_cannot_be_read_now_loses_no_pack(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "s0", text(4 * C, seed=0))
    author.save(store, "s1", text(4 * C, seed=1))
    fresh = DirectoryStore(store.path)
    _core.arm_fault("snapshot.read", 1, errno.EIO)
    report = fresh.gc(remove_damaged=True)
    _core.disarm_faults()
    assert report.damaged_removed == ()
    assert report.packs_removed == 0
    assert [e.error for e in store.entries()] == [None, None]
    for n in range(2):
        author.check(fresh.open(f"s{n}"), text(4 * C, seed=n))


def test_a_pack_stays_that_a_manifest_may_need_which_cannot_be_read_now(
    author: Author, store: DirectoryStore, tmp_path: Path
) -> None:
    tokens = text(4 * C)
    author.save(store, "a", tokens)
    author.save(store, "b", tokens + text(2 * C, seed=1))
    unread = 0
    for visit in range(12):
        copy = tmp_path / f"copy-{visit}"
        shutil.copytree(store.path, copy)
        fresh = DirectoryStore(copy)
        _core.arm_fault("snapshot.read", visit, errno.EIO)
        with contextlib.suppress(StorageError):
            fresh.delete("b")
        _core.disarm_faults()
        unread += len(packs(copy)) == 2  # b's own pack stayed with the shared one, to be safe
        author.check(fresh.open("a"), tokens)
        fresh.gc()
        author.check(fresh.open("a"), tokens)
        assert len(packs(copy)) == 1
    assert unread


def test_a_flipped_payload_bit_is_found_remembered_and_healed_by_the_next_save(
    author: Author, store: DirectoryStore
) -> None:
    tokens = text(6 * C)
    author.save(store, "a", tokens)
    author.save(store, "b", tokens[: 5 * C])
    (pack,) = packs(store.path)
    flip(pack, FRONT + 3 * CHUNK + 100)
    assert [e.error for e in store.entries()] == [None, None]  # payload is not read for a list
    found = store.verify("a")
    assert [(chunk, layer) for chunk, layer, _ in found] == [(3, 0)]
    for entry in store.entries():
        assert entry.error is not None
        assert "chunks [3]" in entry.error
    assert store.stats()["damaged"] == 2
    prefix = store.find_prefix(author.hashes(tokens))
    assert prefix is not None
    author.check(prefix, tokens[: 3 * C])  # what comes before it
    report = author.save(store, "a", tokens)
    assert report.chunks_written == 1
    author.check(store.open("a"), tokens)
    assert len(store.gc().damaged) == 0  # which points b to the good copy
    author.check(store.open("b"), tokens[: 5 * C])
    assert [e.error for e in DirectoryStore(store.path).entries()] == [None, None]


def test_reporting_a_chunk_that_is_whole_changes_nothing(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "a", text(3 * C + 1))
    before = files(store.path)
    reader = store.open("a")
    assert [store.report_damage(reader, chunk) for chunk in range(-1, 5)] == [0] * 6
    assert files(store.path) == before


def test_compaction_that_meets_damage_stops_and_remembers_it(
    author: Author, store: DirectoryStore
) -> None:
    sparse(author, store)
    pack = max(packs(store.path), key=lambda path: path.stat().st_size)
    flip(pack, FRONT + 100)  # the one chunk that is needed of it
    before = packs(store.path)
    report = store.gc()
    assert report.packs_compacted == 0
    assert packs(store.path) == before
    (entry,) = store.entries()
    assert entry.error is not None
    assert pack.name in entry.error
    assert store.gc().skipped == ()  # left alone until its chunk is whole again


def test_unreadable_notes_are_taken_for_a_pin(author: Author, store: DirectoryStore) -> None:
    author.save(store, "turn", text(C))
    Path(store.path, "snapshots", "turn.json").write_text("{")
    (entry,) = store.entries()
    assert entry.pinned
    assert entry.error is not None
    assert "turn.json" in entry.error
    store.unpin("turn")
    (entry,) = store.entries()
    assert (entry.pinned, entry.error) == (False, None)


def test_other_files_in_the_folders_are_counted_and_left_alone(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(C))
    for other in ("packs/README", "packs/abc.kvsnap", "snapshots/notes.txt", "snapshots/-.kvsnap"):
        Path(store.path, other).write_bytes(b"1234567")
    report = store.gc(remove_damaged=True)
    assert report.bytes_freed == 0
    assert store.stats()["bytes"] == size(store.path)
    assert len(files(store.path)) == 3 + 4
    assert names(store) == ["turn"]


# Prefixes.


def test_the_longest_known_prefix_is_found_among_all_snapshots(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(4 * C, seed=1)
    for name, length in (("a", 6), ("b", 9), ("c", 12)):
        author.save(store, name, text(length * C + 3, seed=length, start=prompt))
    wanted = text(9 * C + 3, seed=9, start=prompt)[: 8 * C] + text(5 * C, seed=77)
    found = store.find_prefix(author.hashes(wanted))
    assert found is not None
    author.check(found, wanted[: 8 * C])
    Author().check_restored(found, wanted[: 8 * C])
    assert store.find_prefix(author.hashes(text(4 * C, seed=99))) is None
    assert store.find_prefix([]) is None
    shorter = store.find_prefix(author.hashes(prompt[: 3 * C + 5]))
    assert shorter is not None
    author.check(shorter, prompt[: 3 * C])


@pytest.mark.parametrize("ttl", ["never", "7d"])
def test_a_look_up_lists_folders_only_where_it_must_and_always_finds_what_others_saved(
    author: Author, folder: Path, monkeypatch: pytest.MonkeyPatch, ttl: str
) -> None:
    store, other = DirectoryStore(folder, ttl=ttl), DirectoryStore(folder)
    hashes = author.hashes(text(8 * C, seed=1))
    author.save(store, "a", text(4 * C, seed=1))
    time.sleep(0.15)  # until the folders' time can be told from that of a change
    assert store.find_prefix(hashes) is not None
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert store.find_prefix(hashes) is not None
    assert bool(listed) == (ttl != "never")
    author.save(other, "b", text(6 * C, seed=1))
    found = store.find_prefix(hashes)
    assert found is not None
    assert found.sealed_chunks == 6
    other.delete("b")
    found = store.find_prefix(hashes)
    assert found is not None
    assert found.sealed_chunks == 4


def test_folders_that_changed_just_now_are_listed_again(
    author: Author, store: DirectoryStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "a", text(4 * C, seed=1))
    changed = max((folder / part).stat().st_mtime_ns for part in ("packs", "snapshots"))
    monkeypatch.setattr(time, "time_ns", lambda: changed + 1_000_000)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    for _ in range(2):
        listed.clear()
        store.find_prefix([])
        assert listed


def test_a_prefix_never_crosses_salts_or_fingerprints(store: DirectoryStore) -> None:
    tokens = text(6 * C)
    authors = [
        Author(fingerprint=model, salt=salt) for model in ("a", "b") for salt in ("", "tenant")
    ]
    for n, author in enumerate(authors):
        for other in authors[n:]:
            assert store.find_prefix(other.hashes(tokens)) is None
        author.save(store, f"s{n}", tokens)
    for author in authors:
        found = store.find_prefix(author.hashes(tokens))
        assert found is not None
        assert json.loads(found.fingerprint) == author.pager.fingerprint
        author.check_restored(found, tokens)


def test_a_deleted_snapshot_serves_no_prefix_though_its_pack_is_still_there(
    author: Author, store: DirectoryStore
) -> None:
    prompt = text(2 * C, seed=1)
    long = text(8 * C, seed=2, start=prompt)
    author.save(store, "long", long)
    author.save(store, "short", text(3 * C, seed=3, start=prompt))
    store.delete("long")
    assert len(packs(store.path)) == 2
    found = store.find_prefix(author.hashes(long))
    assert found is not None
    author.check(found, prompt)


def test_a_found_prefix_outlives_its_snapshot(author: Author, store: DirectoryStore) -> None:
    tokens = text(5 * C)
    author.save(store, "turn", tokens)
    found = store.find_prefix(author.hashes(tokens))
    assert found is not None
    store.delete("turn")
    store.gc()
    author.check(found, tokens)


# The file store.


def test_a_file_store_keeps_whole_files_under_paths(author: Author, tmp_path: Path) -> None:
    store: SnapshotStore = FileStore(tmp_path)
    tokens = text(2 * C + 3)
    report = author.save(store, "a.kvsnap", tokens)
    assert report.bytes_written == (tmp_path / "a.kvsnap").stat().st_size
    assert report.chunks_written == report.chunks == 3
    author.check(store.open("a.kvsnap"), tokens)
    author.check(FileStore().open(os.fspath(tmp_path / "a.kvsnap")), tokens)
    assert store.find_prefix(author.hashes(tokens)) is None
    (tmp_path / "b.kvsnap").write_bytes(b"no snapshot")
    a, b = store.entries()
    assert (a.name, a.tokens, a.error, a.logical_digest) == (
        *("a.kvsnap", len(tokens), None, report.logical_digest),
    )
    assert b.error is not None
    assert "b.kvsnap" in b.error
    store.delete("a.kvsnap")
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        store.delete("a.kvsnap")


def test_a_file_store_without_a_folder_has_nothing_to_list(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"entries\(\) needs FileStore\(folder\)"):
        FileStore().entries()
    with pytest.raises(StorageError, match=os.strerror(errno.ENOENT)):
        FileStore(tmp_path / "missing").entries()
    with pytest.raises(InvalidArgumentError, match="name is empty"):
        FileStore().open("")
