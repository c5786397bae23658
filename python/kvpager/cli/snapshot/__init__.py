"""`kvpager snapshot`: looking into saved sessions, checking, comparing, moving and keeping them."""

from __future__ import annotations

from kvpager.cli.parser import Commands
from kvpager.cli.snapshot import diff, inspect, move, store, verify

_EPILOG = """\
SNAPSHOT is a file, or STORE/NAME for one that the directory store STORE keeps.
Exit codes: 0; 1 for a failure, for damage found (verify) and for snapshots that
differ (diff); 2 for a wrong command line; 3 where verify or diff could not find
out; 130 when interrupted, 143 when terminated. Nothing half-written stays.
"""


def add(commands: Commands) -> None:
    """Adds the command and its own subcommands."""
    about = "look into saved sessions, check, compare, move and keep them"
    told = "Looks into saved sessions, checks, compares and moves them, and keeps their stores."
    parser = commands.add("snapshot", None, about, told, parents=[], epilog=_EPILOG)
    verbs = Commands(parser, "verb")
    for module in (inspect, verify, diff, move, store):
        module.add(verbs)
