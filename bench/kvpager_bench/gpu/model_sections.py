"""The sections of the GPU benchmark that run a model: decode, restore, row counts, small pools."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvpager import Dense, Engine, Session, TopK
from kvpager_bench.gpu.machine import Machine
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import CHUNK_TOKENS, Sizes
from kvpager_bench.gpu.subjects import (
    append,
    config,
    graphed_step,
    stock_cache,
    stock_prefill,
    stock_step,
)
from kvpager_bench.harness import NOT_APPLICABLE, Column, MissingNumberError, Report, Timing

WARM_UP = 2
GRAPHED_STEPS = 64  # there is room for
DENSE_STEPS = 3  # of a context that crosses the link whole at every step
RESIDENT = "top-k, nothing missed"  # what missed pages cost, by comparison
FREE_DISK = 1.2  # of a snapshot's size, before one is written


def random_ids(run: Run, tokens: int, seed: int = 0) -> Any:
    high = run.sizes.vocab
    return np.random.default_rng(seed).integers(8, high, tokens, dtype=np.int32)


@contextmanager
def engine_of(
    run: Run, model: Any, pool: int, *, host_tokens: int, **options: Any
) -> Iterator[Engine]:
    """An engine whose pinned arena holds `host_tokens`."""
    options.setdefault("rows", run.sizes.engine_rows)
    token_bytes = model.config.num_hidden_layers * run.sizes.page_token_bytes
    settings = config(run.machine, pool, host_bytes=host_tokens * token_bytes, **options)
    with Engine(model, settings) as engine:
        yield engine
    run.machine.free()


def topk_name(sizes: Sizes) -> str:
    return f"top-{sizes.selected}"


def decode(run: Run) -> None:
    """Decoding one session end to end as its context grows, through a pool that does not."""
    sizes, machine = run.sizes, run.machine
    report = run.report(
        "decode",
        f"Decode, 8B shape in bfloat16, a pool of {sizes.pool} tokens, host included",
        Column("selection", text=True),
        Column("context", "tokens"),
        Column("step_ms", "ms"),
        Column("spread", "(max-min)/median", 2),
        Column("tokens_per_s", "1/s"),
        Column("copied_up_mib", "MiB/token"),
        Column("rows", "of a step's forward"),
        Column("transformers_ms", "ms", optional=True),
        Column("over_transformers", "x", optional=True),
        Column("over_graphed", "x its time", optional=True),
    )
    model = run.model()
    graphed = _graphed_step_ms(run, model)
    topk, near, far = TopK(chunks=sizes.selected), sizes.near_contexts, (sizes.far_context,)
    stock: dict[int, Any] = {}
    for context in (*near, *far):
        if run.out_of_time(f"transformers' DynamicCache at {context}"):
            break
        stock[context] = _stock_step_ms(run, model, context)
    steps_of = {"dense": min(DENSE_STEPS, sizes.decode_steps)}
    # The arena of the last is the only large one: it takes long to pin.
    for name, selection, pool, contexts in (
        (topk_name(sizes), topk, sizes.pool, near),
        (RESIDENT, topk, max(near) + sizes.pool, near[-1:]),
        ("dense", Dense(), sizes.pool, near),
        (topk_name(sizes), topk, sizes.pool, far),
    ):
        if run.out_of_time(f"decode, {name}, at {contexts}"):
            continue
        room = max(contexts) + 2 * sizes.pool
        steps = steps_of.get(name, sizes.decode_steps)
        with engine_of(run, model, pool, host_tokens=room, selection=selection) as engine:
            session = engine.session()
            for context in contexts:
                if run.out_of_time(f"decode, {name}, at {context}"):
                    break
                append(machine, session.sequence, engine.layout, context, seed=11)
                _add_decode(report, name, session, context, steps, stock.get(context), graphed)


def _graphed_step_ms(run: Run, model: Any) -> Any:
    """Transformers alone, without paging and without launches: one graph over as many tokens as
    top-k rows attend to. NOT_APPLICABLE where it cannot be captured."""
    machine, tokens = run.machine, run.sizes.selected * CHUNK_TOKENS
    try:
        step = graphed_step(machine, model, run.sizes, tokens, GRAPHED_STEPS)
        timing = machine.wall(step, runs=run.sizes.decode_steps, warm_up=WARM_UP)
    except RuntimeError as error:
        run.skipped.append(f"transformers' step as a graph: {error}")
        return NOT_APPLICABLE
    finally:
        machine.free()
    return 1e3 * timing.median


def _stock_step_ms(run: Run, model: Any, context: int) -> Any:
    """Transformers alone; NOT_APPLICABLE where a full cache does not fit."""
    machine, sizes = run.machine, run.sizes
    cache: Any = None
    try:
        cache = stock_cache(machine, model, sizes, context)
        timing = machine.wall(
            lambda: stock_step(model, cache, [9]), runs=DENSE_STEPS, warm_up=WARM_UP
        )
    except Exception as error:
        if not machine.out_of_memory(error):
            raise
        run.skipped.append(f"transformers' DynamicCache at {context}: out of memory")
        return NOT_APPLICABLE
    finally:
        cache = None
        machine.free()
    return 1e3 * timing.median


def _add_decode(
    report: Report, name: str, session: Session, context: int, steps: int, stock: Any, graphed: Any
) -> None:
    timing, copied, rows = decode_steps(session, steps)
    step = 1e3 * timing.median
    known = isinstance(stock, float)
    report.add(
        selection=name,
        context=context,
        step_ms=step,
        spread=timing.spread,
        tokens_per_s=1e3 / step,
        copied_up_mib=copied / 2**20,
        rows=rows,
        transformers_ms=stock if known else NOT_APPLICABLE,
        over_transformers=stock / step if known else NOT_APPLICABLE,
        over_graphed=step / graphed if isinstance(graphed, float) else NOT_APPLICABLE,
    )


def decode_steps(session: Session, steps: int) -> tuple[Timing, float, float]:
    """Host seconds per token of a fork, bytes copied up per token, and rows of a forward."""
    core = session.core
    seconds, copied, rows = [], [], []
    with session.fork() as fork:
        stream = fork.generate(WARM_UP + steps + 1, eos=None, stream="tokens")
        for _ in range(WARM_UP):
            next(stream)
        for _ in range(steps):
            before, rows_before = core.pager.stats(), core.runner.rows
            start = time.perf_counter()
            next(stream)  # the token is on the host, so that the device has come to it
            seconds.append(time.perf_counter() - start)
            after = core.pager.stats()
            if after["forwards"] != before["forwards"] + 1:
                raise MissingNumberError("a decode step was not one forward")
            copied.append(after["bytes_copied_up"] - before["bytes_copied_up"])
            rows.append(core.runner.rows - rows_before)
    return Timing(tuple(seconds)), statistics.mean(copied), statistics.mean(rows)


def restore(run: Run) -> None:
    """Time to the first token of a session in pinned memory or in a file, beside prefill."""
    sizes, machine = run.sizes, run.machine
    report = run.report(
        "restore",
        "Time to the first token after a turn was put away, beside a cold prefill",
        Column("selection", text=True),
        Column("context", "tokens"),
        Column("source", text=True),
        Column("first_token_ms", "ms"),
        Column("spread", "(max-min)/median", 2),
        Column("copied_up_mib", "MiB"),
        Column("cold_tokens", "tokens"),
        Column("cold_ms", "ms"),
        Column("transformers_cold_ms", "ms"),
        Column("over_cold", "x, scaled to the context"),
    )
    model = run.model()
    cold_ids = random_ids(run, sizes.cold)
    transformers_cold = machine.wall(lambda: stock_prefill(model, cold_ids), runs=1, warm_up=1)
    room = 2 * sizes.restored + 2 * sizes.pool
    for name, selection in (
        ("dense", Dense()),
        (topk_name(sizes), TopK(chunks=sizes.selected)),
    ):
        with engine_of(run, model, sizes.pool, host_tokens=room, selection=selection) as engine:
            cold = _cold_seconds(machine, engine, cold_ids)
            for source, timing, copied in _put_away(run, engine, name, sizes.restored):
                report.add(
                    selection=name,
                    context=sizes.restored,
                    source=source,
                    first_token_ms=1e3 * timing.median,
                    spread=timing.spread,
                    copied_up_mib=copied / 2**20,
                    cold_tokens=sizes.cold,
                    cold_ms=1e3 * cold,
                    transformers_cold_ms=1e3 * transformers_cold.median,
                    over_cold=cold * sizes.restored / sizes.cold / timing.median,
                )


def _cold_seconds(machine: Machine, engine: Engine, ids: Any) -> float:
    """Prefill until the first token is known, after another prompt has warmed everything up."""
    for part in (ids[: engine.rows][::-1], ids):
        session = engine.session()
        machine.synchronize()
        start = time.perf_counter()
        session.prefill(part)
        int(session.logits.argmax())
        seconds = time.perf_counter() - start
        session.close()
    return seconds


def _put_away(
    run: Run, engine: Engine, name: str, context: int
) -> Iterator[tuple[str, Timing, float]]:
    """(where it was, host seconds to the first token, bytes copied up)."""
    if run.out_of_time(f"restore, {name}, {context} from pinned memory"):
        return
    runs = 3
    session = engine.session()
    append(run.machine, session.sequence, engine.layout, context, seed=21)

    def go_on(start: Callable[[], Session]) -> tuple[Timing, float]:
        seconds, before = [], engine.stats()["bytes_copied_up"]
        for _ in range(runs):
            engine.pager.evict_all()
            run.machine.synchronize()
            begin = time.perf_counter()
            with start() as again:
                again.append([9])
                int(again.logits.argmax())
                seconds.append(time.perf_counter() - begin)
        return Timing(tuple(seconds)), (engine.stats()["bytes_copied_up"] - before) / runs

    yield "pinned memory", *go_on(session.fork)
    size = context * engine.layout.token_bytes
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if run.out_of_time(f"restore, {name}, {context} from a file") or free < FREE_DISK * size:
        run.skipped.append(f"restore, {name}, {context} from a file: time, or {free} bytes of disk")
        session.close()
        return
    with tempfile.TemporaryDirectory(prefix="kvpager-bench-") as folder:
        path = Path(folder) / "turn.kvsnap"
        session.save(path)
        session.close()
        yield "file in the page cache", *go_on(lambda: engine.restore(path))


def rows(run: Run) -> None:
    """What M costs: prefill and decode of one session by the rows of a forward."""
    sizes, machine = run.sizes, run.machine
    report = run.report(
        "rows",
        "Prefill and decode by M, the rows of a forward, everything resident",
        Column("rows"),
        Column("row_counts", text=True),
        Column("start_s", "s"),
        Column("prefill_tokens_per_s", "1/s"),
        Column("prefill_over_transformers", "x its time"),
        Column("decode_ms", "ms"),
        Column("decode_over_transformers", "x its time"),
    )
    model = run.model()
    ids = random_ids(run, sizes.rows_prompt)
    stock_seconds = machine.wall(
        lambda: stock_prefill(model, ids), runs=DENSE_STEPS, warm_up=1
    ).median
    stock_ms = _stock_step_ms(run, model, sizes.rows_prompt)
    pool = 2 * sizes.rows_prompt + 2 * sizes.pool
    for count in sizes.rows:
        if run.out_of_time(f"{count} rows"):
            continue
        start = time.perf_counter()
        with engine_of(run, model, pool, host_tokens=2 * pool, rows=count) as engine:
            started = time.perf_counter() - start
            seconds = _cold_seconds(machine, engine, ids)
            session = engine.session()
            session.prefill(ids)
            timing, _, _ = decode_steps(session, sizes.decode_steps)
            counts = engine.row_counts.describe()
        step = 1e3 * timing.median
        report.add(
            rows=count,
            row_counts=str(counts),
            start_s=started,
            prefill_tokens_per_s=len(ids) / seconds,
            prefill_over_transformers=seconds / stock_seconds,
            decode_ms=step,
            decode_over_transformers=step / stock_ms,
        )


SECTIONS: dict[str, Callable[[Run], None]] = {
    "rows": rows,
    "decode": decode,
    "restore": restore,
}
