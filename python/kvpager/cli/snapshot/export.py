"""`kvpager snapshot export`: one file that holds everything, from wherever a snapshot is."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.file_mode import add_mode
from kvpager.cli.output import check_writable
from kvpager.cli.parser import Parser
from kvpager.cli.snapshot.address import find_snapshot
from kvpager.cli.snapshot.opened import Opened
from kvpager.cli.snapshot.options import add_snapshot
from kvpager.cli.snapshot.transfer import tell_transfer, transfer
from kvpager.stores import FileStore
from kvpager.stores.permissions import PRIVATE


def add(verbs: Any, common: Parser) -> None:
    """Adds the verb."""
    parser = verbs.add_parser(
        "export",
        parents=[common],
        help="make one self-contained file of a snapshot in a store",
        description="Writes a snapshot as one file that needs no store: to carry it elsewhere, or "
        "to keep it. Every byte is verified on the way, and the logical digest stays the same. "
        "The file appears whole or not at all.",
    )
    add_snapshot(parser)
    parser.add_argument("file", metavar="FILE", help="to write")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    add_mode(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    check_writable("--output", args.output)
    opened = Opened.at(find_snapshot(args.snapshot))
    opened.require_session("export")
    check_writable("FILE", args.file)
    if os.path.lexists(args.file) and not args.force:
        raise CliError(f"FILE {args.file}: it is there already; give --force to replace it")
    report = transfer(args, "export", opened, FileStore(mode=args.mode or PRIVATE), args.file)
    tell_transfer(args, "export", opened, report)
    return 0
