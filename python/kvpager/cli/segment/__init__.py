"""`kvpager segment`: texts cached once in a store, to be used at any place of a prompt."""

from __future__ import annotations

from typing import Any

from kvpager.cli.parser import Parser
from kvpager.cli.segment import add as adding
from kvpager.cli.segment import ls, rm


def add(commands: Any, common: Parser) -> None:
    """Adds the command and its own subcommands."""
    parser = commands.add_parser(
        "segment",
        help="cache texts once in a store, to be used at any place of a prompt",
        description="Keeps the K/V of texts, such as documents, in a store; `kvpager generate "
        "--store DIR --segment NAME` puts them into a prompt at any place and in any order. In the "
        "store the segment NAME is the snapshot segment-NAME, which `kvpager snapshot` inspects, "
        "verifies, pins, exports and imports as any other.",
    )
    parser.set_defaults(parser=parser)
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for verb in (adding, ls, rm):
        verb.add(verbs, common)
