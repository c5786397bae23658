"""Decoding while the session is being saved, beside decoding alone.

    kvpager bench save_beside --
    kvpager bench save_beside -- --contexts 65536 --runs 5

The shipped model decodes greedily after a long context of random K/V. In every round it does so for
as many tokens alone as while asynchronous saves of the whole session follow one another, each to a
file of its own; which comes first changes from round to round. "cost" is what one save adds to the
time of those tokens; "save alone" is the same save while nothing else runs. The tokens must be the
same in both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvpager import Engine, PagerConfig, Session, TopK
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Timing
from kvpager_bench.places import scratch_folder

CHUNKS = 32
POOL_TOKENS = 4096
WARM_UP_TOKENS = 4

COLUMNS = (
    Column("context", "tokens"),
    Column("file_mib", "MiB"),
    Column("alone_tokens_per_s", "1/s"),
    Column("beside_tokens_per_s", "1/s"),
    Column("share_kept", "%", 2),
    Column("share_spread", "(max-min)/median", 2),
    Column("alone_slowest_ms", "ms"),
    Column("beside_slowest_ms", "ms"),
    Column("call_ms", "ms"),
    Column("save_alone_ms", "ms"),
    Column("save_beside_ms", "ms"),
    Column("cost_ms", "ms of decoding"),
    Column("saves"),
)


@dataclass
class Decoded:
    """One stretch of decoding, and the saves that ran beside it."""

    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    saves: float = 0.0  # done by the end, a part of the last one included


class Saver:
    """Asynchronous saves of a session, one after another."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.path = folder / "beside.kvsnap"
        self.calls: list[float] = []  # seconds until `save` returned
        self.saves: list[float] = []  # seconds until all was on disk
        self.bytes = 0

    def begin(self) -> None:
        start = time.perf_counter()
        self._handle = self.session.save(self.path, wait=False)
        self.calls.append(time.perf_counter() - start)

    def poll(self) -> None:
        """Begins the next one if the last has ended."""
        if self._handle.done():
            self.finish()
            self.begin()

    def done(self) -> float:
        """Saves so far, a part of the running one included."""
        written, total = self._handle.progress
        return len(self.saves) + written / max(1, total)

    def finish(self) -> None:
        report = self._handle.result()
        self.saves.append(report.seconds)
        self.bytes = report.bytes_written


def decode(session: Session, tokens: int, saver: Saver | None = None) -> Decoded:
    """Decodes in a fork; with a saver, beside its saves."""
    decoded = Decoded()
    with session.fork() as fork:
        stream = fork.generate(WARM_UP_TOKENS + tokens, eos=None, stream="tokens")
        for _ in range(WARM_UP_TOKENS):
            next(stream)
        saves_before = len(saver.saves) if saver else 0
        begin = time.perf_counter()
        if saver:
            saver.begin()
        for _ in range(tokens):
            start = time.perf_counter()
            decoded.tokens.append(next(stream))
            decoded.steps.append(time.perf_counter() - start)
            if saver:
                saver.poll()
        decoded.seconds = time.perf_counter() - begin
        if saver:
            decoded.saves = saver.done() - saves_before
            saver.finish()
    return decoded


def measure_context(
    engine: Engine, context: int, arguments: argparse.Namespace, folder: Path, report: Report
) -> None:
    with engine.session() as session:
        subjects.inject(session.sequence, engine.layout, context, vocab=engine.vocab_size)
        saver = Saver(session, folder)
        alone: list[Decoded] = []
        beside: list[Decoded] = []
        for number in range(1 + arguments.runs):
            pair = [None, saver] if number % 2 else [saver, None]
            for one in pair:
                (alone if one is None else beside).append(decode(session, arguments.tokens, one))
        del alone[0], beside[0]  # the first round is the warm-up
        if len({tuple(decoded.tokens) for decoded in (*alone, *beside)}) != 1:
            raise harness.NondeterministicSubjectError(
                f"{context} tokens: decoding beside a save gives other tokens than alone"
            )
        quiet = harness.measure(lambda: session.save(saver.path), runs=arguments.runs)
    rates = [
        Timing(tuple(decoded.seconds / arguments.tokens for decoded in runs))
        for runs in (alone, beside)
    ]
    shares = Timing(tuple(a.seconds / b.seconds for a, b in zip(alone, beside)))
    cost = statistics.median((b.seconds - a.seconds) / b.saves for a, b in zip(alone, beside))
    report.add(
        context=context,
        file_mib=saver.bytes / 2**20,
        alone_tokens_per_s=1 / rates[0].median,
        beside_tokens_per_s=1 / rates[1].median,
        share_kept=100 * shares.median,
        share_spread=shares.spread,
        alone_slowest_ms=statistics.median(max(run.steps) for run in alone) * 1e3,
        beside_slowest_ms=statistics.median(max(run.steps) for run in beside) * 1e3,
        call_ms=Timing(tuple(saver.calls)).median * 1e3,
        save_alone_ms=quiet.median * 1e3,
        save_beside_ms=Timing(tuple(saver.saves)).median * 1e3,
        cost_ms=cost * 1e3,
        saves=sum(run.saves for run in beside),
    )
    print(f"{context} tokens: {100 * shares.median:.0f}% of the tokens/s alone", flush=True)


def judge(report: Report) -> None:
    row = report.rows[-1]
    report.judge(
        "a save beside costs decoding no more than stopping for the same save would",
        all(report.number(r, "cost_ms") <= report.number(r, "save_alone_ms") for r in report.rows),
        f"{report.number(row, 'cost_ms'):.0f} of {report.number(row, 'save_alone_ms'):.0f} ms at "
        f"{harness.tokens_name(int(report.number(row, 'context')))}",
    )
    report.judge(
        "no token waits for a save: the slowest is within 3 times the slowest alone",
        all(
            report.number(r, "beside_slowest_ms") <= 3 * report.number(r, "alone_slowest_ms")
            for r in report.rows
        ),
        ", ".join(
            f"{report.number(r, 'beside_slowest_ms'):.1f} beside "
            f"{report.number(r, 'alone_slowest_ms'):.1f} ms"
            for r in report.rows
        ),
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--tokens", type=int, default=200, help="decoded per stretch")
    parser.add_argument("--folder", type=Path, help="where snapshots go; a temporary folder")
    arguments = parser.parse_args()
    contexts = arguments.contexts or [65536, 131072]
    if arguments.quick:
        arguments.tokens = 16
        contexts = arguments.contexts or [4096]
    arguments.runs = arguments.runs or (2 if arguments.quick else 7)
    record = harness.start(arguments)
    report = Report(
        harness.report_name("save_beside", arguments),
        "Decoding beside asynchronous saves of the session, and alone",
        COLUMNS,
        {"chunks": CHUNKS, "tokens": arguments.tokens, "runs": arguments.runs},
        record,
    )
    model = subjects.load_model(subjects.SHIPPED)
    config = PagerConfig(
        pool_tokens=POOL_TOKENS, selection=TopK(chunks=CHUNKS), beyond_max_positions=True
    )
    with scratch_folder(arguments.folder) as folder:
        for context in contexts:
            with Engine(model, config) as engine:
                measure_context(engine, context, arguments, folder, report)
    judge(report)
    report.finish()


if __name__ == "__main__":
    main()
