"""The table of subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvpager import __version__
from kvpager.cli import (
    audit,
    bench,
    chat,
    demo,
    generate,
    info,
    plan,
    score,
    serve,
    snapshot,
    verify,
)
from kvpager.cli.completion import SHELLS, PrintCompletion
from kvpager.cli.parser import Commands, Parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; `args.run(args)` runs it and returns the exit code.

    Raises:
        UsageError: an unknown or malformed argument; names the closest known one.
    """
    return command_parser().parse_all(argv)


def command_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="kvpager",
        description="Pages the KV cache of long conversations through a hard-bounded pool.",
        epilog="Each command has its own --help; --json prints one object and nothing else. "
        "KVPAGER_DEBUG=1 shows where an error came from.",
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    parser.add_argument(
        "--print-completion",
        metavar="SHELL",
        choices=SHELLS,
        action=PrintCompletion,
        help=f'a script for TAB: eval "$(kvpager --print-completion bash)" ({", ".join(SHELLS)})',
    )
    commands = Commands(parser, "command")
    for module in (demo, chat, generate, serve, score, verify, audit, bench, plan, info, snapshot):
        module.add(commands)
    return parser
