"""The segments that a store has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpager.cli.failure import CliError
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import Address, offer
from kvpager.cli.snapshot.opened import Opened
from kvpager.errors import InvalidArgumentError, PagerError
from kvpager.stores import DirectoryStore, StoreEntry
from kvpager.stores.segments import PREFIX, SegmentNote


@dataclass(frozen=True)
class StoredSegment:
    """A segment, as its store's entry tells it.

    Attributes:
        name: which finds it.
        entry: of its snapshot.
        problem: why it cannot be used, or not without computing a part again; None where it is
            sound.
    """

    name: str
    entry: StoreEntry
    problem: str | None

    @property
    def tokens(self) -> int:
        """Of its text; 0 where that cannot be read."""
        return 0 if self.entry.segment is None else self.entry.segment.tokens


def add_store(parser: Parser) -> None:
    """--store, which every verb needs."""
    parser.add_argument("--store", metavar="DIR", required=True, help="folder of a directory store")


def stored_segments(store: DirectoryStore) -> list[StoredSegment]:
    """All that a name finds, damaged ones included, in order of names."""
    found = []
    for entry in store.entries():
        if not entry.name.startswith(PREFIX):
            continue
        problem = entry.error
        if entry.segment is None and problem is None:
            try:
                opened = Opened.at(Address(entry.name, Path(entry.path)))
                SegmentNote.of(opened.session, len(opened.reader.tokens), entry.path)
            except InvalidArgumentError:
                continue  # a session with such a name
            except PagerError as error:
                problem = str(error)
        found.append(StoredSegment(entry.name.removeprefix(PREFIX), entry, problem))
    return found


def find_segments(folder: Path, names: Sequence[str]) -> list[Address]:
    """The snapshots of these segments.

    Raises:
        CliError: one is not there; names the closest ones there are.
    """
    known = {
        part.name: part.entry for part in stored_segments(DirectoryStore(folder, create=False))
    }
    for name in names:
        if name not in known:
            raise CliError(f"{name}: no such segment in the store {folder}" + offer(name, known))
    return [
        Address(name, Path(known[name].path), folder, known[name].name)
        for name in dict.fromkeys(names)
    ]
