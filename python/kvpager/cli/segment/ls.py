"""`kvpager segment ls`: the segments that a store has, and what they take."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.segment.stored import StoredSegment, add_store, stored_segments
from kvpager.cli.snapshot.address import find_store
from kvpager.cli.terminal import Look, look
from kvpager.stores import DirectoryStore
from kvpager.words import byte_size, counted, span

if TYPE_CHECKING:
    from rich.table import Table


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "ls",
        parents=[common],
        help="list the segments of a store: tokens, sizes, ages, pins, problems",
        description="Lists the segments of a directory store. Own bytes are those that go when "
        "the segment goes; shared ones are needed by other snapshots too.",
    )
    add_store(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    folder = find_store(args.store)
    segments = stored_segments(DirectoryStore(folder, create=False))
    if args.format == "json":
        listed = [_to_json(segment) for segment in segments]
        emit_json(args, {"command": "segment ls", "store": str(folder), "segments": listed})
    else:
        emit(args, _text(look(args), folder, segments))
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
