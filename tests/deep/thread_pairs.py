"""Every public entry point of the bindings beside every one that changes something.

    python -m deep.thread_pairs [--only PART ...] [--rounds N] --json FILE

Two threads, one for each, some rounds from the same start, in a process of their own per pair with
a time limit. Nothing may crash or hang; what is refused is refused with a typed error; in the end
the pager's invariants hold and what the store has is whole. Under ASan and TSan: start it with the
instrumented package, as `make asan` does.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deep.interposer import workplace
from deep.record import chosen, write
from deep.scenes import SCENES
from kvpager.errors import PagerError

CALLS = 8  # of each thread in a round
PATIENCE_S = 60.0


@dataclass
class Pairs:
    """What became of the pairs of one entry point.

    Attributes:
        pairs: tried.
        calls: made by both threads together.
        refused: of these, those that raised an error of kvpager's.
        wrong: crashes, hangs, untyped errors, and what did not hold in the end.
    """

    pairs: int = 0
    calls: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def run_pair(scene_name: str, first: str, second: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs it here, in a process that may be lost."""
    sys.setswitchinterval(1e-5)  # so that they meet within a call too
    make, looks, changes = SCENES[scene_name]
    actions = [{**looks, **changes}[name] for name in (first, second)]
    told: dict[str, Any] = {"calls": 0, "refused": 0, "wrong": []}
    guard = threading.Lock()

    def work(scene: Any, number: int, start: threading.Barrier) -> None:
        calls = refused = 0
        start.wait()
        for _ in range(CALLS):
            calls += 1
            try:
                actions[number](scene)
            except PagerError:
                refused += 1
            except Exception as error:
                with guard:
                    told["wrong"].append(_in_a_line(error))
        with guard:
            told["calls"] += calls
            told["refused"] += refused

    for _ in range(rounds):
        scene = make(folder)
        start = threading.Barrier(2)
        threads = [threading.Thread(target=work, args=(scene, n, start)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            scene.ends()
        except Exception as error:
            told["wrong"].append("in the end: " + _in_a_line(error))
    told["wrong"] = sorted(set(told["wrong"]))
    return told


def _in_a_line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said} at {Path(where.filename).name}:{where.lineno}"


def in_a_child(scene: str, first: str, second: str, rounds: int) -> dict[str, Any]:
    """The same in a fork, whose end it reports too."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as trace, workplace() as folder:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(trace.fileno(), sys.stderr.fileno())
                faulthandler.enable(trace)
                faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=trace)
                told = run_pair(scene, first, second, rounds, folder)
                os.write(said.fileno(), json.dumps(told).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        ended = _wait(child)
        said.seek(0)
        trace.seek(0)
        text = said.read()
        log = " | ".join(trace.read().decode(errors="replace").split("\n"))
    if ended == 0 and text:
        told = json.loads(text)
        if "Sanitizer" in log:
            told["wrong"].append(log[:2000])
        return dict(told)
    return {"calls": 0, "refused": 0, "wrong": [f"{_told(ended)}: {log[:1500]}"]}


def _wait(child: int) -> int:
    """The status with which it ends; a child that does not is killed."""
    end = time.monotonic() + PATIENCE_S + 10
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _told(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""], metavar="ENTRY POINT")
    parser.add_argument("--beside", nargs="*", default=[""], metavar="ENTRY POINT")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    outcomes: dict[str, Pairs] = {}
    for scene, (_, looks, changes) in SCENES.items():
        entries = [*looks, *changes]
        for first in chosen(entries, options.only):
            outcome = outcomes[first] = Pairs()
            # A pair of two that change something is tried once, with either as the first.
            beside = [c for c in chosen(changes, options.beside) if c not in outcomes or c == first]
            for second in beside:
                told = in_a_child(scene, first, second, options.rounds)
                outcome.pairs += 1
                outcome.calls += told["calls"]
                outcome.refused += told["refused"]
                outcome.wrong += [f"beside {second}: {what}" for what in told["wrong"]]
            print(
                f"{first:32} {outcome.pairs:3} pairs {outcome.calls:6} calls "
                f"{outcome.refused:6} refused {len(outcome.wrong):3} wrong",
                flush=True,
            )
            for line in itertools.islice(outcome.wrong, 6):
                print(f"    {line[:400]}", flush=True)
            write(options.json, "entry point", outcomes, rounds=options.rounds)
    return int(any(outcome.wrong for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
