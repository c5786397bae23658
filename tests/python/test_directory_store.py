"""A directory store: what it keeps and shares, its names, its folder and its locks."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_store import CHUNK, FRONT, Author, C, files, names, packs, size, text

from kvpager import _core
from kvpager.errors import (
    CorruptSnapshotError,
    InvalidArgumentError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.stores import DirectoryStore, FileStore
from kvpager.stores.lock import Hold, exclusive, in_use
from kvpager.stores.settings import parse_ttl
from kvpager.stores.sharing import MAX_PACKS, MERGED_PACKS

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


def test_a_segment_note_of_a_newer_release_is_a_sound_snapshot(
    store: DirectoryStore, author: Author
) -> None:
    tokens = text(2 * C + 3)
    newer = {"segment": {"version": 2, "name": "c", "tokens": 3, "digest": "0"}}
    store.save(
        "segment-c",
        author.content(tokens),
        fingerprint=author.pager.fingerprint_json,
        session=json.dumps(newer),
    )
    (entry,) = store.entries()
    assert (entry.name, entry.tokens, entry.error) == ("segment-c", len(tokens), None)
    assert entry.segment is None
    author.check(store.open("segment-c"), tokens)


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


def test_a_file_system_without_flock_is_named_as_the_cause(store: DirectoryStore) -> None:
    _core.arm_fault("file.lock", 0, errno.ENOLCK)
    with pytest.raises(StorageError, match=r"needs a file system with flock\(\)"):
        store.entries()


def test_a_store_that_may_only_be_read_is_read(
    author: Author, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save(store, "turn", text(3 * C))

    def refuse(path: object, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "utime", refuse)
    hashes = author.hashes(text(3 * C))
    for error in (errno.EROFS, errno.EACCES, errno.EPERM):
        for read in (lambda: store.open("turn"), store.entries, lambda: store.find_prefix(hashes)):
            _core.arm_fault("file.open", 0, error)  # the lock, to write
            assert read() is not None
    author.check(store.open("turn"), text(3 * C))
    assert names(store) == ["turn"]
    _core.arm_fault("file.open", 0, errno.ENOSPC)
    with pytest.raises(StorageError, match="lock: No space left"):
        store.entries()


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
    with exclusive(path, 120):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
    assert not in_use(path)  # though the child has a copy of the descriptor
    os.write(write, b".")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)
