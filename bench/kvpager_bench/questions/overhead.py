"""What an engine adds to the forwards of the model itself, and where a warm first token goes.

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
table. Memory is touched before it is timed: what a first touch costs is in the second table, the
first token of a restored turn in a fresh process, split into its parts, and the same turn again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Engine, PagerConfig, Session, TopK
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Subject
from kvpager_bench.places import scratch_folder

CHUNK_TOKENS = 64
POOL_BLOCKS = 40  # open chunks of all sessions, and a forward's
HOST_CHUNKS = 8  # so few that sealing goes through all of them while it warms
CONTEXT = 128  # tokens before the first one that is decoded alone
SESSIONS = 32
PACKED_PROMPT = 24  # tokens of each; with what is decoded, less than a chunk
PACKED_TOKENS = CHUNK_TOKENS - PACKED_PROMPT - 1
WARM_UP = 2
UNTIMED = WARM_UP + 4  # tokens: two begin a generation, one is taken apart
SECONDS = ("seconds_attend", "seconds_scan", "seconds_write", "seconds_seal")
WARM_CONTEXT = 32768
WARM_POOL_TOKENS = 2048
WARM_CHUNKS = 32
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
    Column("attention_ms", "ms"),
    Column("scan_ms", "ms"),
    Column("write_ms", "ms"),
    Column("seal_ms", "ms"),
)

WARM_COLUMNS = (
    Column("turn", text=True),
    Column("context", "tokens"),
    Column("restore_ms", "ms"),
    Column("summaries_ms", "ms"),
    Column("chunks_ms", "ms"),
    Column("scan_ms", "ms"),
    Column("attention_ms", "ms"),
    Column("model_ms", "ms"),
    Column("rest_ms", "ms"),
    Column("first_token_ms", "ms"),
    Column("read_mib", "MiB"),
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

    def __init__(self, model: Any, chunk_bytes: Callable[[int], int]) -> None:
        self.model = model
        self.engine = Engine(
            model,
            PagerConfig(
                pool_tokens=POOL_BLOCKS * CHUNK_TOKENS,
                chunk_tokens=CHUNK_TOKENS,
                host_bytes=HOST_CHUNKS * chunk_bytes(CHUNK_TOKENS),
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


def measure(work: Work, shape: str, engine: Engine, report: Report) -> None:
    timed = {"bare": work.bare, "ours": work.ours}
    if work.stock is not None:
        timed["transformers"] = work.stock
    timings = harness.interleave(timed, runs=work.runs, warm_up=WARM_UP)
    work.ours.before()
    before = engine.stats()
    work.ours.call()
    after = engine.stats()
    ours, bare = timings["ours"], timings["bare"]
    stock = timings.get("transformers")
    parts = {name: 1e3 * (after[name] - before[name]) for name in SECONDS}
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
        attention_ms=parts["seconds_attend"],
        scan_ms=parts["seconds_scan"],
        write_ms=parts["seconds_write"],
        seal_ms=parts["seconds_seal"],
    )
    report.compare(
        f"{work.name}, {shape}",
        ours=1e3 * ours.fastest,
        theirs=1e3 * bare.fastest,
        peer=f"bare forward of {work.rows} rows",
        unit="ms",
        aim=work.aim,
        lower_is_better=True,
    )
    if stock is not None:
        report.compare(
            f"{work.name}, {shape}",
            ours=1e3 * ours.fastest,
            theirs=1e3 * stock.fastest,
            peer="transformers",
            unit="ms",
            aim=None,
            lower_is_better=True,
        )
    print(
        f"{shape} {work.name}: {1e3 * ours.fastest:.2f} ms, bare {1e3 * bare.fastest:.2f} ms",
        flush=True,
    )


def measure_shape(shape: str, arguments: argparse.Namespace, report: Report) -> None:
    model = subjects.load_model(shape, layers=arguments.layers)
    config, element = model.config, model.dtype.itemsize
    token_bytes = 2 * config.num_key_value_heads * subjects.head_dim(config) * element
    bare = Bare(subjects.beside(model))
    ours = Ours(model, lambda tokens: tokens * config.num_hidden_layers * token_bytes)
    with ours.engine:
        ours.warm()
        for work in works(ours, bare, arguments.runs, full=arguments.full):
            measure(work, shape, ours.engine, report)


# A warm turn, in a process of its own.


def warm_configuration() -> PagerConfig:
    return PagerConfig(pool_tokens=WARM_POOL_TOKENS, selection=TopK(chunks=WARM_CHUNKS))


def warm_prompt(context: int) -> tuple[Any, Any]:
    """A document, and it with a question after it."""
    asked = subjects.questions(context, 4, seed=1, quiet=512)
    return asked.document.ids, np.concatenate([asked.document.ids, asked.prompts[0]])


def save_turn(path: Path, context: int) -> None:
    document, _ = warm_prompt(context)
    with Engine(subjects.load_model(subjects.SHIPPED), warm_configuration()) as engine:
        session = engine.session()
        session.prefill(document)
        session.save(path)


def work_turns(task: dict[str, Any]) -> list[dict[str, float]]:
    """The first turn of this process, and the same once more with other memory warmed by it."""
    torch.set_num_threads(task["threads"])
    _, prompt = warm_prompt(task["context"])
    engine = Engine(subjects.load_model(subjects.SHIPPED), warm_configuration())
    begin, spent = engine.pager.begin, [0.0]

    def timed_begin(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return begin(*arguments)
        finally:
            spent[0] += time.perf_counter() - start

    engine.pager.begin = timed_begin  # type: ignore[assignment,method-assign]
    turns = []
    for _ in range(2):
        spent[0] = 0.0
        before, start = engine.stats(), time.perf_counter()
        session = engine.restore(task["path"])
        restored = time.perf_counter()
        session.prefill(prompt)
        next(session.generate(1, stream="tokens"))
        end = time.perf_counter()
        after = engine.stats()
        taken = {name: after[name] - before[name] for name in after if name in WARM_PARTS}
        model = taken["seconds_forward"] - taken["seconds_attention"] - spent[0]
        parts = {
            "restore_ms": restored - start,
            "summaries_ms": spent[0],
            "chunks_ms": taken["seconds_load"],
            "scan_ms": taken["seconds_scan"],
            "attention_ms": taken["seconds_attend"],
            "model_ms": model,
        }
        parts["rest_ms"] = end - start - sum(parts.values())
        parts["first_token_ms"] = end - start
        turns.append(
            {name: 1e3 * seconds for name, seconds in parts.items()}
            | {"read_mib": taken["snapshot_bytes_read"] / 2**20}
        )
        session.close()
    return turns


WARM_PARTS = frozenset(
    {"seconds_forward", "seconds_attention", "seconds_load", "seconds_scan", "seconds_attend"}
    | {"snapshot_bytes_read"}
)


def measure_warm(arguments: argparse.Namespace, report: Report) -> None:
    with scratch_folder() as folder:
        path = folder / "turn.kvp"
        save_turn(path, arguments.context)
        task = {"path": str(path), "context": arguments.context, "threads": arguments.threads}
        runs = [
            harness.run_worker("kvpager_bench.questions.overhead", task)["turns"]
            for _ in range(arguments.processes)
        ]
    for at, name in enumerate(("first of its process", "again")):
        middle = sorted((run[at] for run in runs), key=lambda turn: turn["first_token_ms"])
        report.add(turn=name, context=arguments.context, **middle[len(middle) // 2])


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", type=harness.parse_list, default=["gqa8-bf16", "gqa8-fp32"])
    parser.add_argument("--layers", type=int, help="of the shapes")
    parser.add_argument("--runs", type=int, help="twice as many of a lone step, half of a prefill")
    parser.add_argument("--context", type=int, help="of the warm turn")
    parser.add_argument("--processes", type=int, help="that the warm turn is timed in")
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps({"turns": work_turns(json.loads(arguments.worker))}))
        return
    size = 0 if arguments.quick else 2 if arguments.full else 1
    arguments.layers = arguments.layers or (1, 4, 8)[size]
    arguments.runs = arguments.runs or (2, 24, 32)[size]
    arguments.context = arguments.context or (2048, WARM_CONTEXT, WARM_CONTEXT)[size]
    arguments.processes = arguments.processes or (1, 3, 7)[size]
    if arguments.quick:
        arguments.shapes = arguments.shapes[:1]
    record = harness.start(arguments)
    report = Report(
        harness.report_name("overhead", arguments),
        "What an engine adds to the bare forwards of the same model",
        COLUMNS,
        {
            "chunk_tokens": CHUNK_TOKENS,
            "context": CONTEXT,
            "layers": arguments.layers,
            "runs": arguments.runs,
        },
        record,
    )
    for shape in arguments.shapes:
        measure_shape(shape, arguments, report)
    report.finish()
    warm = Report(
        harness.report_name("overhead_warm", arguments),
        "Where the first token after a restore goes, in a fresh process",
        WARM_COLUMNS,
        {"shape": subjects.SHIPPED, "processes": arguments.processes},
        record,
    )
    measure_warm(arguments, warm)
    warm.finish()


if __name__ == "__main__":
    main()
