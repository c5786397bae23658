"""`kvpager snapshot gc`: removes what nobody needs from a store."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_store
from kvpager.cli.snapshot.progress import byte_progress
from kvpager.cli.terminal import look
from kvpager.stores import DirectoryStore
from kvpager.words import byte_size, counted

if TYPE_CHECKING:
    from kvpager.stores import GcReport


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "gc",
        parents=[common],
        help="remove what nobody needs from a store",
        description="Removes expired snapshots, left-overs of writers that died and packs that no "
        "snapshot needs, evicts the least recently used where the store is over its budget, and "
        "gathers what is needed of packs that mostly are not. Others can use the store meanwhile.",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a directory store")
    parser.add_argument(
        "--remove-damaged",
        action="store_true",
        help="files that are damaged beyond use go too (by default they are reported)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would go, and leave everything as it is"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    folder = find_store(args.store)
    store = DirectoryStore(folder, create=False)
    with byte_progress(args, "compact") as progress:
        report = store.gc(progress, remove_damaged=args.remove_damaged, dry_run=args.dry_run)
    stats = store.stats()
    if args.format == "json":
        kept = {"bytes": stats["bytes"], "byte_budget": stats["byte_budget"]}
        said = {"command": "snapshot gc", "store": str(folder), "dry_run": args.dry_run}
        emit_json(args, {**said, **kept, **asdict(report)})
    else:
        freed, kept_bytes = byte_size(report.bytes_freed), byte_size(stats["bytes"] or 0)
        done = f"would free {freed} of {kept_bytes}" if args.dry_run else f"{freed} freed"
        kept_now = "" if args.dry_run else f", {kept_bytes} kept"
        lines = [f"{folder}: {done}{kept_now}", *_lines(args, report)]
        emit(args, "\n".join(lines) + "\n")
    return 0


def _lines(args: argparse.Namespace, report: GcReport) -> Iterator[str]:
    field = look(args).field
    for name, names in (
        ("expired", report.expired),
        ("evicted", report.evicted),
        ("orphaned", report.orphans),
    ):
        if names:
            yield field(name, ", ".join(names), wide=9, indent="  ")
    counts = (
        (report.temporaries, "left-over temporary file"),
        (report.packs_removed, "unneeded pack"),
        (report.sidecars, "stray note"),
    )
    gone = ", ".join(counted(count, noun) for count, noun in counts if count)
    if gone:
        yield field("removed", gone, wide=9, indent="  ")
    if report.packs_compacted:
        packs = counted(report.packs_compacted, "pack")
        moved = "" if args.dry_run else f", {counted(report.chunks_moved, 'chunk')} moved"
        yield field("compacted", packs + moved, wide=9, indent="  ")
    for path in report.would_remove:
        yield field("to go", path, wide=9, indent="  ")
    for name, found in (
        ("removed", report.damaged_removed),
        ("DAMAGED", report.damaged),
        ("skipped", report.skipped),
    ):
        for path, why in found:
            told = why if why.startswith(path) else f"{path}: {why}"
            yield field(name, told, wide=9, indent="  ")
