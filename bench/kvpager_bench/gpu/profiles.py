"""Which kernels one layer and a decode step consist of, by a profiler."""

from __future__ import annotations

import itertools
import time

from kvpager import Dense, TopK
from kvpager.config import Selection
from kvpager_bench.gpu.machine import Ran
from kvpager_bench.gpu.model_sections import engine_of, topk_name
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import CHUNK_TOKENS
from kvpager_bench.gpu.subjects import Reading, append, pager_of
from kvpager_bench.harness import Column, MissingNumberError, Report

NAMED = 20  # kernels of a profile; the others are one row
_LONGEST_NAME = 100


def profiles(run: Run) -> None:
    """Attention of one layer, dense and top-k; then whole decode steps."""
    totals = run.report(
        "profiles",
        "What attention at one layer and a decode step launch, and how long the device is busy",
        Column("what", text=True),
        Column("context", "tokens"),
        Column("kernels", "of one"),
        Column("busy_us", "us of one"),
        Column("wall_us", "us of one"),
        Column("host_us", "us of one"),
    )
    kernels = run.report(
        "kernels",
        "The same by kernel",
        Column("what", text=True),
        Column("kernel", text=True),
        Column("times", "of one"),
        Column("mean_us", "us"),
        Column("share", "of the busy time"),
    )
    for name, selection in _selections(run):
        _profile_layer(run, totals, kernels, name, selection)
    _profile_steps(run, totals, kernels)


def _selections(run: Run) -> list[tuple[str, Selection]]:
    return [("dense", Dense()), (topk_name(run.sizes), TopK(chunks=run.sizes.selected))]


def _profile_layer(
    run: Run, totals: Report, kernels: Report, name: str, selection: Selection
) -> None:
    """One row at the end of everything resident, as in a decode step."""
    machine, sizes, context = run.machine, run.sizes, run.sizes.middle
    layout = sizes.layout(1)
    with pager_of(
        machine,
        layout,
        sizes.q_heads,
        context + 2 * CHUNK_TOKENS,
        rows=sizes.append_rows,
        selection=None if isinstance(selection, Dense) else selection,
    ) as pager:
        sequence = pager.sequence()
        append(machine, sequence, layout, context, seed=5)
        with Reading(machine, pager, [sequence], 1, sizes.q_heads) as reading:
            wall = machine.wall(reading.all_layers, runs=sizes.runs).median
            start = time.perf_counter()
            for _ in range(sizes.runs):
                reading.all_layers()
            host = (time.perf_counter() - start) / sizes.runs
            ran = machine.profile(reading.all_layers)
    _add(totals, kernels, f"one layer, {name}", context, ran, 1, wall, host)


def _profile_steps(run: Run, totals: Report, kernels: Report) -> None:
    """Steps of a session that has been decoding for a while, Python and transformers included."""
    machine, sizes = run.machine, run.sizes
    context, steps = sizes.near_contexts[0], sizes.profiled_steps
    selection = TopK(chunks=sizes.selected)
    with engine_of(
        run, run.model(), sizes.pool, host_tokens=context + 2 * sizes.pool, selection=selection
    ) as engine:
        session = engine.session()
        append(machine, session.sequence, engine.layout, context, seed=11)
        stream = session.generate(3 * steps + 1, eos=None, stream="tokens")

        def go_on() -> None:
            for _ in itertools.islice(stream, steps):
                pass

        go_on()
        start = time.perf_counter()
        go_on()
        wall = (time.perf_counter() - start) / steps
        ran = machine.profile(go_on)
    _add(totals, kernels, f"a step, {topk_name(run.sizes)}", context, ran, steps, wall, wall)


def _add(
    totals: Report,
    kernels: Report,
    what: str,
    context: int,
    ran: list[Ran],
    times: int,
    wall: float,
    host: float,
) -> None:
    """Of one of `times` calls. wall: seconds until its result is there; host: until it returns."""
    busy = sum(sum(each.seconds) for each in ran)
    if not busy:
        raise MissingNumberError(f"{what}: the profiler saw nothing run")
    totals.add(
        what=what,
        context=context,
        kernels=sum(len(each.seconds) for each in ran if each.is_kernel) / times,
        busy_us=1e6 * busy / times,
        wall_us=1e6 * wall,
        host_us=1e6 * host,
    )
    others = [second for each in ran[NAMED:] for second in each.seconds]
    named = [*ran[:NAMED], *([Ran("all others", tuple(others))] if others else [])]
    for each in named:
        kernels.add(
            what=what,
            kernel=each.name[:_LONGEST_NAME],
            times=len(each.seconds) / times,
            mean_us=1e6 * sum(each.seconds) / len(each.seconds),
            share=sum(each.seconds) / busy,
        )
