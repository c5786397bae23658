"""`kvpager segment rm`: takes segments out of a store."""

from __future__ import annotations

import argparse
from typing import Any

from kvpager.cli.output import check_writable, emit, emit_json
from kvpager.cli.parser import Parser
from kvpager.cli.segment.stored import add_store, find_segments
from kvpager.cli.snapshot.address import find_store
from kvpager.cli.snapshot.rm import remove
from kvpager.words import byte_size, counted


def add(verbs: Any, common: Parser) -> None:
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
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    addresses = find_segments(find_store(args.store), args.names)
    freed = remove(addresses, force=args.force)
    if args.format == "json":
        names = [address.text for address in addresses]
        emit_json(args, {"command": "segment rm", "removed": names, "bytes_freed": freed})
    else:
        emit(args, f"removed {counted(len(addresses), 'segment')}, {byte_size(freed)} freed\n")
    return 0
