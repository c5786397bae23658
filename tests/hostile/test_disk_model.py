"""What the model of a disk after a power failure allows, and what it does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deep.disk_model import Disk, Event, Tree, read_record, signature, write_tree

WHOLE = 64


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A folder with one file, `old`, of four letters."""
    (tmp_path / "old").write_bytes(b"aaaa")
    return Disk(tmp_path)


def trees(disk: Disk, torn: int = 0) -> list[Tree]:
    found = {signature(tree): tree for tree in disk.trees(random.Random(0), WHOLE, torn)}
    return list(found.values())


def contents(disk: Disk, name: str, torn: int = 0) -> set[bytes | None]:
    return {tree.get(name) for tree in trees(disk, torn)}


def create(disk: Disk, name: str, data: bytes, number: str = "77") -> None:
    disk.apply(Event("create", (f"{disk.top}/{name}", number)))
    disk.apply(Event("write", (number, "0"), data))


def test_a_write_that_was_not_synced_may_be_lost_and_one_that_was_may_not(disk: Disk) -> None:
    (number,) = disk.files
    disk.apply(Event("write", (number, "2"), b"bb"))
    assert contents(disk, "old") == {b"aaaa", b"aabb"}
    disk.apply(Event("sync", (number,)))
    assert contents(disk, "old") == {b"aabb"}


def test_a_new_file_lasts_once_it_and_its_folder_are_synced(disk: Disk) -> None:
    create(disk, "new", b"n")
    assert contents(disk, "new") == {None, b"", b"n"}
    disk.apply(Event("sync", ("77",)))
    assert contents(disk, "new") == {None, b"n"}
    disk.apply(Event("sync-folder", (disk.top,)))
    assert contents(disk, "new") == {b"n"}


def test_a_rename_happens_whole_or_not_at_all(disk: Disk) -> None:
    create(disk, "new", b"n")
    disk.apply(Event("sync", ("77",)))
    disk.apply(Event("sync-folder", (disk.top,)))
    disk.apply(Event("rename", (f"{disk.top}/new", f"{disk.top}/old")))
    both = [{"old": b"aaaa", "new": b"n"}, {"old": b"n"}]
    assert sorted(trees(disk), key=len) == sorted(both, key=len)


def test_an_exchange_keeps_both_files(disk: Disk) -> None:
    create(disk, "new", b"n")
    disk.apply(Event("sync", ("77",)))
    disk.apply(Event("sync-folder", (disk.top,)))
    disk.apply(Event("exchange", (f"{disk.top}/new", f"{disk.top}/old")))
    assert {tuple(sorted(t.items())) for t in trees(disk)} == {
        (("new", b"n"), ("old", b"aaaa")),
        (("new", b"aaaa"), ("old", b"n")),
    }


def test_a_removal_that_was_not_synced_may_not_have_happened(disk: Disk) -> None:
    disk.apply(Event("unlink", (f"{disk.top}/old",)))
    assert contents(disk, "old") == {None, b"aaaa"}
    disk.apply(Event("sync-folder", (disk.top,)))
    assert contents(disk, "old") == {None}


def test_what_is_in_a_folder_is_lost_with_the_folder(disk: Disk) -> None:
    disk.apply(Event("mkdir", (f"{disk.top}/below",)))
    create(disk, "below/new", b"n")
    disk.apply(Event("sync", ("77",)))
    disk.apply(Event("sync-folder", (f"{disk.top}/below",)))
    assert {"below" in tree for tree in trees(disk)} == {True, False}
    assert all(tree["below/new"] == b"n" for tree in trees(disk) if "below" in tree)


def test_a_write_may_be_torn_where_a_disk_writes_a_piece(disk: Disk) -> None:
    (number,) = disk.files
    disk.apply(Event("write", (number, "0"), b"b" * 1300))
    found = contents(disk, "old", torn=200)
    assert b"aaaa" in found
    assert b"b" * 1300 in found
    torn = found - {b"aaaa", b"b" * 1300}
    assert torn
    for content in torn:
        assert content is not None
        pieces = [content[at : at + 512] for at in range(0, len(content), 512)]
        assert all(len(set(piece.strip(b"\0"))) <= 1 for piece in pieces)


def test_a_change_of_size_may_be_lost_too(disk: Disk) -> None:
    (number,) = disk.files
    disk.apply(Event("allocate", (number, "6")))
    assert contents(disk, "old") == {b"aaaa", b"aaaa\0\0"}
    disk.apply(Event("truncate", (number, "1")))
    assert contents(disk, "old") == {b"aaaa", b"a"}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"create\t/a\t7\t0\nwrite\t7\t3\t4\nx\ny\nmark\tdone\t0\n")
    assert read_record(path) == [
        Event("create", ("/a", "7")),
        Event("write", ("7", "3"), b"x\ny\n"),
        Event("mark", ("done",)),
    ]


def test_a_tree_is_written_as_it_says(tmp_path: Path) -> None:
    write_tree({"a": b"1", "below": None, "below/b": b"2"}, tmp_path / "made")
    assert Disk(tmp_path / "made").folders.keys() == {
        str(tmp_path / "made"),
        str(tmp_path / "made" / "below"),
    }
    assert (tmp_path / "made" / "below" / "b").read_bytes() == b"2"
