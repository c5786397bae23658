"""The time to the first token over cached documents in a new order, repaired.

    kvpager bench segments
    kvpager bench segments -- --lengths 4096,16384    # what is published

The clock runs from the look-up to the first token, and no way was ever warmed with the text it is
measured on: every repetition has documents and a question of its own. That its documents are
cached as segments, and the system prompt in every way but the cold one, is what the comparison
takes for granted; it is done before the clock starts. Texts are random: what is computed is
meaningless, what it costs is not. Rows of a probe, with which a policy finds out what to repair,
are counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpager import Engine, PagerConfig, Session
from kvpager.segments import DEFAULT_REPAIR, NoRepair, RepairPolicy, Stitched
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, MissingNumberError, Report, Timing, timed
from kvpager_bench.study import Asked, Option, Study, Table

FASTER = 3.0  # times, at FASTER_FROM tokens and more
FASTER_FROM = 16384
COLD = "full prefill"
PREFIX = "prefix caching"
FLOOR = "stitched, no repair"
STITCHED = "stitched, default repair"
WAYS = (COLD, PREFIX, FLOOR, STITCHED)
CHUNK_TOKENS = 64
SYSTEM_SHARE = 16  # the system prompt is this part of the text
DOCUMENT_TOKENS = 1024  # on average; there are 8 at least

Ids: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Text:
    """documents: in the order in which they stand. All ids int32."""

    documents: tuple[Ids, ...]
    question: Ids


@dataclass(frozen=True)
class Turn:
    """One turn in one way; seconds of its parts are within `seconds`, and 0 where it has no such.

    assemble_s: of `Engine.assemble`; probe_s: of that, what the policy took to choose.
    recomputed, moved: tokens of segments.
    """

    seconds: float
    rows: int
    assemble_s: float = 0.0
    probe_s: float = 0.0
    probe_rows: float = 0.0
    recomputed: int = 0
    moved: int = 0


class Timed:
    """A repair policy that also says how long it took to choose."""

    def __init__(self, policy: RepairPolicy) -> None:
        self.policy = policy
        self.seconds = 0.0

    def choose(self, text: Stitched) -> npt.NDArray[np.bool_]:
        """What the policy chooses."""
        seconds, chosen = timed(lambda: self.policy.choose(text))
        self.seconds += seconds
        mask: npt.NDArray[np.bool_] = chosen
        return mask

    def __repr__(self) -> str:
        return repr(self.policy)


def document_count(context: int) -> int:
    """Of a text."""
    return max(8, context // DOCUMENT_TOKENS)


def lengths(context: int, generator: np.random.Generator) -> tuple[int, list[int]]:
    """Tokens of the system prompt, and of documents that fill the rest; no two need be equal."""
    system = max(32, context // SYSTEM_SHARE)
    shares = generator.uniform(0.6, 1.4, document_count(context))
    sizes = np.floor(shares / shares.sum() * (context - system)).astype(int)
    sizes[-1] += context - system - int(sizes.sum())
    return system, [int(size) for size in sizes]


def texts(model: Any, context: int, seed: int) -> tuple[Ids, Iterator[Text]]:
    """A system prompt, and texts of `context` tokens with it, without end; question on top."""
    generator = np.random.default_rng(seed)
    vocab = int(model.config.vocab_size)

    def random(count: int) -> Ids:
        return generator.integers(8, vocab, count, dtype=np.int32)

    def made() -> Iterator[Text]:
        while True:
            yield Text(tuple(map(random, lengths(context, generator)[1])), random(16))

    return random(lengths(context, generator)[0]), made()


class Turntable:
    """One engine whose ways share nothing but the model: each has a salt, or is new every time."""

    def __init__(self, model: Any, context: int, system: Ids) -> None:
        room = -(-(4 * context + 4096) // CHUNK_TOKENS) * CHUNK_TOKENS
        self.engine = Engine(model, PagerConfig(pool_tokens=room, chunk_tokens=CHUNK_TOKENS))
        self.context = context
        self._system = system
        self._colds = 0
        # They keep the system prompt cached.
        self._held = [self._salted(PREFIX), self.engine.session()]
        for session in self._held:
            session.prefill(system)

    def round(self, text: Text, first: int = 0) -> dict[str, Turn]:
        """One turn in every way, beginning with the way of this number."""
        names = [
            self.engine.cache_segment(ids, name=f"document-{i}").name
            for i, ids in enumerate(text.documents)
        ]
        ways: dict[str, Callable[[], Turn]] = {
            COLD: lambda: self._prefilled(text, None),
            PREFIX: lambda: self._prefilled(text, PREFIX),
            FLOOR: lambda: self._stitched(text, names, NoRepair()),
            STITCHED: lambda: self._stitched(text, names, DEFAULT_REPAIR),
        }
        turns = {}
        for way in (*WAYS[first:], *WAYS[:first]):
            gc.collect()
            turns[way] = ways[way]()
        for name in names:
            self.engine.segments.remove(name)
        return {way: turns[way] for way in WAYS}

    def close(self) -> None:
        self.engine.close()

    def _prefilled(self, text: Text, salt: str | None) -> Turn:
        if salt is None:
            self._colds += 1
            salt = f"cold {self._colds}"
        ids = np.concatenate([self._system, *text.documents, text.question])
        start = time.perf_counter()
        with self._salted(salt) as session:
            session.prefill(ids)
            next(session.generate(1, eos=None, stream="tokens"))
            seconds = time.perf_counter() - start
            return Turn(seconds, session.tokens_computed)

    def _stitched(self, text: Text, names: list[str], repair: RepairPolicy) -> Turn:
        policy = Timed(repair)
        start = time.perf_counter()
        with self.engine.assemble([self._system, *names, text.question], repair=policy) as session:
            assembled = time.perf_counter() - start
            next(session.generate(1, eos=None, stream="tokens"))
            seconds = time.perf_counter() - start
            report = session.assembly
        if report is None:
            raise MissingNumberError("an assembled session has no report")
        tokens = sum(map(len, text.documents))
        return Turn(
            seconds,
            report.rows,
            assembled,
            policy.seconds,
            float(report.probe_rows),
            tokens - report.moved,
            report.moved,
        )

    def _salted(self, salt: str) -> Session:
        return self.engine.adopt(self.engine.pager.sequence(salt=salt))


def rounds_of(model: Any, context: int, runs: int, seed: int) -> list[dict[str, Turn]]:
    """All ways, taking turns over `runs` texts after one to warm up with."""
    system, drawn = texts(model, context, seed)
    table = Turntable(model, context, system)
    try:
        table.round(next(drawn))
        return [table.round(next(drawn), run % len(WAYS)) for run in range(runs)]
    finally:
        table.close()


COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("documents"),
    Column("way", text=True),
    Column("runs"),
    Column("first_token_ms", "ms"),
    Column("fastest_ms", "ms"),
    Column("slowest_ms", "ms"),
    Column("assemble_ms", "ms"),
    Column("probe_ms", "ms"),
    Column("rows"),
    Column("probe_rows"),
    Column("recomputed", "% of documents"),
    Column("faster", "x full prefill"),
)


def add_rows(report: Report, shape: str, context: int, rounds: Sequence[dict[str, Turn]]) -> None:
    """A row per way."""
    cold = statistics.median(turns[COLD].seconds for turns in rounds)
    for way in WAYS:
        turns = [each[way] for each in rounds]
        timing = Timing(tuple(turn.seconds for turn in turns))

        def median(name: str, turns: Sequence[Turn] = turns) -> float:
            return float(statistics.median(getattr(turn, name) for turn in turns))

        recomputed, moved = median("recomputed"), median("moved")
        report.add(
            shape=shape,
            context=context,
            documents=document_count(context),
            way=way,
            runs=len(rounds),
            first_token_ms=1e3 * timing.median,
            fastest_ms=1e3 * timing.fastest,
            slowest_ms=1e3 * timing.slowest,
            assemble_ms=1e3 * median("assemble_s"),
            probe_ms=1e3 * median("probe_s"),
            rows=median("rows"),
            probe_rows=median("probe_rows"),
            recomputed=100 * recomputed / (recomputed + moved) if moved else 100.0,
            faster=cold / timing.median,
        )


def judge(report: Report) -> None:
    """Stitched beside computing all of it, and beside what a prefix cache can keep."""
    rows = {(row["shape"], row["context"], row["way"]): row for row in report.rows}
    for (shape, context, way), row in rows.items():
        if way != STITCHED:
            continue
        figure = f"first token of {harness.tokens_name(int(context))} of cached documents, {shape}"
        for peer in (COLD, PREFIX, FLOOR):
            aim = FASTER if peer == COLD and int(context) >= FASTER_FROM else None
            theirs = report.number(rows[shape, context, peer], "first_token_ms")
            ours = report.number(row, "first_token_ms")
            report.compare(figure, ours, theirs, peer, "ms", aim, lower_is_better=True)


def measure(asked: Asked) -> None:
    o, report = asked.options, asked.report()
    for shape in o.shapes:
        model = subjects.load_model(shape)
        for length in o.lengths:
            add_rows(report, shape, length, rounds_of(model, length, o.runs, o.seed))
    judge(report)


STUDY = Study(
    measure,
    (
        Table(
            "segments_first_token",
            "Time to the first token over cached documents in a new order",
            COLUMNS,
        ),
    ),
    (
        Option("shapes", [subjects.SHIPPED, "untied-fp32"], [subjects.SHIPPED]),
        Option("lengths", [FASTER_FROM], [2048], [4096, FASTER_FROM, 32768], "tokens"),
        Option("runs", 5),
        Option("seed", 1),
    ),
    {
        "chunk_tokens": CHUNK_TOKENS,
        "system_share": 1 / SYSTEM_SHARE,
        "default": repr(DEFAULT_REPAIR),
    },
)

if __name__ == "__main__":
    STUDY.main()
