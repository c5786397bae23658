"""`kvpager snapshot import`: a snapshot from a file, or another store, into a store."""

from __future__ import annotations

import argparse
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.file_mode import add_mode
from kvpager.cli.output import check_writable
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_place, find_snapshot, stored_names
from kvpager.cli.snapshot.opened import Opened
from kvpager.cli.snapshot.options import add_snapshot
from kvpager.cli.snapshot.transfer import tell_transfer, transfer
from kvpager.stores import DirectoryStore
from kvpager.stores.names import SNAPSHOT_SUFFIX


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "import",
        parents=[common],
        help="take a snapshot into a store, sharing what the store has",
        description="Takes a snapshot into a directory store. Only chunks that no snapshot of the "
        "store has are written. Every byte that is written is verified, and the logical digest "
        "stays the same.",
    )
    add_snapshot(parser)
    parser.add_argument(
        "store",
        metavar="STORE[/NAME]",
        help="a store, made if there is no such folder; the name is by default the snapshot's own",
    )
    parser.add_argument("--force", action="store_true", help="replace NAME if it is there")
    add_mode(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    address = find_snapshot(args.snapshot)
    own_name = address.name or address.path.name.removesuffix(SNAPSHOT_SUFFIX)
    folder, name = find_place(args.store, own_name)
    opened = Opened.at(address)
    opened.require_session("import")
    if name in stored_names(folder) and not args.force:
        raise CliError(
            f"{folder}/{name}: it is there already; give --force to replace it, or another name"
        )
    report = transfer(args, "import", opened, DirectoryStore(folder, mode=args.mode), name)
    tell_transfer(args, "import", opened, report)
    return 0
