"""`kvpager snapshot export`, `import`, `ls`, `gc`, `pin`, `unpin`, `ttl`, `rm` and `reindex`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from cli_snapshots import (
    FRONT,
    LAYOUT,
    files_below,
    flip,
    make_major,
    refused,
    save_file,
    save_in,
    told,
    told_json,
)

from kvpager import _core
from kvpager.cli import main
from kvpager.stores import DirectoryStore, catalogue
from kvpager.stores.names import INDEX_FILES

CHUNK = LAYOUT.chunk_bytes


@pytest.fixture
def store(tmp_path):
    """Two turns of one session, and another session."""
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "turn1", 50)
    save_in(store, "turn2", 90)
    save_in(store, "other", 40, seed=1)
    return store


@pytest.fixture
def file(tmp_path):
    return save_file(tmp_path / "turn1.kvsnap", 50)


def names(capsys, store):
    return [entry["name"] for entry in told_json(capsys, "snapshot", "ls", store.path)["snapshots"]]


# export and import.


def test_an_export_holds_everything_and_has_the_same_digest(capsys, store, tmp_path):
    file = tmp_path / "turn2.kvsnap"
    before = _core.SnapshotReader.open(f"{store.path}/snapshots/turn2.kvsnap")
    values = told_json(capsys, "snapshot", "export", f"{store.path}/turn2", file)
    assert values["bytes_written"] == file.stat().st_size
    assert values["logical_digest"] == before.logical_digest
    carried = tmp_path / "elsewhere" / "turn2.kvsnap"
    carried.parent.mkdir()
    file.rename(carried)
    after = _core.SnapshotReader.open(str(carried))
    assert after.packs == []
    assert after.session == before.session
    told(capsys, "snapshot", "verify", carried)
    told(capsys, "snapshot", "diff", carried, f"{store.path}/turn2")


def test_a_file_that_is_there_is_replaced_only_by_force(capsys, store, tmp_path):
    file = tmp_path / "turn.kvsnap"
    file.write_bytes(b"precious")
    err = refused(capsys, "snapshot", "export", f"{store.path}/turn1", file)
    assert "--force" in err
    assert file.read_bytes() == b"precious"
    text = told(capsys, "snapshot", "export", f"{store.path}/turn1", file, "--force")
    words = " ".join(text.split())
    assert f"{file.stat().st_size:,} bytes" in words
    assert "50 tokens in 4 chunks" in words
    assert "as before" in words
    told(capsys, "snapshot", "verify", file)


def test_an_export_of_damaged_bytes_leaves_nothing(capsys, store, tmp_path):
    pack, _ = store.open("turn1").packs[0]
    flip(Path(store.path) / "packs" / f"{pack}.kvsnap", FRONT + CHUNK)
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.kvsnap").write_bytes(b"old")
    for name in ("new.kvsnap", "old.kvsnap"):
        err = refused(capsys, "snapshot", "export", f"{store.path}/turn2", target / name, "--force")
        assert "chunk 1" in err
    assert files_below(target) == ["old.kvsnap"]
    assert (target / "old.kvsnap").read_bytes() == b"old"


def test_a_place_that_cannot_be_written_is_refused_first(capsys, store, tmp_path):
    address = f"{store.path}/turn1"
    assert "no folder" in refused(capsys, "snapshot", "export", address, tmp_path / "no" / "x")
    assert "it is a folder" in refused(capsys, "snapshot", "export", address, tmp_path)


def test_a_pack_is_neither_exported_nor_imported(capsys, store, tmp_path):
    pack = next((Path(store.path) / "packs").glob("*.kvsnap"))
    assert "a pack" in refused(capsys, "snapshot", "export", pack, tmp_path / "x.kvsnap")
    assert "a pack" in refused(capsys, "snapshot", "import", pack, store.path)
    assert names(capsys, store) == ["other", "turn1", "turn2"]


def test_an_import_makes_a_store_and_shares_what_is_there(capsys, tmp_path):
    one = save_file(tmp_path / "one.kvsnap", 50)
    two = save_file(tmp_path / "two.kvsnap", 90)
    store = tmp_path / "fresh"
    first = told_json(capsys, "snapshot", "import", one, store)
    assert (first["name"], first["chunks_written"], first["bytes_shared"]) == ("one", 4, 0)
    second = told_json(capsys, "snapshot", "import", two, store / "second")
    assert (second["name"], second["chunks_written"]) == ("second", 3)
    assert second["bytes_shared"] == 3 * CHUNK
    assert second["logical_digest"] == _core.SnapshotReader.open(str(two)).logical_digest
    told(capsys, "snapshot", "verify", store)
    text = told(capsys, "snapshot", "import", two, store / "third")
    assert "80.0 KiB shared with other snapshots" in text


def test_an_import_goes_on_with_a_store_whose_making_was_cut_short(capsys, tmp_path, file):
    half = tmp_path / "half"
    (half / "packs").mkdir(parents=True)
    (half / "lock").touch()
    assert told_json(capsys, "snapshot", "import", file, half)["chunks_written"] == 4
    told(capsys, "snapshot", "verify", half)


def test_an_import_of_a_name_that_is_taken_needs_force(capsys, store, file):
    before = told_json(capsys, "snapshot", "inspect", f"{store.path}/turn2")
    err = refused(capsys, "snapshot", "import", file, f"{store.path}/turn2")
    assert "--force" in err
    after = told_json(capsys, "snapshot", "inspect", f"{store.path}/turn2")
    assert after == before
    told(capsys, "snapshot", "import", f"{store.path}/turn1", f"{store.path}/turn2", "--force")
    told(capsys, "snapshot", "diff", f"{store.path}/turn1", f"{store.path}/turn2")


def test_an_import_of_damaged_bytes_leaves_the_store_as_it_was(capsys, store, tmp_path):
    file = save_file(tmp_path / "bad.kvsnap", 90, seed=3)
    flip(file, FRONT + 2 * CHUNK)
    before = files_below(Path(store.path))
    assert "chunk 2" in refused(capsys, "snapshot", "import", file, store.path)
    assert files_below(Path(store.path)) == before


def test_what_is_no_snapshot_and_what_is_no_store_are_named(capsys, store, file, tmp_path):
    missing = tmp_path / "none.kvsnap"
    assert "none.kvsnap" in refused(capsys, "snapshot", "import", missing, store.path)
    assert not (tmp_path / "fresh").exists()
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "letter").write_text("dear")
    assert "no store" in refused(capsys, "snapshot", "import", file, folder)
    assert files_below(folder) == ["letter"]
    assert "a file" in refused(capsys, "snapshot", "import", file, file)
    make_major(file, 3)
    assert "version" in refused(capsys, "snapshot", "import", file, store.path)


# ls.


def test_ls_tells_every_snapshot_with_totals_against_the_budget(capsys, store):
    store = DirectoryStore(store.path, byte_budget="10MiB", ttl="7d")
    store.pin("turn1")
    store.set_ttl("other", "never")
    values = told_json(capsys, "snapshot", "ls", store.path)
    entries = {entry["name"]: entry for entry in values["snapshots"]}
    assert list(entries) == ["other", "turn1", "turn2"]
    assert [entries[name]["tokens"] for name in entries] == [40, 50, 90]
    assert entries["turn1"]["pinned"] is True
    assert entries["turn1"]["ttl_seconds"] == 7 * 86400
    assert entries["other"]["ttl_seconds"] is None
    assert entries["turn1"]["bytes_shared"] > 3 * CHUNK
    assert entries["other"]["bytes_shared"] == 0
    sizes = (path.stat().st_size for path in Path(store.path).glob("*/*"))
    assert values["totals"]["bytes"] == sum(sizes)
    assert values["totals"]["byte_budget"] == 10 * 2**20
    text = told(capsys, "snapshot", "ls", store.path)
    assert "3 snapshots" in text
    assert "of a budget of 10.0 MiB" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("turn1")]
    assert "pinned" in line
    assert "7d" in line
    assert entries["turn1"]["logical_digest"][:12] in line
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("tokens", ["turn2", "turn1", "other"]),
        ("age", ["turn2", "other", "turn1"]),
        ("used", ["turn1", "other", "turn2"]),
    ],
)
def test_ls_sorts_as_told(capsys, store, order, expected):
    for number, name in enumerate(["turn2", "other", "turn1"]):
        for suffix in (".kvsnap", ".json"):
            at = 1_700_000_000 + 100 * number
            os.utime(Path(store.path) / "snapshots" / (name + suffix), (at, at))
    values = told_json(capsys, "snapshot", "ls", store.path, "--sort", order)
    assert [entry["name"] for entry in values["snapshots"]] == expected


def test_ls_shows_a_damaged_snapshot_as_such(capsys, store):
    path = Path(store.path) / "snapshots" / "turn1.kvsnap"
    flip(path, 70)
    text = told(capsys, "snapshot", "ls", store.path)
    (line,) = [line for line in text.splitlines() if line.strip().startswith("turn1 ")]
    assert "DAMAGED" in line
    assert "turn1: " in text
    assert names(capsys, store) == ["other", "turn1", "turn2"]


def test_ls_of_an_empty_store_and_of_no_store(capsys, tmp_path, file):
    DirectoryStore(tmp_path / "empty")
    assert "0 snapshots" in told(capsys, "snapshot", "ls", tmp_path / "empty")
    for verb in ("ls", "gc"):
        assert "no such folder" in refused(capsys, "snapshot", verb, tmp_path / "none")
        assert "no store" in refused(capsys, "snapshot", verb, tmp_path)
        assert "no store" in refused(capsys, "snapshot", verb, file)
        assert not (tmp_path / "store.json").exists()


# pin, unpin, ttl, rm, gc.


def test_pin_and_unpin_are_seen_by_ls(capsys, store):
    address = f"{store.path}/turn1"
    assert told_json(capsys, "snapshot", "pin", address)["pinned"] is True
    assert store.entries()[1].pinned
    assert "not pinned" in told(capsys, "snapshot", "unpin", address)
    assert not store.entries()[1].pinned


def test_ttl_is_set_and_a_wrong_one_is_a_usage_error(capsys, store):
    address = f"{store.path}/turn1"
    assert told_json(capsys, "snapshot", "ttl", address, "12h")["ttl_seconds"] == 12 * 3600
    assert store.entries()[1].ttl_seconds == 12 * 3600
    assert "for ever" in told(capsys, "snapshot", "ttl", address, "never")
    assert "'soon'" in refused(capsys, "snapshot", "ttl", address, "soon", code=2)


def test_rm_takes_all_that_are_named_or_none(capsys, store):
    one, two = f"{store.path}/turn1", f"{store.path}/turn2"
    assert "did you mean" in refused(capsys, "snapshot", "rm", one, f"{store.path}/turn3")
    told(capsys, "snapshot", "pin", two)
    assert "pinned" in refused(capsys, "snapshot", "rm", one, two)
    assert names(capsys, store) == ["other", "turn1", "turn2"]
    before = store.stats()["bytes"]
    values = told_json(capsys, "snapshot", "rm", one, two, "--force")
    assert names(capsys, store) == ["other"]
    assert values["bytes_freed"] == before - store.stats()["bytes"] > 5 * CHUNK


def test_rm_looks_at_salts_before_it_removes_anything(capsys, store):
    save_in(store, "salted", 40, seed=2, salt="tenant")
    one, salted = f"{store.path}/turn1", f"{store.path}/salted"
    assert "saved under a salt" in refused(capsys, "snapshot", "rm", one, salted)
    assert {entry.name for entry in store.entries()} == {"other", "salted", "turn1", "turn2"}
    assert told_json(capsys, "snapshot", "rm", one, one, salted, "--force")["removed"] == [
        one,
        salted,
    ]
    assert {entry.name for entry in store.entries()} == {"other", "turn2"}


@pytest.mark.parametrize("verb", ["pin", "unpin", "rm"])
def test_a_plain_file_is_not_kept_by_any_store(capsys, file, verb):
    assert "outside any store" in refused(capsys, "snapshot", verb, file)
    assert file.exists()


def test_gc_says_what_it_removed_and_compacted(capsys, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "other", 40, seed=1)
    save_in(store, "long", 300)
    save_in(store, "short", 50)  # shares the first three chunks of it
    store.delete("long")
    told(capsys, "snapshot", "ttl", f"{store.path}/other", "1h")
    for suffix in (".kvsnap", ".json"):
        os.utime(tmp_path / "store" / "snapshots" / ("other" + suffix), (1, 1))
    leftover = tmp_path / "store" / "packs" / ".kvsnap-0123456789abcdef.tmp"
    leftover.write_bytes(b"x" * 1000)
    text = " ".join(told(capsys, "snapshot", "gc", store.path).split())
    assert "expired other removed 1 left-over temporary file" in text
    assert "compacted 1 pack, 3 chunks moved" in text
    assert names(capsys, store) == ["short"]
    values = told_json(capsys, "snapshot", "gc", store.path)
    assert (values["bytes_freed"], values["expired"]) == (0, [])
    told(capsys, "snapshot", "verify", store.path)


def test_gc_dry_run_lists_what_would_go_and_leaves_it(capsys, store):
    leftover = Path(store.path) / "packs" / ".kvsnap-0123456789abcdef.tmp"
    leftover.write_bytes(b"x" * 1000)
    text = told(capsys, "snapshot", "gc", store.path, "--dry-run")
    assert "would free 1000 B" in text
    assert str(leftover) in text
    values = told_json(capsys, "snapshot", "gc", store.path, "--dry-run")
    assert values["dry_run"] is True
    assert values["would_remove"] == [str(leftover)]
    assert leftover.exists()


def test_gc_reports_damage_and_removes_it_only_when_told(capsys, store):
    path = Path(store.path) / "snapshots" / "other.kvsnap"
    flip(path, 70)
    told(capsys, "snapshot", "ls", store.path)  # looks at every file
    assert str(path) in told(capsys, "snapshot", "gc", store.path)
    assert path.exists()
    values = told_json(capsys, "snapshot", "gc", store.path, "--remove-damaged")
    assert values["damaged_removed"][0][0] == str(path)
    assert not path.exists()
    assert names(capsys, store) == ["turn1", "turn2"]


# reindex.


def test_reindex_makes_the_index_anew_from_files_that_were_changed_in_place(capsys, store):
    manifest = Path(store.path, "snapshots", "other.kvsnap")
    was = manifest.stat()
    with manifest.open("r+b") as file:
        file.write(b"\0" * 64)
    os.utime(manifest, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert told_json(capsys, "snapshot", "ls", store.path)["totals"]["damaged"] == 0
    found = told_json(capsys, "snapshot", "reindex", store.path)
    assert (found["snapshots"], found["damaged"]) == (3, 1)
    assert "indexed 3 snapshots, 3 packs" in told(capsys, "snapshot", "reindex", store.path)
    err = refused(capsys, "snapshot", "reindex", f"{store.path}/turn1")
    assert "expected the store itself" in err


def test_a_command_that_has_many_files_to_read_says_how_far_it_is(capsys, store, monkeypatch):
    monkeypatch.setattr(catalogue, "_MANY", 5)
    monkeypatch.setattr(catalogue, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    line = "reading the files of a store for its index: 6 of 6"
    for quiet, index in (([], "there"), ([], "lost"), (["-q"], "lost")):
        if index == "lost":
            for name in INDEX_FILES:
                Path(store.path, name).unlink(missing_ok=True)
        assert main(["snapshot", "ls", store.path, *quiet]) == 0
        assert (line in capsys.readouterr().err) == (index == "lost" and not quiet)
