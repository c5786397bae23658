"""Companions of snapshots in stores: saved, listed, kept, and gone with what they belong to."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from small_store import Author, C, files, flip, names, packs, size, text

from kvpager import _core
from kvpager.cli import main
from kvpager.errors import CapacityError, InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore, FileStore
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import CompanionSnapshot, named_companions, owner_of
from kvpager.stores.names import INDEX_FILES
from kvpager.stores.saving import Saving


@pytest.fixture(scope="module")
def draft():
    """Makes what a draft model would hold."""
    return Author(fingerprint="draft")


def beside(draft, tokens, kind="draft"):
    return CompanionSnapshot(
        kind, draft.content(tokens), draft.pager.fingerprint_json, json.dumps({"version": 1})
    )


def save(author, draft, store, name, tokens, held=None, **more):
    """A snapshot of `tokens` and a draft's of the first `held` of them."""
    companion = beside(draft, tokens[: len(tokens) if held is None else held])
    return author.save(store, name, tokens, companions=[companion], **more)


def manifest(store, name):
    return Path(store.path) / "snapshots" / f"{name}.kvsnap"


def wipe(path):
    """Makes a file one that cannot be opened."""
    with path.open("r+b") as file:
        file.write(b"\0" * 64)


def session_of(store, name):
    return json.loads(store.open(name).session)


@pytest.fixture(params=["directory", "file"])
def any_store(request, tmp_path):
    """(store, name of a snapshot in it)"""
    if request.param == "file":
        return FileStore(tmp_path), "chat.kvsnap"
    return DirectoryStore(tmp_path / "store"), "chat"


# In both stores.


def test_a_companion_is_kept_whole_beside_its_snapshot(any_store, author, draft):
    store, name = any_store
    tokens = text(5 * C + 3)
    report = save(author, draft, store, name, tokens, 4 * C + 1)
    assert [one.name for one in report.companions] == [f"{name}.draft"]
    assert report.companions[0].tokens == 4 * C + 1
    author.check(store.open(name), tokens)
    draft.check(store.open(f"{name}.draft"), tokens[: 4 * C + 1])
    assert named_companions(session_of(store, name)) == {
        "draft": store.open(f"{name}.draft").logical_digest
    }
    assert owner_of(session_of(store, f"{name}.draft")) == name


def test_listing_counts_a_companions_bytes_with_its_snapshot(any_store, author, draft):
    store, name = any_store
    tokens = text(5 * C)
    author.save(store, name, tokens)
    alone = store.entries()[0].bytes_own
    save(author, draft, store, name, tokens)
    (entry,) = store.entries()
    assert entry.name == name
    assert entry.companions == (f"{name}.draft",)
    assert alone + 5 * draft.content(tokens).layout.chunk_bytes < entry.bytes_own


def test_deleting_a_snapshot_deletes_its_companions(any_store, author, draft, tmp_path):
    store, name = any_store
    save(author, draft, store, name, text(3 * C))
    store.delete(name)
    assert store.entries() == []
    with pytest.raises(StorageError):
        store.open(f"{name}.draft")
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in left} <= {"store.json", "lock", *INDEX_FILES}


def test_a_save_replaces_the_companion(any_store, author, draft):
    store, name = any_store
    tokens = text(8 * C)
    save(author, draft, store, name, tokens[: 5 * C])
    save(author, draft, store, name, tokens)
    draft.check(store.open(f"{name}.draft"), tokens)
    assert named_companions(session_of(store, name)) == {
        "draft": store.open(f"{name}.draft").logical_digest
    }


def test_a_save_without_companions_leaves_none_of_the_old_ones(any_store, author, draft):
    store, name = any_store
    save(author, draft, store, name, text(3 * C))
    author.save(store, name, text(4 * C))
    with pytest.raises(StorageError):
        store.open(f"{name}.draft")
    assert "companions" not in session_of(store, name)
    assert store.entries()[0].companions == ()


def test_a_companion_takes_nobodys_name(any_store, author, draft, caplog):
    store, name = any_store
    mine = text(2 * C, seed=9)
    author.save(store, f"{name}.draft", mine)
    with caplog.at_level(logging.WARNING):
        report = save(author, draft, store, name, text(3 * C))
    assert report.companions == ()
    assert "is there already and does not belong to" in caplog.text
    author.check(store.open(f"{name}.draft"), mine)
    assert "companions" not in session_of(store, name)
    store.delete(name)
    author.check(store.open(f"{name}.draft"), mine)


def test_copied_by_itself_a_companion_is_a_snapshot_of_its_own(any_store, author, draft):
    store, name = any_store
    tokens = text(3 * C)
    save(author, draft, store, name, tokens)
    source = store.open(f"{name}.draft")
    copy = "copy.kvsnap" if isinstance(store, FileStore) else "copy"
    store.save(copy, source, fingerprint=source.fingerprint, session=source.session)
    store.delete(name)
    draft.check(store.open(copy), tokens)
    assert owner_of(session_of(store, copy)) is None
    assert names(store) == [copy]


def test_what_is_cancelled_at_the_primary_leaves_the_old_one_as_it_was(any_store, author, draft):
    store, name = any_store
    old = text(3 * C)
    save(author, draft, store, name, old)
    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) > 1:  # the first is of the companion
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(author, draft, store, name, text(9 * C, seed=4), progress=stop)
    author.check(store.open(name), old)
    draft.check(store.open(f"{name}.draft"), old)


# The directory store.


def test_entries_have_companions_of_their_own_where_asked(store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    author.save(store, "alone", text(2 * C, seed=3))
    assert names(store) == ["alone", "chat"]
    all_of_them = store.entries(companions=True)
    assert [entry.name for entry in all_of_them] == ["alone", "chat", "chat.draft"]
    assert [entry.companion_of for entry in all_of_them] == [None, None, "chat"]
    stats = store.stats()
    assert (stats["snapshots"], stats["companions"]) == (2, 1)


def test_turns_share_the_chunks_of_companions_too(store, author, draft):
    tokens = text(12 * C)
    save(author, draft, store, "chat", tokens[: 10 * C])
    report = save(author, draft, store, "chat", tokens)
    assert report.companions[0].chunks_written == 2
    assert report.companions[0].bytes_shared > 0


def test_a_pin_holds_for_companions(store, author, draft):
    save(author, draft, store, "chat", text(4 * C))
    store.pin("chat")
    DirectoryStore(store.path, byte_budget=size(store.path) + 2048)
    for seed in range(3):
        with pytest.raises(CapacityError, match="pinned: chat"):
            author.save(store, "other", text(6 * C, seed=seed))
    draft.check(store.open("chat.draft"), text(4 * C))


@pytest.mark.parametrize("operation", ["pin", "unpin", "set_ttl"])
def test_a_companion_has_no_notes_of_its_own(store, author, draft, operation):
    save(author, draft, store, "chat", text(3 * C))
    more = ("1d",) if operation == "set_ttl" else ()
    with pytest.raises(InvalidArgumentError, match=r"'chat\.draft' belongs to 'chat'"):
        getattr(store, operation)("chat.draft", *more)


def test_a_companion_expires_with_its_snapshot_and_not_before(store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    store = DirectoryStore(store.path, ttl=3600)
    long_ago = time.time() - 7200
    os.utime(f"{store.path}/snapshots/chat.draft.kvsnap", (long_ago, long_ago))
    assert store.gc().expired == ()
    draft.check(store.open("chat.draft"), text(3 * C))
    (entry,) = [one for one in store.entries(companions=True) if one.companion_of]
    assert entry.last_used > long_ago + 3600
    os.utime(f"{store.path}/snapshots/chat.json", (long_ago, long_ago))
    with pytest.raises(StorageError, match="time to live is over"):
        store.open("chat.draft")
    report = store.gc()
    assert report.expired == ("chat",)
    assert files(store.path) == {}


def test_eviction_takes_a_snapshot_and_its_companions_together(store, author, draft):
    save(author, draft, store, "old", text(6 * C, seed=1))
    time.sleep(0.01)
    save(author, draft, store, "new", text(6 * C, seed=2))
    DirectoryStore(store.path, byte_budget=size(store.path) + 4096)
    author.save(store, "third", text(9 * C, seed=3))  # more than "old" has without its companion
    assert names(store) == ["new", "third"]
    assert [entry.name for entry in store.entries(companions=True)] == [
        "new",
        "new.draft",
        "third",
    ]


def test_what_belongs_to_a_snapshot_stays_until_the_new_one_is_in_place(store, author, draft):
    save(author, draft, store, "chat", text(8 * C))
    before = files(store.path)
    DirectoryStore(store.path, byte_budget=size(store.path) + 4096)
    with pytest.raises(CapacityError, match="kept until this is done: chat"):
        author.save(store, "chat", text(4 * C, seed=3))
    assert files(store.path) == before


def test_without_room_for_both_the_snapshot_is_saved_alone(folder, author, draft, caplog):
    measured = DirectoryStore(folder.parent / "measured")
    author.save(measured, "chat", text(6 * C))
    store = DirectoryStore(folder, byte_budget=size(measured.path) + 4096)
    with caplog.at_level(logging.WARNING):
        report = save(author, draft, store, "chat", text(6 * C))
    assert report.companions == ()
    assert "saved without its draft" in caplog.text
    author.check(store.open("chat"), text(6 * C))
    assert "companions" not in session_of(store, "chat")
    assert [entry.name for entry in store.entries(companions=True)] == ["chat"]
    assert store.stats()["bytes_temporary"] == 0


def test_without_room_for_the_snapshot_nothing_is_changed(folder, author, draft):
    store = DirectoryStore(folder, byte_budget=16384)
    with pytest.raises(CapacityError):
        save(author, draft, store, "chat", text(20 * C))
    assert files(folder) == {}


def test_a_name_too_long_for_a_companion_is_saved_alone(store, author, draft, caplog):
    with caplog.at_level(logging.WARNING):
        report = save(author, draft, store, "n" * 198, text(2 * C))
    assert report.companions == ()
    assert "name is" in caplog.text


def test_a_snapshot_cannot_take_the_name_of_anothers_companion(store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    with pytest.raises(InvalidArgumentError, match=r"'chat\.draft', which belongs to snapshot"):
        author.save(store, "chat.draft", text(2 * C, seed=5))
    draft.check(store.open("chat.draft"), text(3 * C))


class DiedError(BaseException):
    """What a test throws where a process would die."""


@pytest.mark.parametrize("first", [True, False], ids=["the first save", "a later save"])
def test_a_writer_that_dies_between_companion_and_primary_leaves_an_orphan(
    folder, author, draft, monkeypatch, first
):
    store = DirectoryStore(folder)
    old, new = text(3 * C), text(5 * C, seed=7)
    if not first:
        save(author, draft, store, "chat", old)
    publish = Saving.publish

    def dying(self, *args):
        if self.owner is None:
            raise DiedError
        publish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "publish", dying)
        patch.setattr(Saving, "undo", lambda self, catalogue: None)
        with pytest.raises(DiedError):
            save(author, draft, store, "chat", new)
    again = DirectoryStore(folder)
    assert names(again) == ([] if first else ["chat"])
    if not first:  # it is as it was, and knows that the companion is another one
        author.check(again.open("chat"), old)
        assert again.entries()[0].companions == ()
    assert again.gc(dry_run=True).orphans == ("chat.draft",)
    report = again.gc()
    assert report.orphans == ("chat.draft",)
    assert [entry.name for entry in again.entries(companions=True)] == ([] if first else ["chat"])
    save(author, draft, again, "chat", new)
    draft.check(again.open("chat.draft"), new)


def test_a_save_cleans_up_the_orphans_of_others(store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    manifest(store, "chat").unlink()
    author.save(store, "other", text(2 * C, seed=3))
    assert [entry.name for entry in store.entries(companions=True)] == ["other"]


def test_damage_of_a_companion_is_its_own(store, author, draft):
    save(author, draft, store, "chat", text(4 * C))
    pack = next(path for path in packs(store.path) if "draft" in _fingerprint(path))
    flip(pack, pack.stat().st_size // 2)
    assert store.verify("chat") == []
    assert store.verify("chat.draft") != []
    assert store.entries()[0].error is None
    save(author, draft, store, "chat", text(4 * C))  # writes the damaged chunk anew
    draft.check(store.open("chat.draft"), text(4 * C))


def test_a_companion_whose_manifest_is_damaged_still_belongs_to_its_snapshot(store, author, draft):
    save(author, draft, store, "chat", text(4 * C))
    path = manifest(store, "chat.draft")
    wipe(path)
    store = DirectoryStore(store.path)
    assert names(store) == ["chat"]
    author.check(store.open("chat"), text(4 * C))
    assert [found for found, _ in store.gc().damaged] == [str(path)]
    store.delete("chat")
    assert not path.exists()


def test_a_damaged_snapshot_keeps_its_companion_until_it_is_removed(store, author, draft):
    save(author, draft, store, "chat", text(4 * C))
    wipe(manifest(store, "chat"))
    store = DirectoryStore(store.path)
    assert store.gc().orphans == ()
    draft.check(store.open("chat.draft"), text(4 * C))
    store.gc(remove_damaged=True)
    assert store.entries(companions=True) == []


def test_the_bond_outlives_a_collection_that_moves_chunks(store, author, draft):
    tokens = text(12 * C)
    save(author, draft, store, "long", tokens)
    save(author, draft, store, "chat", tokens[: 4 * C])
    store.delete("long")
    report = store.gc()
    assert report.packs_compacted == 2
    assert store.entries()[0].companions == ("chat.draft",)
    draft.check(store.open("chat.draft"), tokens[: 4 * C])


def test_a_sessions_companions_are_found_in_a_catalogue_read_anew(store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    catalogue = Catalogue(store.path)
    catalogue.rebuild(0o600)
    assert [one.manifest.name for one in catalogue.companions("chat")] == ["chat.draft"]
    assert catalogue.orphans() == []
    catalogue.index.close()


def test_threads_that_save_one_name_leave_a_pair_that_agrees(folder):
    def work(seed):
        store = DirectoryStore(folder)
        author, draft = Author(), Author(fingerprint="draft")
        for turn in range(6):
            save(author, draft, store, "chat", text(4 * C, seed=seed * 10 + turn))
            store.gc()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = DirectoryStore(folder)
    (entry,) = store.entries()
    assert entry.companions == ("chat.draft",)
    assert store.open("chat").tokens.tolist() == store.open("chat.draft").tokens.tolist()
    assert store.gc().orphans == ()


# Files.


def test_a_renamed_pair_of_files_stays_a_pair(tmp_path, author, draft):
    store = FileStore(tmp_path)
    save(author, draft, store, "chat.kvsnap", text(3 * C))
    (tmp_path / "chat.kvsnap").rename(tmp_path / "b.kvsnap")
    (tmp_path / "chat.kvsnap.draft").rename(tmp_path / "b.kvsnap.draft")
    assert store.entries()[0].companions == ("b.kvsnap.draft",)
    store.delete("b.kvsnap")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_companion_file_goes_with_its_snapshot(tmp_path, author, draft):
    store = FileStore(tmp_path)
    save(author, draft, store, "chat.kvsnap", text(3 * C))
    (tmp_path / "chat.kvsnap.draft").write_bytes(b"nothing")
    save(author, draft, store, "chat.kvsnap", text(4 * C))
    draft.check(store.open("chat.kvsnap.draft"), text(4 * C))
    (tmp_path / "chat.kvsnap.draft").write_bytes(b"nothing")
    store.delete("chat.kvsnap")
    assert list(tmp_path.iterdir()) == []


def _fingerprint(path):
    return _core.SnapshotReader.open(str(path)).fingerprint


# The command line.


def kvpager(capsys, *args, code=0):
    assert main(list(map(str, args))) == code
    return capsys.readouterr().out


def test_ls_hides_companions_unless_asked(capsys, store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    told = kvpager(capsys, "snapshot", "ls", store.path)
    assert "+draft" in told
    assert "chat.draft" not in told
    assert "chat.draft" in kvpager(capsys, "snapshot", "ls", store.path, "--all")


def test_inspect_tells_of_companions_and_whether_a_restore_takes_them(capsys, store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    inspect = ("snapshot", "inspect", f"{store.path}/chat", "--format", "json")
    (told,) = json.loads(kvpager(capsys, *inspect))["companions"]
    assert (told["kind"], told["sound"], told["tokens"]) == ("draft", True, 3 * C)
    manifest(store, "chat.draft").unlink()
    (told,) = json.loads(kvpager(capsys, *inspect))["companions"]
    assert (told["sound"], told["tokens"]) == (False, None)
    assert "missing" in told["state"]
    assert "draft" in kvpager(capsys, "snapshot", "inspect", f"{store.path}/chat")


def test_verify_reads_companions_too(capsys, tmp_path, author, draft):
    store = FileStore(tmp_path)
    save(author, draft, store, "chat.kvsnap", text(4 * C))
    assert "saved with it" in kvpager(capsys, "snapshot", "verify", tmp_path / "chat.kvsnap")
    path = tmp_path / "chat.kvsnap.draft"
    flip(path, path.stat().st_size // 2)
    told = kvpager(capsys, "snapshot", "verify", tmp_path / "chat.kvsnap", code=1)
    assert "chat.kvsnap.draft: the checksum of chunk" in told
    path.write_bytes(b"\0" * 5000)
    told = kvpager(capsys, "snapshot", "verify", tmp_path / "chat.kvsnap", code=1)
    assert "DAMAGED" in told


def test_export_and_import_take_companions_along(capsys, tmp_path, author, draft):
    store = DirectoryStore(tmp_path / "store")
    tokens = text(4 * C + 2)
    save(author, draft, store, "chat", tokens)
    kvpager(capsys, "snapshot", "export", f"{store.path}/chat", tmp_path / "out.kvsnap")
    draft.check(FileStore(tmp_path).open("out.kvsnap.draft"), tokens)
    assert FileStore(tmp_path).entries()[0].companions == ("out.kvsnap.draft",)
    kvpager(capsys, "snapshot", "import", tmp_path / "out.kvsnap", f"{store.path}/second")
    assert {entry.name: entry.companions for entry in store.entries()} == {
        "chat": ("chat.draft",),
        "second": ("second.draft",),
    }
    draft.check(store.open("second.draft"), tokens)
    kvpager(capsys, "snapshot", "rm", f"{store.path}/second")
    assert [entry.name for entry in store.entries(companions=True)] == ["chat", "chat.draft"]


def test_a_companion_of_another_save_is_not_taken_along(capsys, tmp_path, author, draft):
    store = FileStore(tmp_path)
    save(author, draft, store, "other.kvsnap", text(4 * C, seed=3))
    save(author, draft, store, "chat.kvsnap", text(4 * C))
    (tmp_path / "other.kvsnap.draft").rename(tmp_path / "chat.kvsnap.draft")
    inspect = ("snapshot", "inspect", tmp_path / "chat.kvsnap", "--format", "json")
    (told,) = json.loads(kvpager(capsys, *inspect))["companions"]
    assert told["sound"] is False
    assert "another save" in told["state"]
    kvpager(capsys, "snapshot", "export", tmp_path / "chat.kvsnap", tmp_path / "out.kvsnap")
    assert not (tmp_path / "out.kvsnap.draft").exists()


def test_gc_tells_of_orphans(capsys, store, author, draft):
    save(author, draft, store, "chat", text(3 * C))
    manifest(store, "chat").unlink()
    assert "chat.draft" in kvpager(capsys, "snapshot", "gc", store.path)
