"""Which snapshots of a directory store go, and when: plans, budgets, times to live, deleting."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, cast

import pytest
from small_store import CHUNK, SLACK, Author, C, files, fill, names, one, packs, size, text

from kvpager.errors import CapacityError, InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore
from kvpager.stores.budget import EvictionCandidate, Room, choose_victims
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.sharing import MERGED_PACKS, plan_write, shared_runs
from kvpager.stores.tables import Hashes, Pack, PackChunk, Run, Stamp


@contextlib.contextmanager
def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """A block that runs so much later."""
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() + int(seconds * 1e9))
        yield


# The plan.


class Packs:
    """A catalogue of packs [(chain hash, content id), ...] by id, of which some are damaged."""

    def __init__(self, packs: dict[str, list[Hashes]], damaged: Collection[PackChunk] = ()) -> None:
        self.packs = {
            name: Pack(
                name,
                "",
                Stamp(0, 0, 0),
                chunks=len(chunks),
                hashes=b"".join(map(b"".join, chunks)),
                damaged=frozenset(place.chunk for place in damaged if place.pack == name),
            )
            for name, chunks in packs.items()
        }
        self.pack = self.packs.get
        self.looked_up = 0

    def chunks_of_keys(self, chains: Sequence[bytes]) -> list[list[PackChunk]]:
        self.looked_up += len(chains)
        return [
            [
                PackChunk(name, chunk)
                for name, pack in self.packs.items()
                for chunk in range(pack.chunks)
                if pack.chunk(chunk)[0][:8] == chain[:8] and pack.is_sound(chunk)
            ]
            for chain in chains
        ]


def named(count: int) -> list[Hashes]:
    return [(n.to_bytes(32, "little"), bytes(16)) for n in range(count)]


def runs_of(catalogue: Packs, wanted: Sequence[Hashes], avoid: Set[str] = frozenset()) -> list[Run]:
    return shared_runs(cast(Catalogue, catalogue), b"".join(map(b"".join, wanted)), avoid)


def test_a_text_that_goes_on_is_found_in_its_longest_runs_and_little_is_looked_up() -> None:
    wanted = named(1000)
    catalogue = Packs({"a": wanted[:600], "b": wanted[500:990], "c": wanted[590:600]})
    assert runs_of(catalogue, wanted) == [Run(0, 600, "a", 0), Run(600, 390, "b", 100)]
    assert catalogue.looked_up < 20
    assert runs_of(catalogue, wanted, {"a"})[0] == Run(500, 490, "b", 0)
    assert runs_of(Packs({}), wanted) == []


def test_a_run_ends_before_damage_and_before_other_content() -> None:
    wanted = named(20)
    other = [*wanted[:7], (wanted[7][0], b"x" * 16), *wanted[8:]]
    catalogue = Packs({"a": wanted, "b": other}, [PackChunk("a", 5)])
    assert runs_of(catalogue, wanted) == [
        Run(0, 7, "b", 0),
        Run(7, 13, "a", 7),
    ]
    catalogue = Packs({"a": other}, [PackChunk("a", 5)])
    assert runs_of(catalogue, wanted) == [Run(0, 5, "a", 0), Run(6, 1, "a", 6), Run(8, 12, "a", 8)]


def test_a_plan_merges_the_smallest_packs_when_there_are_too_many() -> None:
    found = [Run(n, 1, f"{n:032x}", 0) for n in range(70)] + [Run(70, 10, "f" * 32, 0)]
    plan = plan_write(100, found)
    assert Run(70, 10, "f" * 32, 0) in plan.shared
    assert len(plan.shared_packs) + 1 == MERGED_PACKS
    shared = {chunk for run in plan.shared for chunk in range(run.first, run.first + run.chunks)}
    assert set(plan.write) | shared == set(range(100))
    assert not set(plan.write) & shared
    assert plan.shared_chunks == len(shared)
    few = plan_write(63, found[:63])
    assert few.write == ()
    assert few.shared == tuple(found[:63])


def room(
    needed: int, budget: int, packs: dict[str, int], held: list[EvictionCandidate], **more: Any
) -> Room:
    total = sum(packs.values()) + sum(each.bytes for each in held)
    users = Counter(pack for each in held for pack in each.packs)
    busy = more.pop("busy", ())
    wanted = frozenset(more.pop("wanted", ()))
    return Room(needed, total, budget, lambda p: (packs[p], users[p]), wanted, busy.__contains__)


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    packs = {"p": 100, "q": 100, "shared": 100}
    held = [
        EvictionCandidate("older", 10, ("shared",), 0),
        EvictionCandidate("old", 10, ("p",), 1),
        EvictionCandidate("new", 10, ("q", "shared"), 2),
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
        EvictionCandidate("pinned", 10, ("p",), 0, "pinned"),
        EvictionCandidate("busy", 10, ("q",), 1),
        EvictionCandidate("free", 10, ("r",), 2),
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


def test_a_dry_run_lists_the_files_that_a_collection_then_removes_and_touches_none(
    author: Author, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(folder, ttl="1h")
    fill(author, store, 3)
    store.set_ttl("s2", "never")
    (folder / "packs" / ".kvsnap-0123456789abcdef.tmp").write_bytes(b"x" * 1000)
    before = {path: path.stat() for path in folder.glob("*/*")}
    with later(monkeypatch, 5400):
        rehearsed = store.gc(dry_run=True)
        assert {path: path.stat() for path in folder.glob("*/*")} == before
        assert store.gc(dry_run=True) == rehearsed
        done = store.gc()
    gone = {str(path) for path in before if not path.exists()}
    assert sorted(rehearsed.would_remove) == sorted(gone)
    assert len(gone) >= 5
    assert rehearsed.expired == done.expired == ("s0", "s1")
    assert rehearsed.bytes_freed == done.bytes_freed > 2 * 4 * CHUNK
    assert rehearsed.packs_removed == done.packs_removed == 2
    assert rehearsed.temporaries == done.temporaries == 1
    assert done.would_remove == ()
    assert names(store) == ["s2"]


def test_a_dry_run_names_the_packs_that_would_be_compacted(author: Author, folder: Path) -> None:
    store = DirectoryStore(folder)
    author.save(store, "long", text(9 * C))
    author.save(store, "short", text(3 * C))
    store.delete("long")
    (pack,) = packs(store.path)
    rehearsed = store.gc(dry_run=True)
    assert [Path(path).stem for path in rehearsed.would_remove] == [Path(pack).stem]
    assert packs(store.path) == [pack]
    done = store.gc()
    assert rehearsed.packs_compacted == done.packs_compacted == 1
    assert packs(store.path) != [pack]


def test_a_dry_run_evicts_in_name_what_a_collection_evicts(author: Author, folder: Path) -> None:
    store = DirectoryStore(folder)
    fill(author, store, 3)
    settings = json.loads((folder / "store.json").read_text())
    budget = store.stats()["bytes"] - CHUNK
    (folder / "store.json").write_text(json.dumps(settings | {"byte_budget": budget}))
    rehearsed = store.gc(dry_run=True)
    assert names(store) == ["s0", "s1", "s2"]
    assert rehearsed.evicted == store.gc().evicted == ("s0",)
    assert names(store) == ["s1", "s2"]
