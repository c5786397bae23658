"""What lies in a store and is not what the store put there: no snapshot loses its bytes to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from small_store import Author, C, packs, text

from kvpager.errors import CorruptSnapshotError
from kvpager.stores import DirectoryStore


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


MOVES = [as_symlink, as_dangling_symlink, as_fifo, as_folder, in_a_folder]


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
