"""The index of a directory store: rebuilt, brought up to date, and asked for what it is asked."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_store import Author, C, fill, flip, names, text

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore
from kvpager.stores.budget import EvictionCandidate, Room, choose_victims
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import CompanionSnapshot
from kvpager.stores.index import Index
from kvpager.stores.names import INDEX_FILE, INDEX_FILES

MODEL = '{"model": "draft"}'


def told(store: DirectoryStore) -> list[Any]:
    """All that a store says of itself, but where it is."""
    entries = [replace(one, path="") for one in store.entries(companions=True)]
    return [entries, store.stats()]


@pytest.fixture
def grown(author: Author, store: DirectoryStore) -> DirectoryStore:
    """A store that saves, deletes, pins and shares have been at."""
    prompt = text(3 * C, seed=1)
    for n in range(6):
        author.save(store, f"s{n}", text(5 * C + n, seed=10 + n, start=prompt))
    author.save(store, "s1", text(7 * C, seed=11, start=prompt))
    author.save(store, "s5", text(4 * C, seed=15, start=prompt))  # other chunks of the same packs
    store.delete("s2")
    store.pin("s3")
    store.set_ttl("s4", "7d")
    store.open("s0")
    return store


def spoil(path: Path, how: str) -> None:
    index = path / INDEX_FILE
    if how == "deleted":
        for file in INDEX_FILES:
            (path / file).unlink(missing_ok=True)
    elif how == "no database":
        index.write_bytes(b"nothing of the kind" * 500)
    elif how == "cut off":
        sqlite3.connect(index).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        os.truncate(index, index.stat().st_size // 2)
    elif how == "of another version":
        with sqlite3.connect(index) as database:
            database.execute("PRAGMA user_version = 77")


@pytest.mark.parametrize("how", ["deleted", "no database", "cut off", "of another version"])
def test_an_index_that_is_lost_or_spoilt_is_made_anew(
    author: Author, grown: DirectoryStore, how: str
) -> None:
    before, path = told(grown), Path(grown.path)
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    spoil(copy, how)
    again = DirectoryStore(copy)
    assert told(again) == before
    author.check(again.open("s1"), text(7 * C, seed=11, start=text(3 * C, seed=1)))
    assert author.save(again, "more", text(3 * C, seed=1)).chunks_written == 0


def test_what_an_index_says_is_what_the_files_say(grown: DirectoryStore) -> None:
    before, calls = told(grown), list[tuple[int, int]]()
    grown.reindex(lambda done, total: calls.append((done, total)))
    assert told(grown) == before
    assert calls[-1][0] == calls[-1][1] >= len(before[0])


class DiedError(BaseException):
    """What a test throws where a process would die."""


@pytest.mark.parametrize("what", ["save", "replace", "delete", "pin", "gc"])
def test_who_dies_between_a_file_and_the_index_is_found_out(
    author: Author, grown: DirectoryStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: author.save(grown, "new", text(4 * C, seed=99)),
        "replace": lambda: author.save(grown, "s0", text(4 * C, seed=99)),
        "delete": lambda: grown.delete("s5"),
        "pin": lambda: grown.pin("s0"),
        "gc": grown.gc,
    }
    settle, left = Catalogue.settle, 1 if what in ("save", "replace") else 0

    def settled(catalogue: Catalogue) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DiedError
        settle(catalogue)

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "settle", settled)
        with pytest.raises(DiedError):
            calls[what]()
    found = told(DirectoryStore(grown.path))
    grown.reindex()
    assert told(grown) == found
    assert {"save": "new" in names(grown), "delete": "s5" not in names(grown)}.get(what, True)


def test_what_was_changed_by_hand_is_seen_when_it_is_asked_for(
    author: Author, grown: DirectoryStore
) -> None:
    folder = Path(grown.path, "snapshots")
    (folder / "s0.kvsnap").unlink()
    with pytest.raises(StorageError, match="no snapshot 's0'"):
        grown.open("s0")
    assert grown.entry("s0") is None
    assert grown.entry("s1") is not None
    flip(folder / "s1.kvsnap", 70)  # in place: the folder's time stays
    entry = grown.entry("s1")
    assert entry is not None
    assert "s1.kvsnap" in str(entry.error)
    with pytest.raises(CorruptSnapshotError):
        grown.open("s1")
    pack = folder.with_name("packs") / f"{grown.open('s5').packs[-1][0]}.kvsnap"
    pack.write_bytes(b"")
    assert any(pack.name in str(entry.error) for entry in grown.entries())


def test_a_manifest_that_cannot_be_looked_at_costs_no_pack(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "turn", text(4 * C))
    stat, left = os.lstat, 1

    def failing(path: Any) -> os.stat_result:
        nonlocal left
        if str(path).endswith("turn.kvsnap") and left:
            left = 0
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", failing)
        patch.setattr(Catalogue, "is_current", lambda *_: True)
        author.save(store, "turn", text(6 * C))  # which shares the first pack
    assert left == 0
    author.check(store.open("turn"), text(6 * C))
    found = told(store)
    store.reindex()
    assert told(store) == found


def test_an_index_that_cannot_be_written_is_copied_to_memory(
    author: Author, grown: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: Index, mode: int) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    grown.open("s0")
    monkeypatch.setattr(Index, "_open", refuse)
    before = (Path(grown.path) / INDEX_FILE).read_bytes()
    again = DirectoryStore(grown.path)
    assert names(again) == names(grown)
    author.save(again, "new", text(2 * C, seed=5))
    assert "new" in names(again)
    assert (Path(grown.path) / INDEX_FILE).read_bytes() == before
    assert "new" in names(grown)  # which sees that the files are others


def test_a_save_whose_index_cannot_be_written_is_a_save(
    author: Author,
    grown: DirectoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    commit = Index.commit

    def refuse(index: Index) -> None:
        (database,) = index.execute("PRAGMA database_list").fetchall()
        if database["file"]:
            raise sqlite3.OperationalError("database or disk is full")
        commit(index)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Index, "commit", refuse)
        author.save(grown, "new", text(2 * C, seed=5))
        grown.delete("s5")
    assert "index cannot be written: database or disk is full" in caplog.text
    assert "index is kept in memory: database or disk is full" in caplog.text
    assert "s5" not in names(DirectoryStore(grown.path))
    author.check(DirectoryStore(grown.path).open("new"), text(2 * C, seed=5))


@pytest.fixture
def refreshed(grown: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> list[Catalogue]:
    """Grows with each comparison of the index with all files."""
    refresh, found = Catalogue.refresh, list[Catalogue]()

    def counted(catalogue: Catalogue, *more: Any) -> None:
        found.append(catalogue)
        refresh(catalogue, *more)

    grown.open("s0")
    monkeypatch.setattr(Catalogue, "refresh", counted)
    return found


@pytest.mark.parametrize(("point", "visits"), [("snapshot.write", 3), ("snapshot.fsync", 1)])
@pytest.mark.parametrize("what", ["save", "save of two", "gc"])
def test_a_write_that_fails_leaves_the_index_as_the_files_are(
    author: Author,
    grown: DirectoryStore,
    refreshed: list[Catalogue],
    what: str,
    point: str,
    visits: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its file is removed under the lock, so that the next call need not look at all files."""
    companion = CompanionSnapshot("draft", author.content(text(3 * C)), MODEL, "{}")
    if what == "gc":  # one chunk of a large pack is needed
        beginning = text(C, seed=90)
        author.save(grown, "long", text(12 * C, seed=91, start=beginning))
        author.save(grown, "part", text(2 * C, seed=92, start=beginning))
        grown.delete("long")
    failed = 0
    for visit in range(visits):
        _core.arm_fault(point, visit, errno.EIO)
        try:
            if what == "gc":
                grown.gc()
            else:
                companions = [companion] if what == "save of two" else []
                author.save(grown, "new", text(4 * C, seed=visit), companions=companions)
        except StorageError:
            failed += 1
        _core.disarm_faults()
        grown.open("s1")
        assert refreshed == []
        assert grown.stats()["bytes_temporary"] == 0
    assert failed or "saved without its draft" in caplog.text
    found = told(grown)
    grown.reindex()
    assert told(grown) == found


def test_a_save_that_finds_no_room_on_the_disk_leaves_the_index_as_the_files_are(
    author: Author,
    grown: DirectoryStore,
    refreshed: list[Catalogue],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = _core.SnapshotWriter

    def no_manifest_of(name: str) -> Callable[..., Any]:
        def make(path: str, *more: Any) -> Any:
            found = writer(path, *more)
            if path.endswith(f"/{name}.kvsnap"):
                found.discard()
                raise StorageError(f"{path}: No space left on device")
            return found

        return make

    companion = CompanionSnapshot("draft", author.content(text(3 * C)), MODEL, "{}")
    for failing, companions in (("new", []), ("new", [companion]), ("new.draft", [companion])):
        monkeypatch.setattr(_core, "SnapshotWriter", no_manifest_of(failing))
        refused = contextlib.nullcontext() if "draft" in failing else pytest.raises(StorageError)
        with refused:
            author.save(grown, "new", text(4 * C, seed=70), companions=companions)
        grown.open("s0")
    assert refreshed == []
    found = told(grown)
    grown.reindex()
    assert told(grown) == found
    assert found[1]["bytes_temporary"] == 0


@pytest.mark.parametrize("words", ["database is locked", "locking protocol"])
def test_a_file_system_without_sqlites_locks_is_named_as_the_cause(
    grown: DirectoryStore, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def refuse(index: Index, mode: int) -> None:
        raise sqlite3.OperationalError(words)

    monkeypatch.setattr(Index, "_open", refuse)
    with pytest.raises(StorageError, match=rf"{INDEX_FILE}: {words}; .*NFS"):
        DirectoryStore(grown.path).entries()


def test_a_forked_child_has_a_connection_of_its_own(author: Author, grown: DirectoryStore) -> None:
    index = grown._catalogue.index
    database = index._database
    child = os.fork()
    if child == 0:
        try:
            grown.pin("s0")
            assert index._database is not database
            grown.delete("s5")
            os._exit(0)
        finally:
            os._exit(1)
    author.save(grown, "parent", text(C, seed=4))
    assert os.waitpid(child, 0)[1] == 0
    assert "parent" in names(grown)
    assert "s5" not in names(grown)
    found = told(grown)
    grown.reindex()
    assert told(grown) == found


def test_a_list_can_be_asked_for_page_by_page(grown: DirectoryStore) -> None:
    every, page = names(grown), [entry.name for entry in grown.entries(limit=2)]
    assert page == every[:2]
    while more := grown.entries(after=page[-1], limit=2):
        page += [entry.name for entry in more]
    assert page == every
    even = grown.entries(named=lambda name: name in every[::2], after=every[0], limit=1)
    assert [entry.name for entry in even] == every[2:3]
    grown.open("s4")
    latest = [entry.name for entry in grown.entries(latest_first=True)]
    assert (latest[0], sorted(latest)) == ("s4", every)
    grown.set_ttl("s4", "never")
    for file in Path(grown.path, "snapshots").iterdir():
        os.utime(file, (1e9, 1e9))  # as a file system whose times are seconds
    grown.reindex()
    shown = grown.entries(latest_first=True, limit=2)
    while more := grown.entries(
        latest_first=True, after=(shown[-1].last_used, shown[-1].name), limit=2
    ):
        shown += more
    assert [entry.name for entry in shown] == every[::-1]
    for wrong in ({"after": (1.0, "s0")}, {"after": "s0", "latest_first": True}):
        with pytest.raises(InvalidArgumentError, match="after is"):
            grown.entries(**wrong)
    with pytest.raises(InvalidArgumentError, match="limit is 0"):
        grown.entries(limit=0)
    assert grown.entry("../s0") is None
    asked = [f"n{each}" for each in range(1200)] + ["s0", "s5", "s2"]
    assert grown.saved(asked) == {"s0", "s5"}  # s2 was deleted
    assert grown.saved(names(grown)) == set(names(grown))
    assert grown.stats()["snapshots"] == len(names(grown))


def statements(store: DirectoryStore) -> Iterator[tuple[str, str]]:
    """Every statement that calls have run so far, and how SQLite finds its rows."""
    database = store._catalogue.index._database
    assert database is not None
    seen: set[str] = set()
    database.set_trace_callback(seen.add)
    yield "", ""
    database.set_trace_callback(None)
    for sql in sorted(seen):
        if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT)", sql):
            for row in database.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall():
                yield sql, row["detail"]


def test_no_call_but_a_whole_list_looks_at_every_row(author: Author, grown: DirectoryStore) -> None:
    store = DirectoryStore(grown.path, ttl="30d")
    plans = statements(store)
    next(plans)
    author.save(store, "new", text(6 * C, seed=42))
    author.save(store, "new", text(7 * C, seed=42))
    store.open("s1")
    store.find_prefix(author.hashes(text(9 * C, seed=3, start=text(3 * C, seed=1))))
    store.entry("s1")
    store.pin("s1")
    store.unpin("s1")
    store.delete("s5")
    store.entries(limit=2)
    store.entries(latest_first=True, after=(2e9, "s0"), limit=2)
    store.stats()
    store.gc()
    DirectoryStore(grown.path, byte_budget=int(store.stats()["pack_bytes"] or 0))
    author.save(store, "newer", text(6 * C, seed=43))
    scans = {
        (sql, how)
        for sql, how in plans
        if re.match(r"SCAN (?!totals|state|twice|CONSTANT|\()", how)
    }
    # Through an index, as far as they are read: in the order of names, and of last use.
    allowed = ("sqlite_autoindex_snapshot_1", "snapshot_used", "snapshot_unsound", "pack_unsound")
    allowed += ("snapshot_orphan", "pack_unneeded", "pack_sparse", "snapshot_ends", "file_kind")
    assert [each for each in scans if not each[1].endswith(allowed)] == []


def test_an_eviction_looks_at_no_more_snapshots_than_it_has_to() -> None:
    looked: list[int] = []

    def held() -> Iterator[EvictionCandidate]:
        for n in range(100_000):
            looked.append(n)
            yield EvictionCandidate(f"s{n}", 10, (f"p{n}",), n)

    room = Room(0, 1000, 780, lambda pack: (100, 1), frozenset(), lambda pack: False)
    assert choose_victims(held(), room) == ["s0", "s1"]
    assert len(looked) <= 3
    many = Room(0, 0, -110 * 50_000, lambda pack: (100, 1), frozenset(), lambda pack: False)
    assert len(choose_victims(held(), many)) == 50_000  # in seconds: not with the square


def test_of_many_snapshots_with_one_beginning_any_serves_it(
    author: Author, store: DirectoryStore
) -> None:
    fill(author, store, 3)
    prompt = text(2 * C, seed=1)
    for n in range(40):
        author.save(store, f"t{n:02}", text(3 * C, seed=100 + n, start=prompt))
    found = store.find_prefix(author.hashes([*prompt, *text(2 * C, seed=7)]))
    assert found is not None
    author.check(found, prompt)
