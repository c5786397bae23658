"""What `kvpager demo` takes. What it runs is loaded only when it runs: torch takes seconds."""

from __future__ import annotations

import argparse
from typing import Any

from kvpager.cli.options import add_model_options, natural, positive
from kvpager.cli.pager_options import add_pager_options
from kvpager.cli.parser import Parser

_DEFAULTS = {"pool_tokens": 2048, "selection": "topk", "chunks": 32, "host_bytes": "4GiB"}


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        parents=[common],
        help="prefill, save, restore in new processes, compare every bit",
        description="Prefills a long document through a small pool, then asks about it over "
        "several turns, each a process of its own that restores what the one before saved. At the "
        "end every logit and every byte of K/V is compared with a conversation that was never "
        "interrupted; exit code 1 if a single bit differs.",
    )
    add_model_options(parser, default="the shipped retrieval model")
    group = parser.add_argument_group("conversation")
    group.add_argument("--context", type=positive, default=32768, metavar="TOKENS")
    group.add_argument(
        "--needles", type=positive, default=16, metavar="N", help="questions, over all turns"
    )
    group.add_argument("--turns", type=positive, default=3, metavar="N", help="2 or more")
    group.add_argument("--seed", type=natural, default=0, metavar="N")
    group.add_argument(
        "--workdir", metavar="DIR", help="keep snapshots there (default: a temporary folder)"
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        default="kvpager-demo.png",
        help="residency picture (default: ./kvpager-demo.png; 'none' for none)",
    )
    add_pager_options(parser, _DEFAULTS, {"pool_tokens": ["--pool"], "host_bytes": ["--host"]})
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from kvpager.cli.demo.command import run

    return run(args)
