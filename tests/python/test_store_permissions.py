"""Who may read what is written: files are their owner's alone unless somebody says otherwise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_store import Author, C, packs, text

from kvpager.cli import main
from kvpager.cli.output import write_file
from kvpager.errors import InvalidArgumentError
from kvpager.stores import DirectoryStore, FileStore
from kvpager.stores.companions import CompanionSnapshot
from kvpager.stores.files import parse_mode
from kvpager.stores.names import INDEX_FILES


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """Of the files and of the folders there are."""
    everything = [folder, *folder.rglob("*")]
    return (
        {mode_of(path) for path in everything if path.is_file()},
        {mode_of(path) for path in everything if path.is_dir()},
    )


def companion(author: Author) -> CompanionSnapshot:
    return CompanionSnapshot("draft", author.content(text(2 * C)), "{}", "{}")


def use_everything(author: Author, store: DirectoryStore) -> None:
    """Leaves files of every kind that a store has."""
    author.save(store, "one", text(6 * C + 1, seed=1), companions=[companion(author)])
    author.save(store, "two", text(3 * C, seed=2))
    store.pin("two")
    author.save(store, "three", text(8 * C, seed=3))
    pack = max(packs(store.path), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    assert store.verify("three")


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_everything_in_a_store_is_its_owners_alone(author: Author, folder: Path, mask: int) -> None:
    with umask(mask):
        store = DirectoryStore(folder)
        use_everything(author, store)
        suffixes = {path.suffix for path in folder.rglob("*.*") if path.name not in INDEX_FILES}
        assert suffixes == {".json", ".kvsnap", ".damaged"}
        assert modes(folder) == ({0o600}, {0o700})
        store.gc()
        assert modes(folder) == ({0o600}, {0o700})


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_a_mode_widens_what_is_written_whatever_the_umask_and_the_store_remembers_it(
    author: Author, folder: Path, mask: int
) -> None:
    with umask(mask):
        DirectoryStore(folder, mode=0o640)
        store = DirectoryStore(folder)
        assert store.mode == 0o640
        use_everything(author, store)
        assert modes(folder) == ({0o640}, {0o750})


def test_a_store_is_widened_for_what_comes(author: Author, folder: Path) -> None:
    author.save(DirectoryStore(folder), "old", text(C))
    store = DirectoryStore(folder, mode="660")
    author.save(store, "new", text(2 * C, seed=5))
    assert mode_of(folder / "snapshots/old.kvsnap") == 0o600
    assert mode_of(folder / "snapshots/new.kvsnap") == 0o660
    assert mode_of(folder / "lock") == 0o660
    assert {mode_of(part) for part in (folder, folder / "packs", folder / "snapshots")} == {0o770}


@pytest.mark.parametrize(
    ("existing", "wanted", "found"),
    [(None, 0o600, 0o600), (None, 0o644, 0o644), (0o644, 0o600, 0o600), (0o600, 0o644, 0o600),
     (0o400, 0o600, 0o400), (0o640, 0o664, 0o640)],
)  # fmt: skip
def test_a_file_that_is_replaced_keeps_the_permissions_that_it_lacks(
    author: Author, tmp_path: Path, existing: int | None, wanted: int, found: int
) -> None:
    path = tmp_path / "chat.kvsnap"
    store = FileStore(mode=wanted)
    if existing is not None:
        author.save(store, str(path), text(C))
        path.chmod(existing)
    with umask(0o022):
        author.save(store, str(path), text(2 * C + 1), companions=[companion(author)])
    assert mode_of(path) == found
    assert mode_of(f"{path}.draft") == wanted
    author.check(store.open(str(path)), text(2 * C + 1))


def test_a_stricter_manifest_of_a_store_stays_so(
    author: Author, store: DirectoryStore, folder: Path
) -> None:
    author.save(store, "one", text(C))
    wide = DirectoryStore(folder, mode=0o644)
    author.save(wide, "one", text(2 * C))
    assert mode_of(folder / "snapshots/one.kvsnap") == 0o600


def test_what_is_being_written_is_nobody_elses(author: Author, tmp_path: Path) -> None:
    seen: set[int] = set()

    def look(done: int, total: int) -> None:
        del done, total
        seen.update(mode_of(path) for path in tmp_path.glob(".kvsnap-*.tmp"))

    with umask(0):
        author.save(FileStore(mode=0o644), str(tmp_path / "a.kvsnap"), text(2 * C), progress=look)
    assert seen == {0o600}


@pytest.mark.parametrize(
    "mode", [0o400, 0o200, 0o700, 0o1600, 0, 640, -1, "rw", "999", "", None, True, 1.5]
)
def test_a_mode_that_a_file_cannot_have_is_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="mode is"):
        FileStore(mode=mode)
    if mode is not None:
        with pytest.raises(InvalidArgumentError, match="mode is"):
            DirectoryStore(tmp_path / "store", mode=mode)
        assert list(tmp_path.iterdir()) == []


def test_output_of_a_command_is_private_and_keeps_the_mode_of_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    with umask(0o022):
        write_file(path, b"1")
        assert mode_of(path) == 0o600
        path.chmod(0o644)
        write_file(path, b"2")
    assert mode_of(path) == 0o644


def test_a_command_writes_with_the_mode_it_is_given(author: Author, tmp_path: Path) -> None:
    author.save(FileStore(), str(tmp_path / "a.kvsnap"), text(C))
    (tmp_path / "s").mkdir()
    for arguments, written in (
        (["export", str(tmp_path / "a.kvsnap"), str(tmp_path / "b.kvsnap")], "b.kvsnap"),
        (["import", str(tmp_path / "a.kvsnap"), str(tmp_path / "s/c")], "s/c/snapshots/a.kvsnap"),
    ):
        assert main(["snapshot", *arguments, "--file-mode", "644"]) == 0
        assert mode_of(tmp_path / written) == 0o644
    assert main(["snapshot", "export", "a", "b", "--file-mode", "700"]) == 2


def test_modes_are_octal_in_text() -> None:
    assert [parse_mode("mode", text) for text in ("640", "0640", "0o640")] == [0o640] * 3
