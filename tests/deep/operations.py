"""Every operation of stores and snapshots, on a world in which it has much to do."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from small_store import Author, C
from store_children import (
    A_GROWN,
    NEW,
    PAIR_GROWN,
    PROMPT,
    save_pair,
)

from deep.worlds import FILES, STORE, WORLDS, Held
from kvpager import _core
from kvpager.cli import main
from kvpager.errors import PagerError
from kvpager.stores import DirectoryStore, FileStore


class CommandFailedError(PagerError):
    """A command ended with another code than 0, and this line."""


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        world: where it works.
        run: does it; `folder` is the world's.
        after: what the world holds once it is done; None: what it held.
        again: whether doing it once more may be refused, because it is done.
        partly: whether an error may leave it done as well as not done.
    """

    world: str
    run: Callable[[Author, Path], object]
    after: Held | None = None
    again: bool = False
    partly: bool = False

    @property
    def before(self) -> Held:
        return WORLDS[self.world].holds

    @property
    def done(self) -> Held:
        return self.before if self.after is None else self.after


def _store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder / STORE, create=False)


def _files(folder: Path) -> FileStore:
    return FileStore(folder / FILES)


def _with(world: str, **changes: list[int] | None) -> Held:
    held = {**WORLDS[world].holds, **changes}
    return {name: tokens for name, tokens in held.items() if tokens is not None}


def _read_all(author: Author, reader: _core.SnapshotReader) -> None:
    for chunk in range(reader.chunks):
        reader.read_chunk(chunk)


def _create(author: Author, folder: Path) -> None:
    author.save(DirectoryStore(folder / STORE), "first", NEW)


def _restore(author: Author, reader: _core.SnapshotReader, tokens: list[int]) -> None:
    author.check_restored(reader, tokens)
    author.pager.check_invariants()


def _find(author: Author, folder: Path) -> None:
    found = _store(folder).find_prefix(author.hashes(PROMPT[:C]))
    if found is not None:  # what cannot be read now is not found
        _read_all(author, found)


def command(*arguments: str) -> Callable[[Author, Path], None]:
    """A command line; {} in an argument is the world's folder."""

    def run(_: Author, folder: Path) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([argument.replace("{}", str(folder)) for argument in arguments])
        if code:
            said = err.getvalue()
            assert said.startswith("kvpager: "), said
            assert said.count("\n") == 1, said
            raise CommandFailedError(said.strip())

    return run


OPERATIONS: dict[str, Operation] = {
    "store: create and save": Operation("empty", _create, {"first": NEW}),
    "store: open": Operation("store", lambda _, folder: _store(folder)),
    "store: settings": Operation(
        "store", lambda _, folder: DirectoryStore(folder / STORE, byte_budget="1GiB", ttl="7d")
    ),
    "store: save": Operation(
        "store",
        lambda author, folder: author.save(_store(folder), "new", NEW),
        _with("store", new=NEW),
    ),
    "store: save over": Operation(
        "store",
        lambda author, folder: author.save(_store(folder), "a", A_GROWN),
        _with("store", a=A_GROWN),
    ),
    "store: save a pair": Operation(
        "pairs",
        lambda author, folder: save_pair(author, _store(folder), "new", NEW),
        _with("pairs", new=NEW),
    ),
    "store: save over a pair": Operation(
        "pairs",
        lambda author, folder: save_pair(author, _store(folder), "a", PAIR_GROWN),
        _with("pairs", a=PAIR_GROWN),
    ),
    "store: save over a pair alone": Operation(
        "pairs",
        lambda author, folder: author.save(_store(folder), "a", PAIR_GROWN),
        _with("pairs", a=PAIR_GROWN),
    ),
    "store: read": Operation(
        "store", lambda author, folder: _read_all(author, _store(folder).open("a"))
    ),
    "store: restore": Operation(
        "store",
        lambda author, folder: _restore(
            author, _store(folder).open("a"), WORLDS["store"].holds["a"]
        ),
    ),
    "store: find a prefix": Operation("store", _find),
    "store: list": Operation("store", lambda _, folder: _store(folder).entries(companions=True)),
    "store: stats": Operation("store", lambda _, folder: _store(folder).stats()),
    "store: delete": Operation(
        "store",
        lambda _, folder: _store(folder).delete("c"),
        _with("store", c=None),
        again=True,
        partly=True,
    ),
    "store: delete a pair": Operation(
        "pairs",
        lambda _, folder: _store(folder).delete("a"),
        _with("pairs", a=None),
        again=True,
        partly=True,
    ),
    "store: pin": Operation("store", lambda _, folder: _store(folder).pin("c")),
    "store: time to live": Operation("store", lambda _, folder: _store(folder).set_ttl("c", "12h")),
    "store: gc and compaction": Operation("store", lambda _, folder: _store(folder).gc()),
    "store: rehearsed gc": Operation("store", lambda _, folder: _store(folder).gc(dry_run=True)),
    "store: verify": Operation("store", lambda _, folder: _store(folder).verify("a")),
    "file: save": Operation(
        "files",
        lambda author, folder: author.save(_files(folder), "new.kvsnap", NEW),
        _with("files", **{"new.kvsnap": NEW}),
    ),
    "file: save over": Operation(
        "files",
        lambda author, folder: author.save(_files(folder), "single.kvsnap", A_GROWN),
        _with("files", **{"single.kvsnap": A_GROWN}),
    ),
    "file: save over a pair": Operation(
        "files",
        lambda author, folder: save_pair(author, _files(folder), "pair.kvsnap", A_GROWN),  # type: ignore[arg-type]
        _with("files", **{"pair.kvsnap": A_GROWN}),
    ),
    "file: read": Operation(
        "files", lambda author, folder: _read_all(author, _files(folder).open("single.kvsnap"))
    ),
    "file: restore": Operation(
        "files",
        lambda author, folder: _restore(
            author, _files(folder).open("pair.kvsnap"), WORLDS["files"].holds["pair.kvsnap"]
        ),
    ),
    "file: list": Operation("files", lambda _, folder: _files(folder).entries()),
    "file: delete": Operation(
        "files",
        lambda _, folder: _files(folder).delete("pair.kvsnap"),
        _with("files", **{"pair.kvsnap": None}),
        again=True,
        partly=True,
    ),
    "command: snapshot ls": Operation(
        "store", command("snapshot", "ls", "{}/store", "--output", "{}/answer")
    ),
    "command: snapshot verify": Operation(
        "store", command("snapshot", "verify", "{}/store", "--output", "{}/answer")
    ),
    "command: snapshot export": Operation(
        "store", command("snapshot", "export", "{}/store/a", "{}/exported", "--force")
    ),
    "command: snapshot import": Operation(
        "files",
        command("snapshot", "import", "{}/files/single.kvsnap", "{}/store", "--force"),
        _with("files", single=WORLDS["files"].holds["single.kvsnap"]),
    ),
    "command: snapshot gc": Operation("store", command("snapshot", "gc", "{}/store")),
    "command: info": Operation("empty", command("info", "--output", "{}/answer")),
}
