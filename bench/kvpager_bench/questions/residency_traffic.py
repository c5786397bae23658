"""In what unit chunks should be resident: whole, per layer, or per (layer, kv head).

    kvpager bench residency_traffic --

Records what every (layer, kv head) of the shipped model selects while it answers needle questions,
decode step by decode step, with the scores the ledger has after each, and plays the record against
pools of equal bytes behind a link. What crosses the link per token is counted: pages that attention
reads in place because they are not in the pool, and units copied into the pool.

    in place   a page that is missed is read where it is; after the step up to `recall` chunks'
               worth of units come into the pool, by the pager's policies ("qk": its scores with
               hysteresis; "lru"). "qk" with whole chunks is what the pager does.
    promote    what is missed is copied into the pool first, in LRU order.

The unit never changes a result. The shipped model has 4 selectors, an 8B model 288: for that shape
the record is played as if its heads agreed as these do, and as if 72 groups of 4 were independent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch

from kvpager import Engine, PagerConfig, TopK
from kvpager.config import DEFAULT_SCORER
from kvpager.pager import ROW_COMMIT, Forward, Sequence
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report

CHUNKS = 32
QUIET = subjects.RECENT + 2 * 64
PREFILL_POOL = 2048
ANSWER_TOKENS = 4
SEED = 1

# Of an 8B model: 36 layers, 8 kv heads of 128, bfloat16; a page of 64 tokens.
BIG_PAGES = 36 * 8
BIG_PAGE_BYTES = 64 * 128 * 2 * 2

# The rows that are kept: all at this pool, and at the longest context of an 8B model these ways, as
# unit, misses, policy and recall.
KEPT_POOL = 4096
AGREE, INDEPENDENT = "8B, heads agree", "8B, heads independent"
KEPT_WAYS = (
    ("chunk", "in place", "qk", 4),  # the pager's
    ("chunk", "in place", "qk", 0),
    ("page", "in place", "qk", 4),
    ("page", "in place", "lru", 4),
    ("page", "promote", "lru", 0),
)

Array: TypeAlias = "np.ndarray[Any, Any]"

COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("chunks_selected", "per kv head"),
    Column("pool", "tokens"),
    Column("unit", text=True),
    Column("misses", text=True),
    Column("policy", text=True),
    Column("recall", "chunks per step"),
    Column("unit_kib", "KiB"),
    Column("needed_kib", "KiB/token"),
    Column("in_place_kib", "KiB/token"),
    Column("copied_kib", "KiB/token"),
    Column("link_kib", "KiB/token"),
    Column("moves", "per token"),
    Column("pages_in_pool", "% of pages read"),
    Column("over_best_page", "x bytes"),
)


@dataclass
class Step:
    """One decode step: pages read [selectors, chunks] and scores [chunks], as the ledger has them
    afterwards. Sealed chunks only; what is not sealed is always in the pool."""

    read: Array
    score: Array


@dataclass
class Recording:
    """The steps of all questions; [0, sinks) and [recent, chunks) are sheltered by the pager."""

    steps: list[Step]
    chunks: int
    heads: int  # selectors per layer
    page_bytes: int
    sheltered: Array  # [chunks] bool
    score: Array  # [chunks], before the first step

    @property
    def selectors(self) -> int:
        return int(self.steps[0].read.shape[0])


class RecordingForward:
    """A forward that keeps its committing rows' queries, to ask afterwards what they chose."""

    def __init__(self, forward: Forward, rows: list[tuple[int, Sequence, int]]) -> None:
        self._forward = forward
        self._rows = rows
        self._queries: list[tuple[int, int, torch.Tensor]] = []
        self.pages: set[tuple[int, int, int]] = set()  # chunk, layer, kv head
        self.scores: list[float] = []

    def attend(self, layer: int, q: torch.Tensor, *rest: Any, **call: Any) -> torch.Tensor:
        for index, _, _ in self._rows:
            self._queries.append((layer, index, q[index].clone()))
        out: torch.Tensor = self._forward.attend(layer, q, *rest, **call)
        return out

    def commit(self, *arguments: Any, **options: Any) -> None:
        self._forward.commit(*arguments, **options)
        by_row = {index: (sequence, position) for index, sequence, position in self._rows}
        for layer, index, q in self._queries:
            sequence, position = by_row[index]
            for head, chunks in enumerate(sequence.select(layer, q, position=position)):
                self.pages.update((chunk, layer, head) for chunk in chunks)
            self.scores = [chunk.qk_score for chunk in sequence.ledger()]

    def __enter__(self) -> RecordingForward:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forward.abort()


def record_steps(engine: Engine, tokens: int, needles: int) -> Recording:
    """What every decode step of every question read, in order."""
    asked = subjects.questions(tokens, needles, seed=SEED, quiet=QUIET)
    session = engine.session()
    session.prefill(asked.document.ids)
    harness.require_deterministic(
        lambda: _answer(session, asked.prompts[0]), f"answers at {tokens} tokens"
    )
    layout = engine.layout
    chunks = tokens // layout.chunk_tokens
    before = np.array([chunk.qk_score for chunk in session.ledger()][:chunks])
    forwards: list[RecordingForward] = []
    begin = engine.pager.begin

    def recording_begin(sequences: Any, positions: Any, tokens: Any, kinds: Any) -> Any:
        forward = begin(sequences, positions, tokens, kinds)
        rows = [
            (i, sequence, int(positions[i]))
            for i, sequence in enumerate(sequences)
            if sequence is not None and kinds[i] == ROW_COMMIT
        ]
        forwards.append(RecordingForward(forward, rows))
        return forwards[-1]

    engine.pager.begin = recording_begin  # type: ignore[method-assign]
    try:
        for prompt in asked.prompts:
            with session.fork() as fork:
                fork.append(prompt)
                forwards.pop()  # the question's own rows are a small prefill, not a decode step
                fork.generate(ANSWER_TOKENS, eos=None).tokens.tolist()
    finally:
        engine.pager.begin = begin  # type: ignore[method-assign]
        session.close()
    steps = []
    for forward in forwards:
        read = np.zeros((layout.layers * layout.kv_heads, chunks), dtype=bool)
        for chunk, layer, head in forward.pages:
            if chunk < chunks:
                read[layer * layout.kv_heads + head, chunk] = True
        steps.append(Step(read, np.array(forward.scores[:chunks])))
    selection = engine.config.selection
    assert isinstance(selection, TopK)
    sheltered = np.zeros(chunks, dtype=bool)
    sheltered[: -(-selection.sinks // layout.chunk_tokens)] = True
    sheltered[chunks - -(-selection.recent // layout.chunk_tokens) :] = True
    return Recording(
        steps,
        chunks,
        layout.kv_heads,
        layout.chunk_bytes // (layout.layers * layout.kv_heads),
        sheltered,
        before,
    )


def _answer(session: Any, prompt: list[int]) -> list[int]:
    with session.fork() as fork:
        fork.append(prompt)
        answer: list[int] = fork.generate(ANSWER_TOKENS).tokens.tolist()
        return answer


def independent(record: Recording, groups: int, seed: int = SEED) -> Recording:
    """A record of `groups` times the selectors, where each group reads other chunks: its own are
    relabelled at random, the sheltered ones apart, which all heads read."""
    free = np.flatnonzero(~record.sheltered)
    generator = np.random.default_rng(seed)
    places = []
    for _ in range(groups):
        place = np.arange(record.chunks)
        place[free] = generator.permutation(free)
        places.append(place)
    steps = [
        Step(
            np.concatenate([step.read[:, place] for place in places]),
            np.mean([step.score[place] for place in places], axis=0),
        )
        for step in record.steps
    ]
    score = np.mean([record.score[place] for place in places], axis=0)
    return replace(record, steps=steps, score=score)


def agreeing(record: Recording, groups: int) -> Recording:
    """A record of `groups` times the selectors, each group reading what the recorded one did."""
    steps = [Step(np.tile(step.read, (groups, 1)), step.score) for step in record.steps]
    return replace(record, steps=steps)


@dataclass(frozen=True)
class Unit:
    """What is moved and held as one: `pages` selectors of a chunk, next to each other."""

    name: str
    pages: int

    def wanted(self, read: Array) -> Array:
        """read [selectors, chunks] -> [units of a chunk, chunks]: whether any of its pages is."""
        return np.asarray(read.reshape(-1, self.pages, read.shape[1]).any(axis=1))


@dataclass(frozen=True)
class Way:
    """How a miss is met, and what comes into the pool."""

    misses: str  # "in place" or "promote"
    policy: str  # "qk" or "lru"
    recall: int = 0  # chunks' worth of units per step, where misses are read in place


IN_PLACE, PROMOTE = "in place", "promote"
PAGER = Way(IN_PLACE, "qk", 4)
PROMOTING = Way(PROMOTE, "lru")
WAYS = (PAGER, Way(IN_PLACE, "qk", 1), Way(IN_PLACE, "lru", 4), Way(IN_PLACE, "qk", 0), PROMOTING)


@dataclass
class Traffic:
    """Pages over all steps, and units copied in."""

    needed: int = 0
    in_place: int = 0
    copied_units: int = 0
    found: int = 0


class Pool:
    """Which units are in the pool, with what decides who leaves."""

    def __init__(
        self, record: Recording, unit: Unit, way: Way, chunks: int, hysteresis: float
    ) -> None:
        per_chunk = record.selectors // unit.pages
        self.way = way
        self.hysteresis = hysteresis
        self.capacity = chunks * per_chunk
        self.sheltered = np.tile(record.sheltered, (per_chunk, 1))
        self.used = np.tile(np.arange(record.chunks, dtype=np.int64), (per_chunk, 1))
        self.score = np.tile(record.score, (per_chunk, 1))
        self.held = np.zeros_like(self.sheltered)
        # What a prefill leaves behind: the sheltered chunks, and of the others the last to leave.
        order = self._leaving_order(np.ones_like(self.held))
        self.held.flat[order[len(order) - self.capacity :]] = True

    def _leaving_order(self, among: Array) -> Array:
        """Flat indices of `among`, the first to leave first: csrc/core/policy.cc leaves_before."""
        flat = np.flatnonzero(among)
        score = self.score.flat[flat] if self.way.policy == "qk" else np.zeros(len(flat))
        keys = (flat, self.used.flat[flat], score, self.sheltered.flat[flat])
        order: Array = flat[np.lexsort(keys)]
        return order

    def after(self, step: Step, wanted: Array, clock: int) -> None:
        self.used[wanted] = clock
        self.score[:] = step.score

    def promote(self, wanted: Array) -> int:
        """Copies in all that is wanted and not held, the least recently used leaving; how many."""
        missing = np.flatnonzero(wanted & ~self.held)
        if wanted.sum() > self.capacity:  # what is held is used, the rest streams through
            return len(missing)
        leaving = self._leaving_order(self.held & ~wanted)
        short = max(0, len(missing) + int(self.held.sum()) - self.capacity)
        self.held.flat[leaving[:short]] = False
        self.held.flat[missing] = True
        return len(missing)

    def recall(self, wanted: Array, count: int) -> int:
        """The best of what was missed, while worth a victim: recall_ahead of the pager."""
        best = self._leaving_order(wanted & ~self.held)[::-1][:count]
        victims = self._leaving_order(self.held)[: len(best)]
        moved = 0
        for candidate, victim in zip(best, victims):
            if self.sheltered.flat[victim]:
                break
            if self.way.policy == "lru":
                worth = self.used.flat[candidate] > self.used.flat[victim]
            else:
                least = self.score.flat[victim] * (1 + self.hysteresis)
                worth = self.score.flat[candidate] > least
            if not worth:
                break
            self.held.flat[victim] = False
            self.held.flat[candidate] = True
            moved += 1
        return moved


def play(record: Recording, unit: Unit, way: Way, pool_chunks: int) -> Traffic:
    """One block of the pool is the unsealed chunk's; the rest starts as a prefill leaves it."""
    hysteresis = PagerConfig(pool_tokens=PREFILL_POOL).hysteresis
    pool = Pool(record, unit, way, pool_chunks - 1, hysteresis)
    per_chunk = record.selectors // unit.pages
    traffic = Traffic()
    for number, step in enumerate(record.steps):
        clock = record.chunks + number
        wanted = unit.wanted(step.read)
        held = np.repeat(pool.held, unit.pages, axis=0)
        needed, found = int(step.read.sum()), int((step.read & held).sum())
        traffic.needed += needed
        traffic.found += found
        if way.misses == PROMOTE:
            traffic.copied_units += pool.promote(wanted)
            pool.after(step, wanted, clock)
        else:
            traffic.in_place += needed - found
            pool.after(step, wanted, clock)
            traffic.copied_units += pool.recall(wanted, way.recall * per_chunk)
    return traffic


def add_rows(
    report: Report, shape: str, record: Recording, context: int, chunks: int, pool: int
) -> None:
    """Every unit in every way, with pools of equal bytes."""
    units = [Unit("page", 1), Unit("layer slice", record.heads), Unit("chunk", record.selectors)]
    if shape != subjects.SHIPPED:
        units = [units[0], units[2]]
    per_step = len(record.steps)
    kib = record.page_bytes / 1024
    played = [(unit, way, play(record, unit, way, pool // 64)) for unit in units for way in WAYS]
    link = [kib * (moved.in_place + moved.copied_units * unit.pages) for unit, _, moved in played]
    least = min(moved for (unit, _, _), moved in zip(played, link) if unit.name == "page")
    for (unit, way, moved), crossed in zip(played, link):
        report.add(
            shape=shape,
            context=context,
            chunks_selected=chunks,
            pool=pool,
            unit=unit.name,
            misses=way.misses,
            policy=way.policy,
            recall=way.recall,
            unit_kib=unit.pages * kib,
            needed_kib=kib * moved.needed / per_step,
            in_place_kib=kib * moved.in_place / per_step,
            copied_kib=kib * unit.pages * moved.copied_units / per_step,
            link_kib=crossed / per_step,
            moves=moved.copied_units / per_step,
            pages_in_pool=100 * moved.found / moved.needed,
            over_best_page=crossed / max(least, kib),
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--pools", type=harness.parse_ints, default=[2048, 4096, 8192])
    parser.add_argument("--chunks", type=harness.parse_ints, default=[8, CHUNKS])
    parser.add_argument("--needles", type=int, default=64, help="questions of each record")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.needles, arguments.chunks = 8, [8]
    contexts = arguments.contexts or ([4096] if arguments.quick else [16384, 32768])
    pools = [2048] if arguments.quick else arguments.pools
    environment = harness.start(arguments)
    report = Report(
        harness.report_name("residency_traffic", arguments),
        "Bytes across the link per decoded token by the unit of residency, on trained keys",
        COLUMNS,
        {
            "scorer": DEFAULT_SCORER,
            "questions": arguments.needles,
            "hysteresis": PagerConfig(pool_tokens=PREFILL_POOL).hysteresis,
            "big_pages_per_chunk": BIG_PAGES,
            "big_page_bytes": BIG_PAGE_BYTES,
        },
        environment,
    )
    model = subjects.load_model(subjects.SHIPPED)
    for tokens in contexts:
        for chunks in arguments.chunks:
            config = PagerConfig(pool_tokens=PREFILL_POOL, selection=TopK(chunks=chunks))
            with Engine(model, config) as engine:
                record = record_steps(engine, tokens, arguments.needles)
            groups = BIG_PAGES // record.selectors
            big = replace(record, heads=8, page_bytes=BIG_PAGE_BYTES)
            shapes = {
                subjects.SHIPPED: record,
                AGREE: agreeing(big, groups),
                INDEPENDENT: independent(big, groups),
            }
            for pool in pools:
                for shape, played in shapes.items():
                    add_rows(report, shape, played, tokens, chunks, pool)
                    print(f"{tokens} tokens, {chunks} chunks, pool {pool}, {shape}", flush=True)
    judge(report)
    kept(report).finish()


def kept(report: Report) -> Report:
    """The report with those of its rows that are kept."""
    longest = max(report.number(row, "context") for row in report.rows)
    rows = [
        row
        for row in report.rows
        if row["pool"] == KEPT_POOL
        or (
            (row["context"] == longest and row["shape"] in (AGREE, INDEPENDENT))
            and (row["unit"], row["misses"], row["policy"], row["recall"]) in KEPT_WAYS
        )
    ]
    settings = {**report.settings, "rows_measured": len(report.rows)}
    return replace(report, rows=rows, settings=settings)


def judge(report: Report) -> None:
    """The pager's way against the best way with pages, by shape."""
    for shape in dict.fromkeys(str(row["shape"]) for row in report.rows):
        rows = [
            row
            for row in report.rows
            if (row["shape"], row["unit"]) == (shape, "chunk")
            and (row["misses"], row["policy"], row["recall"]) == tuple(vars(PAGER).values())
        ]
        ratios = [report.number(row, "over_best_page") for row in rows]
        report.judge(
            f"{shape}: whole chunks by the pager's policy, misses read in place, move at most "
            "twice the bytes of the best way with pages",
            max(ratios) <= 2,
            f"{min(ratios):.2f} to {max(ratios):.2f} times",
        )


if __name__ == "__main__":
    main()
