"""The segments of a store: `kvpager segment ls` and `rm`, and look-up for other commands."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import Address, find_store, offer
from kvpager.cli.snapshot.opened import Opened
from kvpager.cli.snapshot.store import remove
from kvpager.cli.terminal import Look, look
from kvpager.errors import InvalidArgumentError, PagerError
from kvpager.stores import DirectoryStore, StoreEntry
from kvpager.stores.segments import PREFIX, SegmentNote
from kvpager.words import byte_size, counted, span

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class StoredSegment:
    """A segment of a store.

    Attributes:
        name: of the segment.
        entry: of its snapshot.
        problem: why it cannot be used, or only after computing a part again; None: no damage is
            known.
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


def add_ls(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "ls",
        parents=[common],
        help="list the segments of a store: tokens, sizes, ages, pins, problems",
        description="Lists the segments of a directory store. Own bytes are those that go when "
        "the segment goes; shared ones are needed by other snapshots too.",
    )
    add_store(parser)
    parser.set_defaults(run=run_ls, parser=parser)


def run_ls(args: argparse.Namespace) -> int:
    """Runs the verb."""
    folder = find_store(args.store)
    segments = stored_segments(DirectoryStore(folder, create=False))
    listed = [_to_json(segment) for segment in segments]
    values = {"command": "segment ls", "store": str(folder), "segments": listed}
    emit_result(args, values, lambda: _text(look(args), folder, segments))
    return 0


def _to_json(segment: StoredSegment) -> dict[str, Any]:
    entry = segment.entry
    return {
        "name": segment.name,
        "snapshot": entry.name,
        "tokens": segment.tokens,
        "chunks": entry.chunks,
        "digest": None if entry.segment is None else entry.segment.digest,
        "bytes_own": entry.bytes_own,
        "bytes_shared": entry.bytes_shared,
        "created": entry.created,
        "last_used": entry.last_used,
        "pinned": entry.pinned,
        "ttl_seconds": entry.ttl_seconds,
        "problem": segment.problem,
    }


def _text(shown: Look, folder: Path, segments: Sequence[StoredSegment]) -> str:
    table = shown.render(_table(shown, folder, segments)) if segments else ""
    return table + "\n".join(_footer(shown, segments)) + "\n"


def _table(shown: Look, folder: Path, segments: Sequence[StoredSegment]) -> Table:
    now = time.time()
    table = shown.table(f"{folder}")
    table.add_column("name", overflow="fold")
    for name in ("tokens", "chunks", "own", "shared", "age", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for segment in segments:
        entry = segment.entry
        table.add_row(
            segment.name,
            f"{segment.tokens:,}",
            f"{entry.chunks:,}",
            byte_size(entry.bytes_own),
            byte_size(entry.bytes_shared),
            span(now - entry.created),
            span(now - entry.last_used),
            " ".join(["pinned"] * entry.pinned + ["DAMAGED"] * (segment.problem is not None)),
        )
    return table


def _footer(shown: Look, segments: Sequence[StoredSegment]) -> Iterator[str]:
    tokens = sum(segment.tokens for segment in segments)
    yield f"{counted(len(segments), 'segment')}, {counted(tokens, 'token')}"
    for segment in segments:
        if segment.problem:
            yield shown.field(f"{segment.name}:", segment.problem, wide=len(segment.name) + 1)


def add_rm(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "rm",
        parents=[common],
        help="take segments out of a store",
        description="Takes segments out of a store, and those of their bytes that no other "
        "snapshot needs. A pinned one is refused without --force. Sessions that were saved with "
        "a segment in them keep their own copy.",
    )
    add_store(parser)
    parser.add_argument("names", metavar="NAME", nargs="+")
    parser.add_argument("--force", action="store_true", help="pinned ones as well")
    parser.set_defaults(run=run_rm, parser=parser)


def run_rm(args: argparse.Namespace) -> int:
    """Runs the verb."""
    addresses = find_segments(find_store(args.store), args.names)
    freed = remove(addresses, force=args.force)
    names = [address.text for address in addresses]
    values = {"command": "segment rm", "removed": names, "bytes_freed": freed}
    told = f"removed {counted(len(addresses), 'segment')}, {byte_size(freed)} freed\n"
    emit_result(args, values, lambda: told)
    return 0
