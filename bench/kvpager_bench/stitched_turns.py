"""Time to the first token of a question about documents that are cached, in three ways.

The clock runs from the look-up to the first token, and no way was ever warmed with the text it is
measured on: every repetition has documents and a question of its own. That its documents are
cached as segments, and the system prompt in every way but the cold one, is what the comparison
takes for granted; it is done before the clock starts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpager import Engine, PagerConfig, Session
from kvpager.segments import DEFAULT_REPAIR, NoRepair, RepairPolicy, Stitched
from kvpager_bench import subjects
from kvpager_bench.harness import MissingNumberError, Timing
from kvpager_bench.two_hop import TwoHopTask

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


@dataclass(frozen=True)
class Turns:
    """The results of all repetitions of one way."""

    turns: tuple[Turn, ...]

    @property
    def timing(self) -> Timing:
        """Of look-up to first token."""
        return Timing(tuple(turn.seconds for turn in self.turns))

    def median(self, name: str) -> float:
        """Of one of a turn's numbers."""
        return float(statistics.median(getattr(turn, name) for turn in self.turns))


class Timed:
    """A repair policy that also says how long it took to choose."""

    def __init__(self, policy: RepairPolicy) -> None:
        self.policy = policy
        self.seconds = 0.0

    def choose(self, text: Stitched) -> npt.NDArray[np.bool_]:
        """What the policy chooses."""
        start = time.perf_counter()
        chosen = self.policy.choose(text)
        self.seconds += time.perf_counter() - start
        return chosen

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


def texts(shape: str, model: Any, context: int, seed: int) -> tuple[Ids, Iterator[Text]]:
    """A system prompt, and texts of `context` tokens with it, without end; question on top.

    Of the two-hop task for the model that was trained on it; random ids for any other.
    """
    generator = np.random.default_rng(seed)
    if shape == subjects.TWO_HOP:
        task = TwoHopTask(model.config.vocab_size, seed)
        system = task.text([256, 256], 1, system=lengths(context, generator)[0]).system

        def drawn() -> Iterator[Text]:
            while True:
                text = task.text(lengths(context, generator)[1], facts=16)
                documents = tuple(ids.astype(np.int32) for ids in text.documents)
                yield Text(documents, text.facts[0].query.astype(np.int32))

        return system.astype(np.int32), drawn()
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


def measure(shape: str, model: Any, context: int, runs: int, seed: int) -> dict[str, Turns]:
    """All ways, taking turns over `runs` texts after one to warm up with."""
    system, drawn = texts(shape, model, context, seed)
    table = Turntable(model, context, system)
    try:
        table.round(next(drawn))
        rounds = [table.round(next(drawn), run % len(WAYS)) for run in range(runs)]
    finally:
        table.close()
    return {way: Turns(tuple(turns[way] for turns in rounds)) for way in WAYS}
