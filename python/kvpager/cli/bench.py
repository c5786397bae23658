"""`kvpager bench`: measures kvpager's speed beside peers in the same run.

The benchmarks are `bench/kvpager_bench` of a checkout, in no wheel: this finds that folder and runs
it as a module, which reads its own command line.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from kvpager.cli.failure import CliError
from kvpager.cli.parser import Commands


def add(commands: Commands) -> None:
    """Adds the command."""
    about = "measure speed beside peers, from a checkout: the suite, or single questions"
    commands.add("bench", run, about, "", parents=[], add_help=False).unread = "words"


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
    before = sys.argv
    sys.argv = ["kvpager bench", *args.words]
    try:
        runpy.run_module("kvpager_bench", run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def bench_folder() -> Path:
    """The checkout's folder of benchmarks, beside the package of its editable install."""
    return Path(__file__).resolve().parents[3] / "bench"
