"""Where the time of prefill, decode, seal, page, save and restore goes.

    python -m kvpager_bench.profile
    python -m kvpager_bench.profile --shape gqa8-fp32 --layers 8

The first table splits forwards: hooks around the model's linear layers time its matrix products,
the pager's own counters the kernels, and what is left of the decoder is the model's other
operations (norms, rotations, activations, Python). Forwards run module by module, as hooks want it,
also where an engine would replay a recording. The second has bytes and rates of what moves chunks,
beside a copy in memory as this machine does it. Memory is touched before it is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvpager import Engine, PagerConfig, TopK
from kvpager.hf import only_looks
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report
from kvpager_bench.places import scratch_folder

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


class Clock:
    """Seconds inside the calls of some modules, between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    @only_looks
    def begin(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    @only_looks
    def end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._begun


@contextmanager
def clocked(modules: Sequence[torch.nn.Module]) -> Iterator[Clock]:
    """Modules none of which calls another of them."""
    clock = Clock()
    handles = [module.register_forward_pre_hook(clock.begin) for module in modules]
    handles += [module.register_forward_hook(clock.end) for module in modules]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


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


def forwards(model: Any, arguments: argparse.Namespace, report: Report) -> None:
    """Prefill, a step alone at a short and at a long context, and many steps together."""
    draws = iter(range(10**6))

    def ids(tokens: int) -> Any:
        return subjects.random_ids(model, tokens, seed=next(draws))

    selection = TopK(chunks=TOP_CHUNKS, recent=RECENT)
    config = PagerConfig(
        pool_tokens=POOL_BLOCKS * CHUNK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        selection=selection,
        host_bytes=2 * arguments.context * token_bytes(model),
        beyond_max_positions=True,
    )
    with Engine(model, config) as engine:
        fit, rows, steps = engine.row_counts.fit, engine.rows, arguments.steps
        for _ in range(-(-2 * arguments.context // rows)):  # touches pool and arena
            with engine.session() as session:
                session.prefill(ids(rows))

        def prefill(_: int) -> None:
            with engine.session() as session:
                session.prefill(ids(rows))

        split(engine, f"prefill of {rows} tokens", rows, prefill, arguments.runs, report)
        for context in (CHUNK_TOKENS, arguments.context):
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


def token_bytes(model: Any) -> int:
    config = model.config
    heads = config.num_key_value_heads * subjects.head_dim(config)
    return int(2 * config.num_hidden_layers * heads * model.dtype.itemsize)


def moving(model: Any, arguments: argparse.Namespace, report: Report) -> None:
    """Seal, page in, save and restore of one session, whose K/V are made up."""
    tokens = arguments.context
    copy = machine.memory_bandwidth(arguments.threads).copy
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


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--shape", default="gqa8-bf16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, help="of the long session; tokens")
    parser.add_argument("--runs", type=int, default=6, help="of a prefill")
    parser.add_argument("--steps", type=int, default=24, help="decoded")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or (1 if arguments.quick else 4)
    arguments.context = arguments.context or (512 if arguments.quick else 4096)
    record = harness.start(arguments)
    model = subjects.load_model(arguments.shape, layers=arguments.layers)
    settings = {
        "shape": arguments.shape,
        "layers": arguments.layers,
        "context": arguments.context,
        "chunk_tokens": CHUNK_TOKENS,
        "chunks_selected": TOP_CHUNKS,
    }
    report = Report(
        harness.report_name("profile", arguments),
        "Where the time of a forward goes",
        FORWARD_COLUMNS,
        settings,
        record,
    )
    forwards(model, arguments, report)
    report.finish()
    moved = Report(
        harness.report_name("profile_moving", arguments),
        "What moves chunks, beside a copy in memory",
        MOVING_COLUMNS,
        settings,
        record,
    )
    moving(model, arguments, moved)
    moved.finish()


if __name__ == "__main__":
    main()
