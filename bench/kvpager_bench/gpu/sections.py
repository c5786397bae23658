"""The sections of the GPU benchmark that need no model: ceilings, paging, attention, selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvpager import Pager, TopK
from kvpager.pager import Sequence
from kvpager_bench.gpu.machine import Machine
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import CHUNK_TOKENS, Sizes
from kvpager_bench.gpu.subjects import (
    BFLOAT16,
    Reading,
    append,
    check_attention,
    contiguous_kv,
    pager_of,
    torch_attention,
)
from kvpager_bench.harness import NOT_APPLICABLE, Column, MissingNumberError, Report, Timing

GB = 1e9


def ceilings(run: Run) -> None:
    """What this machine can do at best, by torch's own copies and products."""
    machine, sizes = run.machine, run.sizes
    report = run.report(
        "ceilings",
        "What this machine does at best",
        Column("what", text=True),
        Column("value"),
        Column("unit", text=True),
        Column("spread", "(max-min)/median", 2),
    )

    def add(what: str, amount: float, unit: str, calls: Any) -> float:
        timing = machine.time(calls, runs=sizes.runs)
        value = amount / timing.median / (1e12 if unit == "TFLOP/s" else GB)
        report.add(what=what, value=value, unit=unit, spread=timing.spread)
        return timing.median

    _copies(machine, sizes, report, add)
    machine.free()
    n = sizes.matmul
    a, b = (machine.random(n, n, dtype=BFLOAT16, seed=seed) for seed in (1, 2))
    add("bfloat16 product", 2 * n**3, "TFLOP/s", lambda: a @ b)


def _copies(
    machine: Machine, sizes: Sizes, report: Report, add: Callable[[str, float, str, Any], float]
) -> None:
    source = _bytes_on(machine, sizes.copy_bytes)
    target = torch.empty_like(source)
    add("device copy, read + written", 2 * sizes.copy_bytes, "GB/s", lambda: target.copy_(source))
    size = sizes.link_bytes
    host_up, host_down = machine.pinned(size), machine.pinned(size)
    up, down = source[:size], target[:size]
    one_after_the_other = add(
        "pinned up", size, "GB/s", lambda: up.copy_(host_up, non_blocking=True)
    ) + add("pinned down", size, "GB/s", lambda: host_down.copy_(down, non_blocking=True))
    both = machine.time(
        lambda: machine.both_ways([(up, host_up), (host_down, down)]), runs=sizes.runs
    )
    report.add(
        what="both ways over one after the other",
        value=one_after_the_other / both.median,
        unit="x",
        spread=both.spread,
    )


def _bytes_on(machine: Machine, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=machine.tensors)


def paging(run: Run) -> None:
    """Chunks up through the pager, both ways at once, and evictions of clean chunks."""
    machine, sizes = run.machine, run.sizes
    report = run.report(
        "paging",
        "Chunks of an 8B shape through the pager, beside plain pinned copies",
        Column("what", text=True),
        Column("chunks"),
        Column("bytes"),
        Column("time_ms", "ms"),
        Column("spread", "(max-min)/median", 2),
        Column("rate_gbs", "GB/s", optional=True),
        Column("eta", "of the pinned copy", optional=True),
        Column("ratio", "x", optional=True),
        Column("bytes_up"),
        Column("bytes_down"),
    )
    layout = sizes.layout()
    many = max(*sizes.paged_chunks, sizes.duplex_chunks)
    rows = min(4096, sizes.duplex_chunks * CHUNK_TOKENS)
    with pager_of(
        machine,
        layout,
        sizes.q_heads,
        3 * many * CHUNK_TOKENS,
        rows=rows,
        host_tokens=6 * many * CHUNK_TOKENS,
    ) as pager:
        stored = pager.sequence()
        append(machine, stored, layout, 2 * many * CHUNK_TOKENS, seed=1)
        machine.synchronize()
        for chunks in sizes.paged_chunks:
            size = chunks * layout.chunk_bytes

            def bring(chunks: int = chunks) -> None:
                stored.pin(0, chunks * CHUNK_TOKENS).release()

            moved = Moved(pager)
            bring_time = machine.wall(bring, runs=sizes.runs, before=pager.evict_all)
            up, down = moved.per_call(sizes.runs + 1)
            if up != size:
                raise MissingNumberError(f"bringing {chunks} chunks in moved {up} bytes up")
            _add_transfer(run, report, "promote", chunks, size, bring_time, (up, down))
        _evict(run, report, pager, stored, many)
        _duplex(run, report, pager, stored)
    _read_in_place(run, report)
    _stage_in_waves(run, report)


def _add_transfer(
    run: Run,
    report: Report,
    what: str,
    chunks: int,
    size: int,
    timing: Timing,
    moved: tuple[int, int],
    **more: Any,
) -> None:
    """Bytes that had to cross the link, up and down, beside a plain copy of pinned memory."""
    rate = size / timing.median / GB
    row = {
        "rate_gbs": rate,
        "eta": rate / run.ceiling("pinned up"),
        "ratio": NOT_APPLICABLE,
        **more,
    }
    report.add(
        what=what,
        chunks=chunks,
        bytes=size,
        time_ms=1e3 * timing.median,
        spread=timing.spread,
        bytes_up=moved[0],
        bytes_down=moved[1],
        **row,
    )


@contextmanager
def _in_pinned_memory(
    run: Run, layers: int, context: int, seed: int
) -> Iterator[tuple[Pager, Sequence]]:
    """A sequence of which the pool holds next to nothing."""
    machine, sizes = run.machine, run.sizes
    layout = sizes.layout(layers)
    with pager_of(
        machine,
        layout,
        sizes.q_heads,
        sizes.append_rows,
        rows=sizes.append_rows,
        host_tokens=context + 2 * CHUNK_TOKENS,
    ) as pager:
        sequence = pager.sequence()
        append(machine, sequence, layout, context, seed)
        machine.synchronize()
        pager.evict_all()
        yield pager, sequence


def _read_in_place(run: Run, report: Report) -> None:
    """Dense attention of one row over chunks that are all in pinned memory."""
    machine, sizes, context = run.machine, run.sizes, run.sizes.middle
    with _in_pinned_memory(run, 1, context, seed=4) as (pager, sequence):
        moved = Moved(pager)
        with Reading(machine, pager, [sequence], 1, sizes.q_heads) as reading:
            timing = machine.time(reading.all_layers, runs=sizes.runs)
            up, down = moved.per_call(1)
    size = context * sizes.page_token_bytes
    if up + down >= size:
        raise MissingNumberError(f"{up} bytes were copied up and {down} down, not read in place")
    _add_transfer(run, report, "read in place", context // CHUNK_TOKENS, size, timing, (up, down))


def _stage_in_waves(run: Run, report: Report) -> None:
    """Dense forwards of many rows over more missed chunks than staging holds at once."""
    machine, sizes, context = run.machine, run.sizes, run.sizes.long
    rows, layers = sizes.append_rows, sizes.wave_layers
    with _in_pinned_memory(run, layers, context, seed=5) as (pager, sequence):

        def forward() -> None:
            with Reading(machine, pager, [sequence], rows, sizes.q_heads) as reading:
                reading.all_layers()

        with Reading(machine, pager, [sequence], rows, sizes.q_heads) as reading:
            check_attention(machine, reading, [sequence], rows)
        before, moved = pager.stats()["bytes_staged"], Moved(pager)
        timing = machine.wall(forward, runs=sizes.runs, before=pager.evict_all)
        up, down = moved.per_call(sizes.runs + 1)
        staged = (pager.stats()["bytes_staged"] - before) // (sizes.runs + 1)
    size = context * sizes.page_token_bytes * layers
    if staged != size:
        raise MissingNumberError(f"{staged} bytes were staged, expected every slice once: {size}")
    _add_transfer(run, report, "stage in waves", context // CHUNK_TOKENS, size, timing, (up, down))


class Moved:
    """Bytes a pager has copied since."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._before = pager.stats()

    def per_call(self, calls: int) -> tuple[int, int]:
        after = self._pager.stats()
        up, down = (
            int(after[name] - self._before[name])
            for name in ("bytes_copied_up", "bytes_copied_down")
        )
        return up // calls, down // calls


def _evict(run: Run, report: Report, pager: Pager, stored: Sequence, chunks: int) -> None:
    stored.pin(0, chunks * CHUNK_TOKENS).release()
    run.machine.synchronize()
    moved = Moved(pager)
    evicted = 0

    def evict() -> None:
        nonlocal evicted
        evicted = pager.evict_all()

    timing = run.machine.wall(evict, runs=1, warm_up=0)
    if evicted < chunks:
        raise MissingNumberError(f"{evicted} chunks left the pool, expected at least {chunks}")
    size = evicted * pager.layout.chunk_bytes
    none = dict.fromkeys(("rate_gbs", "eta"), NOT_APPLICABLE)
    _add_transfer(run, report, "evict, clean", evicted, size, timing, moved.per_call(1), **none)


def _duplex(run: Run, report: Report, pager: Pager, stored: Sequence) -> None:
    """Chunks that are sealed and written down, beside chunks that are brought up."""
    machine, chunks = run.machine, run.sizes.duplex_chunks
    layout, tokens = pager.layout, chunks * CHUNK_TOKENS
    shape = (layout.layers, tokens, layout.kv_heads)
    k = machine.random(*shape, layout.k_dim, dtype=BFLOAT16, seed=5)
    v = machine.random(*shape, layout.v_dim, dtype=BFLOAT16, seed=6)
    ids = [9] * tokens

    def write_down() -> None:
        sequence = pager.sequence()
        try:
            sequence.append(ids, k, v)
        finally:
            sequence.close()

    def bring_up() -> None:
        stored.pin(0, tokens).release()

    def both() -> None:
        write_down()
        bring_up()

    runs = max(1, run.sizes.runs // 3)
    seconds = {}
    size = chunks * layout.chunk_bytes
    for what, call, amount in (
        ("seal and write down", write_down, size),
        ("bring up", bring_up, size),
        ("both", both, 2 * size),
    ):
        moved = Moved(pager)
        timing = machine.wall(call, runs=runs, before=pager.evict_all)
        seconds[what] = timing.median
        both_moved = moved.per_call(runs + 1)
        ratio: dict[str, Any] = {"eta": NOT_APPLICABLE}
        if what == "both":
            ratio["ratio"] = (seconds["seal and write down"] + seconds["bring up"]) / timing.median
        _add_transfer(run, report, f"duplex: {what}", chunks, amount, timing, both_moved, **ratio)


def attention(run: Run) -> None:
    """The attention kernels with everything resident, beside torch's flash kernel."""
    sizes = run.sizes
    run.report(
        "attention",
        "Attention over resident chunks in bfloat16, beside torch's flash attention",
        Column("what", text=True),
        Column("rows"),
        Column("sequences"),
        Column("context", "tokens"),
        Column("time_us", "us per layer"),
        Column("spread", "(max-min)/median", 2),
        Column("gbs", "GB/s"),
        Column("of_copy", "of the device copy"),
        Column("tflops", "TFLOP/s"),
        Column("flash_us", "us"),
        Column("over_flash", "x its rate"),
        Column("relative_error"),
    )
    for context in sizes.contexts:
        _attend(run, "decode", 1, 1, context)
    for context in sizes.batch_contexts:
        _attend(run, "decode", 1, sizes.batch, context)
    for rows in sizes.prefill_rows:
        for context in sizes.contexts:
            _attend(run, "prefill", rows, 1, context)


def _attend(run: Run, what: str, rows: int, batch: int, context: int) -> None:
    """Rows of each of `batch` sequences of `context` tokens."""
    machine, sizes = run.machine, run.sizes
    if run.out_of_time(f"{what}, {rows} rows of {batch} at {context}"):
        return
    layout = sizes.layout(sizes.attention_layers(batch * context))
    total = rows * batch
    with pager_of(
        machine,
        layout,
        sizes.q_heads,
        batch * (context + 2 * CHUNK_TOKENS),
        rows=max(total, sizes.append_rows),
    ) as pager:
        sequences = []
        for number in range(batch):
            sequence = pager.sequence()
            append(machine, sequence, layout, context, seed=17 * number + 1)
            sequences.append(sequence)
        with Reading(machine, pager, sequences, rows, sizes.q_heads) as reading:
            error = check_attention(machine, reading, sequences, rows)
            ours = machine.time(reading.all_layers, runs=sizes.runs)
            per_layer = ours.median / layout.layers
            flash = _flash(machine, sizes, sequences, reading.q, rows)
    k_and_v = batch * context * sizes.page_token_bytes
    seen = rows * (context - (rows - 1) / 2)
    flops = 4 * batch * seen * sizes.q_heads * sizes.head_dim
    run.reports["attention"].add(
        what=what,
        rows=total,
        sequences=batch,
        context=context,
        time_us=1e6 * per_layer,
        spread=ours.spread,
        gbs=k_and_v / per_layer / GB,
        of_copy=k_and_v / per_layer / GB / run.ceiling("device copy, read + written"),
        tflops=flops / per_layer / 1e12,
        flash_us=1e6 * flash,
        over_flash=flash / per_layer,
        relative_error=error,
    )
    machine.free()


def _flash(
    machine: Machine,
    sizes: Sizes,
    sequences: list[Sequence],
    queries: list[torch.Tensor],
    rows: int,
) -> float:
    """Seconds per layer of torch's attention over contiguous K/V."""
    each: list[Any] = list(queries)
    shaped = [q.unflatten(0, (len(sequences), rows)).transpose(1, 2).contiguous() for q in each]
    pairs = [contiguous_kv(machine, sequences, layer) for layer in range(len(queries))]

    def plain() -> None:
        for q, (k, v) in zip(shaped, pairs):
            torch_attention(q, k, v)

    with machine.attention_backend():
        return machine.time(plain, runs=sizes.runs).median / len(queries)


def selection(run: Run) -> None:
    """Scanning the summaries of very many chunks for one row.

    The same row over so few chunks that all are chosen costs as much attention and no scan to speak
    of: the difference is the selection.
    """
    machine, sizes = run.machine, run.sizes
    report = run.report(
        "selection",
        f"Choosing {sizes.selected} chunks, everything resident",
        Column("chunks"),
        Column("attend_us", "us per layer"),
        Column("base_us", "us per layer"),
        Column("selection_us", "us per layer"),
        Column("summary_mib", "MiB per layer"),
        Column("of_copy", "of the device copy", optional=True),
        Column("spread", "(max-min)/median", 2),
    )
    layout = sizes.layout(sizes.scan_layers)
    recent = max(256, sizes.scan_rows)
    few = sizes.selected + 1 + recent // CHUNK_TOKENS  # with the sinks: all are chosen
    base: float | None = None
    for chunks in (few, *sizes.scanned_chunks):
        if run.out_of_time(f"selection over {chunks} chunks"):
            continue
        tokens = chunks * CHUNK_TOKENS
        with pager_of(
            machine,
            layout,
            sizes.q_heads,
            tokens + 2 * CHUNK_TOKENS,
            rows=sizes.scan_rows,
            selection=TopK(chunks=sizes.selected, recent=recent),
        ) as pager:
            sequence = pager.sequence()
            append(machine, sequence, layout, tokens, seed=3)
            with Reading(machine, pager, [sequence], 1, sizes.q_heads) as reading:
                timing = machine.time(reading.all_layers, runs=sizes.runs)
            summary = pager.stats()["summary_bytes_per_chunk"] / layout.layers * chunks
        per_layer = timing.median / layout.layers
        if base is None:
            base = per_layer
            continue
        scan = per_layer - base
        rate = summary / scan / GB if scan > 0 else None  # a short scan is lost in the noise
        report.add(
            chunks=chunks,
            attend_us=1e6 * per_layer,
            base_us=1e6 * base,
            selection_us=1e6 * scan,
            summary_mib=summary / 2**20,
            of_copy=rate / run.ceiling("device copy, read + written") if rate else NOT_APPLICABLE,
            spread=timing.spread,
        )


SECTIONS: dict[str, Callable[[Run], None]] = {
    "ceilings": ceilings,
    "paging": paging,
    "attention": attention,
    "selection": selection,
}
