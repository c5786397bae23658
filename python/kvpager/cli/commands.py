"""The table of subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvpager._version import __version__
from kvpager.cli import bench, demo, generate, info, plan, score, segment, serve, snapshot, verify
from kvpager.cli.parser import Parser

_EPILOG = "Each command has its own --help. KVPAGER_DEBUG=1 shows where an error came from."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; `args.run(args)` runs it and returns the exit code.

    Raises:
        UsageError: an unknown or malformed argument; names the closest known one.
    """
    parser = Parser(
        prog="kvpager",
        description="Pages the KV cache of long conversations through a hard-bounded pool.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    common = _common()
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for module in (demo, generate, serve, score, verify, bench, plan, info, segment, snapshot):
        module.add(commands, common)
    return parser.parse_all(argv)


def _common() -> Parser:
    """The options of every command."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format",
        choices=("terminal", "json"),
        default="terminal",
        help="json: one object on stdout and nothing else (default: terminal)",
    )
    group.add_argument("--output", metavar="FILE", help="write the result there, not to stdout")
    group.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, no notes: errors alone on stderr"
    )
    return parser
