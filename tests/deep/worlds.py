"""Folders to work in, and what they hold: every bit of it is compared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from small_store import Author, files
from store_children import BEFORE, PAIRS_BEFORE, prepare, prepare_pairs, save_pair

from kvpager import _core
from kvpager.stores import DirectoryStore, FileStore
from kvpager.stores.names import is_temporary

Held = dict[str, list[int]]  # the tokens of each snapshot
STORE, FILES = "store", "files"  # a world is a folder with one of these in it, or with neither


@dataclass(frozen=True)
class World:
    """How a folder is made, and the snapshots it then holds."""

    make: Callable[[Author, Path], object]
    holds: Held


def _make_files(author: Author, folder: Path) -> None:
    store = FileStore(folder / FILES)
    (folder / FILES).mkdir()
    author.save(store, "single.kvsnap", BEFORE["b"])
    save_pair(author, store, "pair.kvsnap", BEFORE["a"])  # type: ignore[arg-type]


def _make_empty(_: Author, folder: Path) -> None:
    (folder / "elsewhere").mkdir()


WORLDS = {
    "store": World(lambda _, folder: prepare(os.fspath(folder / STORE)), BEFORE),
    "pairs": World(lambda _, folder: prepare_pairs(os.fspath(folder / STORE)), PAIRS_BEFORE),
    "files": World(_make_files, {"single.kvsnap": BEFORE["b"], "pair.kvsnap": BEFORE["a"]}),
    "empty": World(_make_empty, {}),
}


class Templates:
    """One of each world, made when it is first asked for, to copy from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._author = Author()

    def copy(self, world: str, to: Path) -> None:
        """Puts a fresh copy at `to`, times kept."""
        template = self._folder / world
        if not template.exists():
            template.mkdir(parents=True)
            WORLDS[world].make(self._author, template)
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(template, to)


def held(author: Author, folder: Path) -> Held:
    """What is visible in a world; asserts that each bit of it is right."""
    found: Held = {}
    if (folder / STORE / "store.json").exists():
        store = DirectoryStore(folder / STORE, create=False)
        for entry in store.entries():
            assert entry.error is None, entry.error
            reader = store.open(entry.name)
            found[entry.name] = reader.tokens.tolist()
            author.check(reader, found[entry.name])
    for path in sorted((folder / FILES).glob("*.kvsnap")):
        reader = _core.SnapshotReader.open(os.fspath(path))
        found[path.name] = reader.tokens.tolist()
        author.check(reader, found[path.name])
    return found


def left_over(folder: Path) -> list[str]:
    """After a sweep: files that nobody needs, and that should not be there."""
    spare = [
        os.fspath(path.relative_to(folder))
        for path in folder.rglob("*")
        if is_temporary(path.name) or path.name.startswith(".")
    ]
    if not (folder / STORE / "store.json").exists():
        return spare
    store = DirectoryStore(folder / STORE, create=False)
    names = [entry.name for entry in store.entries(companions=True)]
    needed = {pack for name in names for pack, _ in store.open(name).packs}
    for file in files(folder / STORE):
        room, _, name = file.partition("/")
        stem = name.removesuffix(".kvsnap").removesuffix(".json").removesuffix(".damaged")
        if stem not in (needed if room == "packs" else names):
            spare.append(file)
    return spare
