"""Ctrl-C at every return of every operation: of engines, of pagers, and of stores.

    python -m deep.interrupts [--only PART ...] [--most N] --json FILE

An instant is a return from C, or of a function of kvpager's, in a frame of kvpager's. After each
interrupt nothing is left behind, the pager's invariants hold, and what is computed then has the
bits of one that nobody interrupted; of a store, every bit of what was there or of what the
operation leaves is there, and the same operation goes through.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import interrupted_engine
import interrupted_pager
import torch
from reference_models import build, make_engine
from small_store import Author

from deep.aftermath import check_goes_through, check_holds
from deep.interposer import workplace
from deep.operations import OPERATIONS, CommandFailedError
from deep.record import chosen, write
from deep.worlds import Templates
from interrupts import Tried, at_every_instant, open_files

LONG_MOST = 300  # of operations that look at the whole model, which have tens of thousands


@dataclass
class Interrupted:
    """Of one operation: how many instants it has, how many were tried, what was wrong first."""

    instants: int = 0
    interrupted: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


Trial = Callable[[], Tried]


def engine_trials(folder: Path, most: int | None) -> dict[str, Trial]:
    """Each in an engine of its own, so that a wrong one spoils no other."""
    expected = interrupted_engine.expected_logits()

    def trial(operate: Callable[[interrupted_engine.Subject], None], most: int | None) -> Tried:
        here = folder / operate.__name__
        here.mkdir()
        with make_engine(build("llama")) as engine:
            return interrupted_engine.interrupt(operate, engine, expected, here, most)

    long_most = LONG_MOST if most is None else most
    return {
        f"engine: {operate.__name__.replace('_', ' ')}": partial(
            trial, operate, long_most if operate in interrupted_engine.LONG else most
        )
        for operate in (*interrupted_engine.OPERATIONS, *interrupted_engine.LONG)
    }


def pager_trials(folder: Path) -> dict[str, Trial]:
    expected = interrupted_pager.expected_row()

    def trial(operate: Callable[[interrupted_pager.Subject], None]) -> Tried:
        here = folder / f"pager {operate.__name__}"
        here.mkdir()
        return interrupted_pager.interrupt(operate, expected, here)

    return {
        f"pager: {operate.__name__.replace('_', ' ')}": partial(trial, operate)
        for operate in interrupted_pager.OPERATIONS
    }


def store_trials(folder: Path, most: int | None) -> dict[str, Trial]:
    """The operations whose system calls fail elsewhere."""
    templates = Templates(folder / "templates")
    author = Author()
    streams = sys.stdout, sys.stderr

    def trial(name: str) -> Tried:
        operation = OPERATIONS[name]
        case = folder / "case"
        files: set[str] = set()

        def prepare() -> Path:
            sys.stdout, sys.stderr = streams  # an interrupt may keep a command's from going back
            templates.copy(operation.world, case)
            files.update(open_files())
            return case

        def check(case: Path, interrupted: bool) -> None:
            check_holds(operation, author, case, done=True, failed=interrupted)

        def operate(case: Path) -> None:
            try:
                operation.run(author, case)
            except CommandFailedError as error:  # which says so in its own way
                if "interrupted" in str(error):
                    raise KeyboardInterrupt from error
                raise

        def finish(case: Path) -> None:
            assert open_files() <= files
            check_goes_through(operation, author, case)

        return at_every_instant(prepare, operate, check, finish, most=most)

    return {name: partial(trial, name) for name in OPERATIONS}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""], metavar="PART")
    parser.add_argument("--most", type=int, help="instants of each operation (default: all)")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outcomes: dict[str, Interrupted] = {}
    with workplace() as folder:
        trials = {
            **pager_trials(folder),
            **store_trials(folder, options.most),
            **engine_trials(folder, options.most),
        }
        for name in chosen(trials, options.only):
            outcome = outcomes[name] = Interrupted()
            started = time.monotonic()
            try:
                outcome.instants, outcome.interrupted = trials[name]()
            except Exception as error:
                outcome.wrong.append(" ".join(str(error).split())[:1000])
            outcome.seconds = round(time.monotonic() - started, 1)
            print(
                f"{name:32} {outcome.instants:6} instants {outcome.interrupted:6} interrupted "
                f"{len(outcome.wrong):3} wrong {outcome.seconds:7.1f} s",
                flush=True,
            )
            for line in outcome.wrong:
                print(f"    {line}", flush=True)
            write(options.json, "operation", outcomes, most=options.most)
    return int(any(outcome.wrong for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
