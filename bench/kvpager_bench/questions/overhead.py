"""What an engine adds to the forwards of the model itself.

    kvpager bench overhead
    kvpager bench overhead -- --full
    kvpager bench overhead -- --shapes gqa8-bf16 --layers 8

The *bare* forward is the same torch model over the same weights, in stock transformers: as many
rows as the engine's forward has, torch's own attention over those rows alone, no cache, and the
output head on as many rows. Ours is everything: admission, bookkeeping, K/V into chunks, attention
over them, the head, sampling, the commit; for a prompt also sealing its chunks (summary, checksums,
copy to the host arena). Contexts are short, so that attention is small on both sides. The shapes
have hidden size 1024 and few layers, which makes what is paid once per forward weigh more than it
would in a whole model. Beside both: transformers' own step over its DynamicCache, and its one-shot
prefill.

Differences of a few per cent are smaller than what a shared machine does to a single run, so the
runs of one round follow each other, and ratios are of each side's fastest run; medians are in the
table. Memory is touched before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvpager import Engine, PagerConfig, Session
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Subject
from kvpager_bench.study import Asked, Option, Study, Table

CHUNK_TOKENS = 64
POOL_BLOCKS = 40  # open chunks of all sessions, and a forward's
HOST_CHUNKS = 8  # so few that sealing goes through all of them while it warms
CONTEXT = 128  # tokens before the first one that is decoded alone
SESSIONS = 32
PACKED_PROMPT = 24  # tokens of each; with what is decoded, less than a chunk
PACKED_TOKENS = CHUNK_TOKENS - PACKED_PROMPT - 1
WARM_UP = 2
UNTIMED = WARM_UP + 4  # tokens: two begin a generation, one is taken apart
PREFILL_AIM, DECODE_AIM = 1 / 1.05, 1 / 1.10

COLUMNS = (
    Column("shape", text=True),
    Column("work", text=True),
    Column("rows"),
    Column("ours_ms", "ms"),
    Column("bare_ms", "ms"),
    Column("transformers_ms", "ms", optional=True),
    Column("ours_fastest_ms", "ms"),
    Column("bare_fastest_ms", "ms"),
    Column("overhead", "%", optional=True),
    Column("ours_spread", "(max-min)/median", 2),
)


@dataclass(frozen=True)
class Work:
    """One thing that an engine does in one forward, beside the bare forward of as many rows."""

    name: str
    rows: int
    runs: int
    ours: Subject
    bare: Subject
    stock: Subject | None = None
    aim: float | None = None


class Bare:
    """The stock model: its decoder on some rows and its head on a few, without a cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()

    def forward(self, rows: int, head_rows: int) -> Subject:
        ids = torch.from_numpy(subjects.random_ids(self.model, rows)).long()[None]

        @torch.inference_mode()
        def call() -> None:
            hidden = self._decoder(input_ids=ids, use_cache=False)[0]
            self._head(hidden[:, :head_rows].contiguous())

        return Subject(call)


class Ours:
    """An engine over the same weights, and what it does one forward at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.engine = Engine(
            model,
            PagerConfig(
                pool_tokens=POOL_BLOCKS * CHUNK_TOKENS,
                chunk_tokens=CHUNK_TOKENS,
                host_bytes=HOST_CHUNKS * CHUNK_TOKENS * subjects.token_bytes(model),
            ),
        )
        self._drawn = 0
        self._session: Session | None = None

    def draw(self, tokens: int) -> Any:
        """Token ids that are not cached."""
        self._drawn += 1
        return subjects.random_ids(self.model, tokens, seed=self._drawn)

    def warm(self) -> None:
        """Touches every block and every host slot once."""
        rows = self.engine.rows
        for _ in range(-(-(POOL_BLOCKS + HOST_CHUNKS) * CHUNK_TOKENS // rows)):
            with self.engine.session() as session:
                session.prefill(self.draw(rows))

    def prefilling(self, tokens: int) -> Subject:
        state: dict[str, Any] = {}

        def before() -> None:
            if "session" in state:
                state["session"].close()
            state["session"], state["ids"] = self.engine.session(), self.draw(tokens)

        return Subject(lambda: state["session"].prefill(state["ids"]), before)

    def decoding(self, count: int, prompt: int, new_tokens: int) -> Subject:
        """One more token of each of `count` sessions, two forwards after their prompts."""
        subjects.record_steps(self.engine, count)
        sessions = [self.engine.session() for _ in range(count)]
        self.engine.prefill_many((session, self.draw(prompt)) for session in sessions)
        stream: Iterator[Any] = self.engine.generate_many(sessions, new_tokens, eos=None)

        def call() -> None:
            for _ in range(count):
                next(stream)

        call()  # from the prompts' own logits
        call()
        return Subject(call)


def works(ours: Ours, bare: Bare, runs: int, *, full: bool) -> Iterator[Work]:
    """Each made when it is its turn: sessions hold blocks that others need."""
    counts, rows = ours.engine.row_counts, ours.engine.rows
    head = counts.head
    smaller = counts.smaller if full else counts.smaller[-1:]
    for count in (rows, *reversed(smaller)):
        yield Work(
            f"prefill of {count} tokens",
            count,
            max(1, runs // 2),
            ours.prefilling(count),
            bare.forward(count, head[0]),
            stock_prefilling(bare.model, count) if count == rows else None,
            PREFILL_AIM if count == rows else None,
        )
    yield Work(
        "decode, one session",
        counts.fit(1),
        2 * runs,
        ours.decoding(1, CONTEXT, 2 * runs + UNTIMED),
        bare.forward(counts.fit(1), head[0]),
        stock_decoding(bare.model),
        DECODE_AIM,
    )
    yield Work(
        f"decode, {SESSIONS} sessions",
        counts.fit(SESSIONS),
        min(runs, PACKED_TOKENS - UNTIMED),
        ours.decoding(SESSIONS, PACKED_PROMPT, PACKED_TOKENS),
        bare.forward(counts.fit(SESSIONS), min(SESSIONS, head[-1])),
    )


def stock_prefilling(model: Any, tokens: int) -> Subject:
    ids = subjects.random_ids(model, tokens)
    return Subject(lambda: subjects.stock_prefill(model, ids))


def stock_decoding(model: Any) -> Subject:
    cache, logits = subjects.stock_prefill(model, subjects.random_ids(model, CONTEXT))
    last = [int(logits.argmax())]

    def call() -> None:
        last[0] = int(subjects.stock_step(model, cache, last).argmax())

    return Subject(call)


def measure_work(work: Work, shape: str, report: Report) -> None:
    timed = {"bare": work.bare, "ours": work.ours}
    if work.stock is not None:
        timed["transformers"] = work.stock
    timings = harness.interleave(timed, runs=work.runs, warm_up=WARM_UP)
    ours, bare = timings["ours"], timings["bare"]
    stock = timings.get("transformers")
    report.add(
        shape=shape,
        work=work.name,
        rows=work.rows,
        ours_ms=1e3 * ours.median,
        bare_ms=1e3 * bare.median,
        transformers_ms=NOT_APPLICABLE if stock is None else 1e3 * stock.median,
        ours_fastest_ms=1e3 * ours.fastest,
        bare_fastest_ms=1e3 * bare.fastest,
        overhead=100 * (ours.fastest / bare.fastest - 1),
        ours_spread=ours.spread,
    )
    figure, mine = f"{work.name}, {shape}", 1e3 * ours.fastest
    peer = f"bare forward of {work.rows} rows"
    report.compare(figure, mine, 1e3 * bare.fastest, peer, "ms", work.aim, lower_is_better=True)
    if stock is not None:
        theirs = 1e3 * stock.fastest
        report.compare(figure, mine, theirs, "transformers", "ms", lower_is_better=True)


def measure(asked: Asked) -> None:
    for shape in asked.options.shapes:
        model = subjects.load_model(shape, layers=asked.options.layers)
        bare = Bare(subjects.beside(model))
        ours = Ours(model)
        with ours.engine:
            ours.warm()
            for work in works(ours, bare, asked.options.runs, full=asked.full):
                measure_work(work, shape, asked.report())


STUDY = Study(
    measure,
    (Table("overhead", "What an engine adds to the bare forwards of the same model", COLUMNS),),
    (
        Option("shapes", ["gqa8-bf16", "gqa8-fp32"], quick=["gqa8-bf16"]),
        Option("layers", 4, quick=1, full=8, help="of the shapes"),
        Option("runs", 24, 2, 32, "twice as many of a lone step, half of a prefill"),
    ),
    {"chunk_tokens": CHUNK_TOKENS, "context": CONTEXT},
)

if __name__ == "__main__":
    STUDY.main()
