"""What a change costs: this tree's decode, prefill, save and restore beside another checkout's.

    git worktree add ../before v0.1 && (cd ../before && make build)
    .venv/bin/python bench/against.py ../before/.venv/bin/python

Each checkout runs in a process of its own, with its own environment. The two take turns, one short
round each, in an order that changes, and what is told is the ratio of such pairs: a machine whose
speed drifts changes both. Both get the same tokens. Neither can be told from the other by what ran
before it: every prompt is new, and its session is closed when the round ends.

Two processes of one checkout differ by some percent, by where their memory happens to lie. So the
processes are started anew several times, and the interval is one of starts: each draws its pairs.

The figures go to bench/results/against.json, or to --output, with the commits of both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parent / "results" / "against.json"
ROUND = {  # tokens of a round, or how often: some tenths of a second, where a step takes so little
    "decode tiny-fp32": 128,
    "decode tiny-fp32, 16 sessions": 40,
    "decode gqa8-bf16": 16,
    "prefill tiny-fp32": 4096,
    "prefill gqa8-bf16": 512,
    "save tiny-fp32": 40,
    "save tiny-fp32, to a store": 80,
    "restore tiny-fp32": 800,
}
MODELS = {"tiny-fp32": "shipped", "gqa8-bf16": "gqa8-bf16"}
SAVED = 4096  # tokens of what is saved
CONTEXT = 200  # tokens before what is decoded
LAYERS = 4
APART = 1_000_000  # between the prompts of two works, so that none is found by its hash

Seconds = tuple[float, float]  # of the clock, of the processor


def measure(
    ours: str, other: str, works: Sequence[str], starts: int, pairs: int, threads: int
) -> dict[str, Any]:
    """Seconds of each round, of both checkouts in turn."""
    rounds: dict[str, list[list[tuple[Seconds, Seconds]]]] = {work: [] for work in works}
    order = random.Random(0)
    for start in range(starts):
        runners = [_Runner(ours, threads), _Runner(other, threads)]
        try:
            for work in works:
                rounds[work].append([])
                for number in range(-1, pairs):
                    pair: list[Seconds] = [(0.0, 0.0)] * 2
                    for which in order.sample([0, 1], 2):
                        pair[which] = runners[which].round(work, pairs * start + number)
                    if number >= 0:
                        rounds[work][-1].append((pair[0], pair[1]))
        finally:
            for runner in runners:
                runner.close()
        print(f"start {start + 1} of {starts} is done", flush=True)
    results: dict[str, Any] = {}
    for work, seconds in rounds.items():
        results[work] = {
            kind: summary([[(a[i], b[i]) for a, b in one] for one in seconds])
            for i, kind in enumerate(("clock", "processor"))
        }
        for kind, found in results[work].items():
            print(f"{work:32} {kind:10} {line(found)}", flush=True)
    return results


def summary(starts: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Ratio of pairs (this tree's seconds over the other's): median, and its 95 % interval.

    The interval is a bootstrap over starts, and over the pairs of each.
    """
    ratios = [[a / b for a, b in one] for one in starts]
    draw = random.Random(1)
    medians = sorted(
        statistics.median(
            ratio
            for one in draw.choices(ratios, k=len(ratios))
            for ratio in draw.choices(one, k=len(one))
        )
        for _ in range(2000)
    )
    ours, theirs = zip(*(pair for one in starts for pair in one))
    return {
        "starts": len(starts),
        "pairs": len(ours),
        "ratio": statistics.median(ratio for one in ratios for ratio in one),
        "ratio_low": medians[49],
        "ratio_high": medians[1949],
        "fastest_ratio": min(ours) / min(theirs),
        "seconds": statistics.median(ours),
        "other_seconds": statistics.median(theirs),
    }


def line(found: dict[str, Any]) -> str:
    """A result, for people."""
    return (
        f"{found['ratio']:.4f} of the other's time ({found['ratio_low']:.4f} to "
        f"{found['ratio_high']:.4f}; fastest rounds {found['fastest_ratio']:.4f}; "
        f"{1e3 * found['seconds']:.1f} ms a round)"
    )


def timed(call: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


class _Runner:
    """A process of one checkout that runs a round when told."""

    def __init__(self, python: str, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [python, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )
        if self._answer() != "ready":
            raise SystemExit(f"{python} did not start")

    def round(self, work: str, number: int) -> Seconds:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work, number]) + "\n")
        self._process.stdin.flush()
        wall, cpu = self._answer().split()
        return float(wall), float(cpu)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def serve() -> None:
    """The child: reads [work, number] by line, answers with seconds."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    works = Works()
    print("ready", flush=True)
    for request in sys.stdin:
        work, number = json.loads(request)
        print(*works.run(work, number), flush=True)


class Works:
    """What is timed, in the child. A work is what to do, an engine, and perhaps how."""

    def __init__(self) -> None:
        from kvpager import Engine
        from kvpager_bench import subjects

        self._engines = {
            name: Engine(subjects.load_model(shape, layers=LAYERS), pool_tokens=8192)
            for name, shape in MODELS.items()
        }

    def run(self, work: str, number: int) -> Seconds:
        kind, _, rest = work.partition(" ")
        name, _, how = rest.partition(", ")
        found: Seconds = getattr(self, kind)(self._engines[name], ROUND[work], number, how)
        return found

    @staticmethod
    def _ids(engine: Any, tokens: int, number: int) -> Any:
        import numpy as np

        return np.random.default_rng(number + 1000).integers(8, engine.vocab_size, tokens)

    def decode(self, engine: Any, tokens: int, number: int, how: str) -> Seconds:
        sessions = [engine.session() for _ in range(int(how.split()[0]) if how else 1)]
        for i, session in enumerate(sessions):
            session.prefill(self._ids(engine, CONTEXT, 100 * number + i))
        stream = engine.generate_many(sessions, tokens, eos=None)
        for _ in range(2 * len(sessions)):
            next(stream)
        seconds = timed(lambda: list(stream))
        for session in sessions:
            session.close()
        return seconds

    def prefill(self, engine: Any, tokens: int, number: int, how: str) -> Seconds:
        prompt = self._ids(engine, tokens, number)
        with engine.session() as session:
            return timed(lambda: session.prefill(prompt))

    def save(self, engine: Any, times: int, number: int, how: str) -> Seconds:
        from kvpager import DirectoryStore

        with _folder() as folder, engine.session() as session:
            session.prefill(self._ids(engine, SAVED, number + APART))
            if not how:
                return timed(lambda: [session.save(folder / "saved.kvsnap") for _ in range(times)])
            store = DirectoryStore(folder / "store")
            return timed(lambda: [session.save(f"turn-{i}", store=store) for i in range(times)])

    def restore(self, engine: Any, times: int, number: int, how: str) -> Seconds:
        with _folder() as folder:
            path = folder / "saved.kvsnap"
            with engine.session() as session:
                session.prefill(self._ids(engine, SAVED, number + APART))
                session.save(path)
            return timed(lambda: [engine.restore(path).close() for _ in range(times)])


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory, where there is room: a disk would be most of the time, and the same for both."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("other", nargs="?", help="the other checkout's python")
    parser.add_argument("--starts", type=int, default=10, help="processes of each (default: 10)")
    parser.add_argument("--pairs", type=int, default=8, help="rounds of each start (default: 8)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: 2)")
    parser.add_argument("--only", nargs="*", default=[*ROUND], choices=[*ROUND], metavar="WORK")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT.name}")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.other is None or not Path(arguments.other).exists():
        parser.error(
            f"other is {arguments.other!r}; expected the path of another checkout's python"
        )
    from kvpager_bench import harness

    other = str(Path(arguments.other).absolute())  # not resolved: a link decides the environment
    o = arguments
    report = {
        "what": "seconds of this tree over those of the other, per round of the same work",
        "environment": {**harness.environment(), "threads": o.threads},
        "other_commit": _commit(Path(other).parents[2]),
        "results": measure(sys.executable, other, o.only, o.starts, o.pairs, o.threads),
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {arguments.output}")


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
