"""`kvpager snapshot`: looking into saved sessions, checking, comparing, moving and keeping them."""

from __future__ import annotations

from typing import Any

from kvpager.cli.parser import Parser
from kvpager.cli.snapshot import diff, inspect, move, store, verify

_EPILOG = """\
SNAPSHOT is a file, or STORE/NAME for one that the directory store STORE keeps.
Exit codes: 0; 1 for a failure, for damage found (verify) and for snapshots that
differ (diff); 2 for a wrong command line; 3 where verify or diff could not find
out; 130 when interrupted, 143 when terminated. Nothing half-written stays.
"""


def add(commands: Any, common: Parser) -> None:
    """Adds the command and its own subcommands."""
    parser = commands.add_parser(
        "snapshot",
        help="look into saved sessions, check, compare, move and keep them",
        description="Looks into saved sessions, checks, compares and moves them, and keeps the "
        "stores they are in.",
        epilog=" ".join(_EPILOG.split()),
    )
    parser.set_defaults(parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for module in (inspect, verify, diff, move, store):
        module.add(verbs, common)
