"""In what unit chunks should be recalled: whole, per layer, or per (layer, kv head).

    python bench/residency_traffic.py

Records which chunks every (layer, kv head) of the shipped model selects while it answers needle
questions, decode step by decode step, and plays the same record against pools of equal bytes whose
unit is the whole chunk, the layer's slice of it or the page of one kv head, all with LRU. The unit
never changes a result; it decides how many bytes a step moves and how many moves they come in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import harness
import subjects
import torch
from harness import Column, Report

from kvpager import ROW_COMMIT, Engine, Forward, PagerConfig, Sequence, TopK
from kvpager.config import DEFAULT_SCORER

CHUNKS = 32
QUIET = subjects.RECENT + 2 * 64
PREFILL_POOL = 2048
ANSWER_TOKENS = 4

Page: TypeAlias = "tuple[int, int, int]"  # chunk, layer, kv head
Key: TypeAlias = "Callable[[Page], Hashable]"

COLUMNS = (
    Column("context", "tokens"),
    Column("chunks_selected", "per kv head"),
    Column("pool", "tokens"),
    Column("unit", text=True),
    Column("unit_kib", "KiB"),
    Column("distinct_per_step"),
    Column("needed_kib_per_step", "KiB"),
    Column("recalled_kib_per_token", "KiB"),
    Column("moves_per_token"),
    Column("hit_rate", "%"),
    Column("over_page", "x bytes"),
)


class RecordingForward:
    """A forward that keeps its committing rows' queries, to ask afterwards what they chose."""

    def __init__(self, forward: Forward, rows: list[tuple[int, Sequence, int]]) -> None:
        self._forward = forward
        self._rows = rows
        self._queries: list[tuple[int, int, torch.Tensor]] = []
        self.pages: set[Page] = set()

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

    def __enter__(self) -> RecordingForward:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forward.abort()


@dataclass(frozen=True)
class Unit:
    """What is moved and held as one."""

    name: str
    of: Key
    bytes: int


def record_steps(engine: Engine, tokens: int, needles: int) -> list[set[Page]]:
    """The pages of every decode step of every question, in order."""
    asked = subjects.questions(tokens, needles, seed=1, quiet=QUIET)
    session = engine.session()
    session.prefill(asked.document.ids)
    harness.require_deterministic(
        lambda: _answer(session, asked.prompts[0]), f"answers at {tokens} tokens"
    )
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
                list(fork.generate(ANSWER_TOKENS, eos=None))
    finally:
        engine.pager.begin = begin  # type: ignore[method-assign]
        session.close()
    return [forward.pages for forward in forwards]


def _answer(session: Any, prompt: list[int]) -> list[int]:
    with session.fork() as fork:
        fork.append(prompt)
        return list(fork.generate(ANSWER_TOKENS))


@dataclass
class Traffic:
    """What a pool of one unit moved over a record."""

    misses: int
    accesses: int
    distinct_per_step: float


def play(steps: list[set[Page]], unit: Unit, pool_bytes: int) -> Traffic:
    """LRU over units; a step that needs more than the pool holds streams the rest."""
    capacity = pool_bytes // unit.bytes
    held: OrderedDict[Hashable, None] = OrderedDict()
    misses = accesses = 0
    for pages in steps:
        needed = sorted({unit.of(page) for page in pages}, key=repr)
        accesses += len(needed)
        for key in needed:
            if key in held:
                held.move_to_end(key)
                continue
            misses += 1
            held[key] = None
            if len(held) > capacity:
                held.popitem(last=False)
    return Traffic(misses, accesses, accesses / len(steps))


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
    record = harness.start(arguments)
    report = Report(
        harness.report_name("residency_traffic", arguments),
        "Bytes and moves per decoded token by the unit of residency, on trained keys",
        COLUMNS,
        {"scorer": DEFAULT_SCORER, "questions": arguments.needles, "policy": "lru"},
        record,
    )
    model = subjects.load_model(subjects.SHIPPED)
    for tokens in contexts:
        for chunks in arguments.chunks:
            config = PagerConfig(pool_tokens=PREFILL_POOL, selection=TopK(chunks=chunks))
            with Engine(model, config) as engine:
                steps = record_steps(engine, tokens, arguments.needles)
                layout = engine.layout
            page = layout.chunk_bytes // (layout.layers * layout.kv_heads)
            units = (
                Unit("page", lambda page: page, page),
                Unit("layer slice", lambda page: page[:2], page * layout.kv_heads),
                Unit("chunk", lambda page: page[0], layout.chunk_bytes),
            )
            for pool in arguments.pools:
                pool_bytes = pool // layout.chunk_tokens * layout.chunk_bytes
                add_rows(
                    report,
                    tokens,
                    chunks,
                    pool,
                    [(unit, play(steps, unit, pool_bytes)) for unit in units],
                    len(steps),
                )
    judge(report)
    report.finish()


def add_rows(
    report: Report,
    tokens: int,
    chunks: int,
    pool: int,
    traffic: list[tuple[Unit, Traffic]],
    steps: int,
) -> None:
    least = max(1, traffic[0][1].misses * traffic[0][0].bytes)
    for unit, moved in traffic:
        report.add(
            context=tokens,
            chunks_selected=chunks,
            pool=pool,
            unit=unit.name,
            unit_kib=unit.bytes / 1024,
            distinct_per_step=moved.distinct_per_step,
            needed_kib_per_step=moved.distinct_per_step * unit.bytes / 1024,
            recalled_kib_per_token=moved.misses * unit.bytes / 1024 / steps,
            moves_per_token=moved.misses / steps,
            hit_rate=100 * (1 - moved.misses / moved.accesses),
            over_page=moved.misses * unit.bytes / least,
        )


def judge(report: Report) -> None:
    rows = [row for row in report.rows if row["unit"] == "chunk"]
    ratios = [report.number(row, "over_page") for row in rows]
    report.judge(
        "whole chunks move at most twice the bytes of single pages",
        max(ratios) <= 2,
        f"{min(ratios):.2f} to {max(ratios):.2f} times",
    )


if __name__ == "__main__":
    main()
