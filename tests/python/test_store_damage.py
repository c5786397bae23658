"""Damaged and irregular files of a store: what is reported, what is kept, what is removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_store import (
    CHUNK,
    FRONT,
    SLACK,
    Author,
    C,
    files,
    fill,
    flip,
    names,
    one,
    packs,
    size,
    text,
)

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore, catalogue, tables
from kvpager.stores.lock import Hold

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
    store.entries()  # looks at every file
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


@pytest.mark.parametrize(
    "notes",
    ['{"pinned": false, "ttl_seconds": ' + "9" * 400 + "}", '{"pinned": 1, "ttl_seconds": null}'],
)
def test_forged_notes_are_taken_for_a_pin(
    author: Author, store: DirectoryStore, notes: str
) -> None:
    author.save(store, "turn", text(C))
    author.save(store, "next", text(C, 1))
    Path(store.path, "snapshots", "turn.json").write_text(notes)
    found = {entry.name: entry for entry in store.entries()}
    assert found["turn"].pinned
    assert "turn.json" in str(found["turn"].error)
    assert found["next"].error is None


@pytest.mark.parametrize("which", ["notes", "damage"])
def test_a_file_that_cannot_be_read_breaks_no_other_snapshot(
    author: Author, store: DirectoryStore, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "turn", text(C))
    author.save(store, "next", text(C, 1))
    folder = Path(store.path)
    if which == "notes":
        store.set_ttl("turn", 60)
        bad = folder / "snapshots" / "turn.json"
    else:
        bad = packs(folder)[0].with_suffix(".damaged")
        bad.write_text("[]")
    for module in (tables, catalogue):
        monkeypatch.setattr(module, "read_json", partial(failing, module.read_json, bad))
    again = DirectoryStore(store.path)
    again.reindex()
    errors = sorted(entry.error is not None for entry in again.entries())
    assert errors == [False, True]
    author.save(again, "third", text(C, 2))


def failing(read: Callable[..., Any], bad: Path, path: str, *args: Any) -> Any:
    if Path(path) == bad:
        raise OSError(errno.EIO, "Input/output error")
    return read(path, *args)


def test_numbers_in_a_list_of_damage_that_no_chunk_has_mean_nothing(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(2 * C))
    packs(store.path)[0].with_suffix(".damaged").write_text(f"[-3, 7, {10**30}]")
    (entry,) = store.entries()
    assert entry.error is None
    assert store.gc().damaged == ()
    found = store.find_prefix(author.hashes(text(2 * C)))
    assert found is not None
    author.check(found, text(2 * C))


def test_a_pack_that_could_not_be_read_for_a_while_is_as_damaged_as_before(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "turn", text(4 * C))
    flip(packs(store.path)[0], FRONT + CHUNK + 100)
    assert [chunk for chunk, _, _ in store.verify("turn")] == [1]
    _core.arm_fault("snapshot.read", 0, errno.EIO)
    store.reindex()
    _core.disarm_faults()
    (entry,) = store.entries()
    assert entry.error is not None
    assert "chunks [1]" in entry.error
    assert author.save(store, "turn", text(4 * C)).chunks_written == 1


def test_a_pack_that_was_exchanged_for_a_smaller_one_is_told(
    author: Author, store: DirectoryStore
) -> None:
    author.save(store, "long", text(4 * C))
    author.save(store, "short", text(C, 1))
    assert len(store.entries()) == 2  # read once
    short, long = sorted(packs(store.path), key=lambda pack: pack.stat().st_size)
    shutil.copyfile(short, long)
    found = {entry.name: entry for entry in store.entries()}
    assert found["short"].error is None
    assert found["long"].error is not None


def test_a_folder_with_the_name_of_a_temporary_file_stops_nothing(
    author: Author, store: DirectoryStore
) -> None:
    Path(store.path, ".kvsnap-1-aa.tmp").mkdir()
    author.save(store, "turn", text(C))
    store.gc()
    assert [entry.name for entry in store.entries()] == ["turn"]


@pytest.mark.parametrize("ttl", [10**400, float("inf"), float("nan"), -1])
def test_a_time_to_live_is_one_that_a_clock_has(store: DirectoryStore, ttl: float) -> None:
    with pytest.raises(InvalidArgumentError, match="ttl"):
        DirectoryStore(store.path, ttl=ttl)


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


def as_symlink(path: Path) -> None:
    moved = path.parents[2] / "moved"
    path.rename(moved)
    path.symlink_to(moved)


def as_dangling_symlink(path: Path) -> None:
    path.rename(path.parents[2] / "moved")
    path.symlink_to("nowhere")


def as_fifo(path: Path) -> None:
    path.rename(path.parents[2] / "moved")
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.rename(path.parents[2] / "moved")
    path.mkdir()


def in_a_folder(path: Path) -> None:
    folder = path.with_name("older")
    folder.mkdir()
    path.rename(folder / path.name)


def as_no_text(path: Path) -> None:
    path.rename(path.parents[2] / "moved")
    Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff.kvsnap")).symlink_to("nowhere")


MOVES = [as_no_text, as_symlink, as_dangling_symlink, as_fifo, as_folder, in_a_folder]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("remove_damaged", [False, True])
def test_gc_keeps_the_packs_of_what_it_cannot_read(
    author: Author,
    store: DirectoryStore,
    folder: Path,
    move: Callable[[Path], None],
    remove_damaged: bool,
) -> None:
    author.save(store, "one", text(4 * C, seed=1))
    author.save(store, "two", text(4 * C, seed=2))
    kept = packs(folder)
    path = folder / "snapshots" / "one.kvsnap"
    store.pin("one")
    before = path.read_bytes()
    move(path)
    for opened in (store, DirectoryStore(folder)):
        report = opened.gc(remove_damaged=remove_damaged)
        assert packs(folder) == kept
        assert any("snapshots/" in where for where, _ in report.damaged)
        assert report.damaged_removed == ()
    # Saves, deletions and evictions look for packs that nobody needs as well.
    author.save(store, "three", text(4 * C, seed=3))
    store.delete("three")
    assert set(kept) <= set(packs(folder))
    for there in sorted(path.parent.rglob("*")):
        if there.is_symlink() or there.is_fifo():
            there.unlink()
    if path.is_dir():
        path.rmdir()
    elif (inside := path.parent / "older").exists():
        (inside / path.name).unlink()
        inside.rmdir()
    path.write_bytes(before)
    author.check(store.open("one"), text(4 * C, seed=1))
    assert store.gc().damaged == ()


def test_a_budget_evicts_what_is_known_and_keeps_the_packs_of_what_is_not(
    author: Author, store: DirectoryStore, folder: Path
) -> None:
    author.save(store, "one", text(4 * C, seed=1))
    author.save(store, "two", text(4 * C, seed=2))
    kept = packs(folder)
    as_symlink(folder / "snapshots" / "one.kvsnap")
    with pytest.raises(Exception, match="byte_budget is 1;"):
        DirectoryStore(folder, byte_budget=1)
    assert packs(folder) == kept


def test_a_pack_behind_a_symlink_costs_no_snapshot(
    author: Author, store: DirectoryStore, folder: Path, tmp_path: Path
) -> None:
    author.save(store, "one", text(4 * C, seed=1))
    pack = packs(folder)[0]
    pack.rename(tmp_path / "elsewhere")
    pack.symlink_to(tmp_path / "elsewhere")
    report = DirectoryStore(folder).gc(remove_damaged=True)
    assert report.damaged_removed == ()
    assert any(str(pack) in where for where, _ in report.damaged)
    pack.unlink()
    (tmp_path / "elsewhere").rename(pack)
    author.check(store.open("one"), text(4 * C, seed=1))


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("place", ["packs", "snapshots"])
def test_a_store_without_its_settings_is_an_error_and_not_one_without_a_budget(
    author: Author, folder: Path, create: bool, place: str
) -> None:
    store = DirectoryStore(folder, byte_budget="1GiB")
    author.save(store, "one", text(4 * C, seed=1))
    settings = (folder / "store.json").read_bytes()
    (folder / "store.json").unlink()
    for file in (folder / {"packs": "snapshots", "snapshots": "packs"}[place]).iterdir():
        file.rename(folder.parent / file.name)
    with pytest.raises(CorruptSnapshotError, match=rf"store.json: missing, though {place}/"):
        DirectoryStore(folder, create=create)
    assert not (folder / "store.json").exists()
    (folder / "store.json").write_bytes(settings)
    assert DirectoryStore(folder).byte_budget == 1 << 30
