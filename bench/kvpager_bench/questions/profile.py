"""Where the time of prefill, decode, seal, page, save and restore goes.

    kvpager bench profile
    kvpager bench profile -- --shape gqa8-fp32 --layers 8

The first table splits forwards: hooks around the model's linear layers time its matrix products,
the pager's own counters the kernels, and what is left of the decoder is the model's other
operations (norms, rotations, activations, Python). Forwards run module by module, as hooks want it,
also where an engine would replay a recording. The second has bytes and rates of what moves chunks,
beside a copy in memory as this machine does it. Memory is touched before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvpager import Engine, PagerConfig, TopK
from kvpager_bench import machine, subjects
from kvpager_bench.harness import Column, Report
from kvpager_bench.module_clock import clocked
from kvpager_bench.places import scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

CHUNK_TOKENS = 64
POOL_BLOCKS = 48
TOP_CHUNKS = 8
RECENT = 256
SESSIONS = 32
SECONDS = (
    "seconds_attend",
    "seconds_scan",
    "seconds_write",
    "seconds_load",
    "seconds_seal",
    "seconds_recall",
    "seconds_attention",
)

FORWARD_COLUMNS = (
    Column("work", text=True),
    Column("rows"),
    Column("ms", "ms"),
    Column("matmuls", "%"),
    Column("model_rest", "%"),
    Column("attention", "%"),
    Column("scan", "%"),
    Column("write", "%"),
    Column("load", "%"),
    Column("seam", "%"),
    Column("seal", "%"),
    Column("engine", "%"),
)

MOVING_COLUMNS = (
    Column("work", text=True),
    Column("chunks"),
    Column("mib", "MiB"),
    Column("ms", "ms"),
    Column("gb_per_s", "GB/s"),
    Column("of_memory_copy", "x"),
)


def split(
    engine: Engine, work: str, rows: int, run: Callable[[int], object], runs: int, report: Report
) -> None:
    """The mean of several runs, in parts. `run` takes the number of the run; 0 warms."""
    model: Any = engine.model
    decoder = model.get_decoder()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    run(0)
    with clocked(linear) as products, clocked([decoder]) as inside:
        head = engine.stats()["seconds_head"]
        before, start = engine.stats(), time.perf_counter()
        for number in range(1, runs + 1):
            run(number)
        wall = time.perf_counter() - start
        after = engine.stats()
    head = after["seconds_head"] - head
    taken = {name: after[name] - before[name] for name in SECONDS}
    kernels = sum(taken[name] for name in SECONDS[:4])
    parts = {
        "matmuls": products.seconds,
        "model_rest": inside.seconds + head - products.seconds - taken["seconds_attention"],
        "attention": taken["seconds_attend"],
        "scan": taken["seconds_scan"],
        "write": taken["seconds_write"],
        "load": taken["seconds_load"],
        "seam": taken["seconds_attention"] - kernels,
        "seal": taken["seconds_seal"] + taken["seconds_recall"],
    }
    parts["engine"] = wall - sum(parts.values())
    report.add(
        work=work,
        rows=rows,
        ms=1e3 * wall / runs,
        **{name: 100 * seconds / wall for name, seconds in parts.items()},
    )


def forwards(model: Any, o: Any, report: Report) -> None:
    """Prefill, a step alone at a short and at a long context, and many steps together."""
    draws = iter(range(10**6))

    def ids(tokens: int) -> Any:
        return subjects.random_ids(model, tokens, seed=next(draws))

    selection = TopK(chunks=TOP_CHUNKS, recent=RECENT)
    config = PagerConfig(
        pool_tokens=POOL_BLOCKS * CHUNK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        selection=selection,
        host_bytes=2 * o.context * subjects.token_bytes(model),
        beyond_max_positions=True,
    )
    with Engine(model, config) as engine:
        fit, rows, steps = engine.row_counts.fit, engine.rows, o.steps
        for _ in range(-(-2 * o.context // rows)):  # touches pool and arena
            with engine.session() as session:
                session.prefill(ids(rows))

        def prefill(_: int) -> None:
            with engine.session() as session:
                session.prefill(ids(rows))

        split(engine, f"prefill of {rows} tokens", rows, prefill, o.runs, report)
        for context in (CHUNK_TOKENS, o.context):
            with engine.session() as session:
                session.prefill(ids(context))
                stream = session.generate(steps + 2, eos=None, stream="tokens")
                next(stream)
                step = partial_next(stream, 1)
                split(engine, f"decode at {context}", fit(1), step, steps, report)
        few = min(steps, CHUNK_TOKENS - 24 - 2)
        sessions = [engine.session() for _ in range(SESSIONS)]
        engine.prefill_many((session, ids(24)) for session in sessions)
        streams = engine.generate_many(sessions, few + 2, eos=None)
        for _ in range(SESSIONS):
            next(streams)
        step = partial_next(streams, SESSIONS)
        split(engine, f"decode of {SESSIONS} sessions", fit(SESSIONS), step, few, report)


def partial_next(stream: Iterator[Any], count: int) -> Callable[[int], None]:
    def step(_: int) -> None:
        for _ in range(count):
            next(stream)

    return step


def moving(model: Any, asked: Asked, report: Report) -> None:
    """Seal, page in, save and restore of one session, whose K/V are made up."""
    tokens = asked.options.context
    copy = machine.memory_bandwidth()[1].best
    config = PagerConfig(
        pool_tokens=tokens + 1024, chunk_tokens=CHUNK_TOKENS, host_bytes="auto", small_rows="fixed"
    )
    with scratch_folder() as folder:
        with Engine(model, config) as engine:
            layout, pager = engine.layout, engine.pager

            def add(work: str, seconds: float, chunks: int, size: int) -> None:
                rate = size / seconds
                report.add(
                    work=work,
                    chunks=chunks,
                    mib=size / 2**20,
                    ms=1e3 * seconds,
                    gb_per_s=rate / 1e9,
                    of_memory_copy=rate / copy,
                )

            for turn in range(2):  # the first touches
                session = engine.session()
                before = pager.stats()
                subjects.inject(session.sequence, layout, tokens, seed=turn, provenance="decode")
                after = pager.stats()
                chunks = after["chunks_sealed"] - before["chunks_sealed"]
                seal = after["seconds_seal"] - before["seconds_seal"]
                if turn == 0:
                    session.close()
            size = int(chunks) * layout.chunk_bytes
            add("seal", seal, int(chunks), size)
            pager.evict_all()
            start = time.perf_counter()
            with session.pin(0, tokens):
                add("page in", time.perf_counter() - start, int(chunks), size)
            path = folder / "session.kvp"
            session.save(path)
            start = time.perf_counter()
            written = session.save(path).bytes_written
            add("save, with fsync", time.perf_counter() - start, int(chunks), written)
            session.close()
        with Engine(model, config) as engine:
            for _ in range(2):
                start = time.perf_counter()
                session = engine.restore(path)
                opened = time.perf_counter() - start
                start = time.perf_counter()
                with session.pin(0, tokens):
                    read = time.perf_counter() - start
                session.close()
            metadata = path.stat().st_size - size
            add("restore, metadata", opened, int(chunks), max(1, metadata))
            add("restore, every chunk read and verified", read, int(chunks), size)


def measure(asked: Asked) -> None:
    model = subjects.load_model(asked.options.shape, layers=asked.options.layers)
    forwards(model, asked.options, asked.report("profile"))
    moving(model, asked, asked.report("profile_moving"))


STUDY = Study(
    measure,
    (
        Table("profile", "Where the time of a forward goes", FORWARD_COLUMNS),
        Table("profile_moving", "What moves chunks, beside a copy in memory", MOVING_COLUMNS),
    ),
    (
        Option("shape", "gqa8-bf16"),
        Option("layers", 4, quick=1),
        Option("context", 4096, quick=512, help="of the long session; tokens"),
        Option("runs", 6, help="of a prefill"),
        Option("steps", 24, help="decoded"),
    ),
    {"chunk_tokens": CHUNK_TOKENS, "chunks_selected": TOP_CHUNKS},
)

if __name__ == "__main__":
    STUDY.main()
