"""`kvpager bench`: measures kvpager's speed beside peers in the same run.

The benchmarks are in `bench/kvpager_bench` of a checkout; no wheel has them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.cli.options import natural
from kvpager.cli.parser import Parser

TABLES, PEERS = "tables", "peers"
_EPILOG = """\
other uses:
  kvpager bench tables                        pages and pictures anew, from what was measured
  kvpager bench peers [list]                  peers that need an environment of their own
  kvpager bench peers install|remove [PEER...]
  kvpager bench QUESTION -- OPTIONS           options of one question; `-- --help` lists them

Figures go to DIR/NAME.json, what a question prints to DIR/logs/NAME.log. A peer that cannot be had
is left out and named. Exit codes: 0, also when an aim was missed (which is said); 1 a question
failed; 2 wrong command line; 130 interrupted, with what was finished kept.
"""


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        parents=[common],
        help="measure speed beside peers: the suite, or single questions",
        description="Measures on this machine, from a checkout of the sources, every figure "
        "beside a peer's or a roofline's of the same run. Without a QUESTION, the suite: "
        "under 40 minutes on 2 quiet cores.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="*", metavar="QUESTION", help="what to measure; --list names them all"
    )
    parser.add_argument("--list", action="store_true", help="the questions there are, and stop")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it works; files NAME-quick"
    )
    size.add_argument("--full", action="store_true", help="every size; files NAME-full")
    parser.add_argument("--all", action="store_true", help="every question, not the suite's alone")
    parser.add_argument(
        "--threads", type=natural, metavar="N", help="of kvpager and of every peer (default: 2)"
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="where figures go (default: bench/results)",
    )
    parser.passes_on = "extra"
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises CliError outside a checkout."""
    folder = bench_folder()
    if not (folder / "kvpager_bench").is_dir():
        raise CliError(
            "bench needs a checkout of kvpager's sources with an editable install, and this "
            f"kvpager is installed in {folder.parent} without one; clone the repository, run "
            "`make build` in it, then its .venv/bin/kvpager bench"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from kvpager_bench.command import run as measure

    return measure(args)


def bench_folder() -> Path:
    """The checkout's folder of benchmarks, beside the package of its editable install."""
    return Path(__file__).resolve().parents[3] / "bench"
