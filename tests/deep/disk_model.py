"""What may be on a disk after a power failure.

The model: a file's data last once the file was synced, a folder's entries once the folder was.
Whatever came after may have happened or not, in any order, and a write may have happened in part.
An entry of a folder changes whole, and a rename within one folder, or an exchange, at once.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TORN = (512, 4096)  # bytes that a disk writes whole


@dataclass(frozen=True)
class Event:
    """One change, or a mark: the fields that interposer.cc logs, and what was written."""

    kind: str
    fields: tuple[str, ...]
    data: bytes = b""


def read_record(path: Path) -> list[Event]:
    """The events of a record, in order."""
    raw, at, events = path.read_bytes(), 0, []
    while at < len(raw):
        end = raw.index(b"\n", at)
        kind, *fields, size = raw[at:end].decode().split("\t")
        data = raw[end + 1 : end + 1 + int(size)]
        events.append(Event(kind, tuple(fields), data))
        at = end + 1 + len(data)
    return events


@dataclass
class File:
    """A file's data: what lasts, what is seen, and the changes between."""

    lasting: bytes = b""
    seen: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: a size

    def change(self, at: int, data: bytes | None) -> None:
        self.pending.append((at, data))
        self.seen = applied(self.seen, at, data)

    def sync(self) -> None:
        self.lasting, self.pending = self.seen, []


def applied(content: bytes, at: int, data: bytes | None) -> bytes:
    """`content` after data was written at `at`, or with data None after its size became `at`."""
    if data is None:
        return content[:at].ljust(at, b"\0")
    return content[:at].ljust(at, b"\0") + data + content[at + len(data) :]


Entry = File | str  # str: the path of a folder
Change = tuple[tuple[str, Entry | None], ...]  # names, and what they lead to from now on


@dataclass
class Folder:
    """A folder's entries: those that last, those that are seen, and the changes between."""

    lasting: dict[str, Entry] = field(default_factory=dict)
    seen: dict[str, Entry] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, *names: tuple[str, Entry | None]) -> None:
        self.pending.append(names)
        self.seen = after(self.seen, [names])

    def sync(self) -> None:
        self.lasting, self.pending = self.seen, []


def after(entries: dict[str, Entry], changes: Sequence[Change]) -> dict[str, Entry]:
    entries = dict(entries)
    for change in changes:
        for name, entry in change:
            if entry is None:
                entries.pop(name, None)
            else:
                entries[name] = entry
    return entries


Tree = dict[str, bytes | None]  # by relative path; None: a folder


class Disk:
    """All below one folder; what is there at the start lasts."""

    def __init__(self, top: Path) -> None:
        self.top = os.fspath(top)
        self.files: dict[str, File] = {}  # by inode number
        self.folders: dict[str, Folder] = {}
        for place, below, names in os.walk(top):
            entries: dict[str, Entry] = {name: f"{place}/{name}" for name in below}
            for name in names:
                path = Path(place, name)
                data = path.read_bytes()
                file = File(data, data)
                entries[name] = file
                self.files[str(path.stat().st_ino)] = file
            self.folders[place] = Folder(entries, dict(entries))

    def _at(self, path: str) -> tuple[Folder, str]:
        place, _, name = path.rpartition("/")
        return self.folders[place], name

    def _rename(self, source: str, goal: str, *, exchange: bool) -> None:
        (place, old), (other, new) = self._at(source), self._at(goal)
        assert place is other, "the model knows renames within a folder"
        place.change((new, place.seen[old]), (old, place.seen[new] if exchange else None))

    def apply(self, event: Event) -> None:
        """What a call did."""
        kind, fields = event.kind, event.fields
        if kind in ("write", "truncate", "allocate", "sync"):
            file = self.files[fields[0]]
            if kind == "sync":
                file.sync()
            elif kind == "write":
                file.change(int(fields[1]), event.data)
            elif kind == "truncate" or int(fields[1]) > len(file.seen):
                file.change(int(fields[1]), None)
        elif kind == "create":
            folder, name = self._at(fields[0])
            self.files[fields[1]] = File()
            folder.change((name, self.files[fields[1]]))
        elif kind == "mkdir":
            folder, name = self._at(fields[0])
            self.folders[fields[0]] = Folder()
            folder.change((name, fields[0]))
        elif kind in ("unlink", "rmdir"):
            folder, name = self._at(fields[0])
            folder.change((name, None))
        elif kind in ("rename", "exchange"):
            self._rename(fields[0], fields[1], exchange=kind == "exchange")
        elif kind == "sync-folder":
            self.folders[fields[0]].sync()
        else:
            assert kind == "mark", f"the model does not know {kind}"

    def _unsettled(self) -> list[File | Folder]:
        """Files and folders with changes that may be lost, as far as a name can lead there."""
        reached: set[int] = set()
        for folder in self.folders.values():
            for entries in (folder.lasting, folder.seen):
                reached.update(id(entry) for entry in entries.values())
        files = [f for f in self.files.values() if f.pending and id(f) in reached]
        return [*files, *(folder for folder in self.folders.values() if folder.pending)]

    def trees(self, dice: random.Random, whole: int, torn: int) -> Iterator[Tree]:
        """What may be there now.

        Args:
            dice: chooses where not all are given.
            whole: most trees in which each file and folder has all of its changes or none; where
                there are no more than that, all are given.
            torn: so many more, with any part of the changes.
        """
        unsettled = self._unsettled()
        count = 1 << len(unsettled)
        numbers = range(count)
        if count > whole:
            numbers = [0, count - 1, *(dice.randrange(count) for _ in range(whole - 2))]
        for number in numbers:
            kept = {id(one): bool(number >> i & 1) for i, one in enumerate(unsettled)}
            yield self._tree(
                lambda file: file.seen if kept.get(id(file)) else file.lasting,  # noqa: B023
                lambda folder: folder.seen if kept.get(id(folder)) else folder.lasting,  # noqa: B023
            )
        for _ in range(torn if unsettled else 0):
            yield self._tree(
                lambda file: _torn(file, dice),
                lambda folder: after(
                    folder.lasting, [c for c in folder.pending if dice.random() < 0.5]
                ),
            )

    def _tree(self, content: object, entries: object) -> Tree:
        tree: Tree = {}

        def walk(path: str, below: str) -> None:
            for name, entry in entries(self.folders[path]).items():  # type: ignore[operator]
                if isinstance(entry, str):
                    tree[f"{below}{name}"] = None
                    walk(entry, f"{below}{name}/")
                else:
                    tree[f"{below}{name}"] = content(entry)  # type: ignore[operator]

        walk(self.top, "")
        return tree


def _torn(file: File, dice: random.Random) -> bytes:
    """A file of which any part of the changes has happened."""
    content = file.lasting
    unit = dice.choice(TORN)
    share = dice.choice((0.1, 0.5, 0.9))
    for at, data in file.pending:
        if data is None:
            if dice.random() < 0.5:
                content = applied(content, at, None)
            continue
        for start in range(at - at % unit, at + len(data), unit):
            if dice.random() < share:
                first, last = max(start, at), min(start + unit, at + len(data))
                content = applied(content, first, data[first - at : last - at])
    return content


def signature(tree: Tree) -> bytes:
    """Equal for equal trees."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        data = tree[path]
        digest.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
        digest.update(data or b"")
    return digest.digest()


def write_tree(tree: Tree, folder: Path) -> None:
    """Makes it so."""
    folder.mkdir()
    for path in sorted(tree):
        data = tree[path]
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
