"""From a model, a machine and budgets to a configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from kvpager.config import (
    DEFAULT_ROWS,
    DEFAULT_SCORER,
    Dense,
    PagerConfig,
    Selection,
    frontier_blocks,
)
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.plan import costs, reasons
from kvpager.plan.bounded import topk_for
from kvpager.plan.budget import Budget, Workload, margin_of
from kvpager.plan.costs import Run
from kvpager.plan.machine import Machine
from kvpager.plan.memory import (
    pager_memory,
    staging_bytes,
    suits_experts,
    table_bytes,
    working_bytes,
)
from kvpager.plan.result import Plan
from kvpager.plan.shape import KvShape, ModelShape
from kvpager.words import byte_size

_DENSE_MAY_COST = 2.0  # times the step that misses nothing


def recommend(
    shape: ModelShape,
    machine: Machine,
    budget: Budget,
    workload: Workload,
    *,
    chunk_tokens: int = 64,
    kv_dtype: str = "auto",
    disk_path: str | None = None,
) -> Plan:
    """The configuration that keeps most in the pool, and reads all of it while that is cheap.

    More memory never gives a smaller pool, and a longer context never takes less memory.

    Raises:
        CapacityError: the weights, the least pool or the context do not fit; says by how much.
        InvalidArgumentError: the context is longer than the model was made for.
    """
    if shape.max_positions and workload.context > shape.max_positions:
        raise InvalidArgumentError(
            f"context is {workload.context:,} tokens; {shape.name} was made for up to "
            f"{shape.max_positions:,} (max_position_embeddings)"
        )
    if machine.on_gpu:
        shape = replace(shape, gathers_experts=True)
    kv = KvShape.of(shape, chunk_tokens, kv_dtype, DEFAULT_SCORER)
    rows = rows_for(shape, machine)
    working = working_bytes(shape, rows)
    margin = margin_of(budget.device)
    rest = budget.device - margin - shape.weight_bytes - working
    if rest < 0:
        raise CapacityError(
            reasons.weights_do_not_fit(shape, kv, machine, budget, workload, rows, -rest)
        )

    per_session = kv.chunks(workload.context)
    frontier = frontier_blocks(chunk_tokens, rows)
    all_chunks = workload.sessions * per_session
    wanted = all_chunks + frontier + 1
    summaries = wanted + workload.sessions
    least = max(
        PagerConfig(pool_tokens="auto", chunk_tokens=chunk_tokens).least_pool(rows) // chunk_tokens,
        frontier + 1 + workload.sessions,
    )
    fixed = (
        summaries * kv.summary_bytes
        + staging_bytes(kv, all_chunks, machine.on_gpu)
        + table_bytes(shape, kv, rows, all_chunks, machine.on_gpu)
    )
    pool = min(max(wanted, least), (rest - fixed) // kv.chunk_bytes)
    if pool < least:
        short = least * kv.chunk_bytes + fixed - rest
        raise CapacityError(
            f"{reasons.memory_name(machine)} is short of {byte_size(short)}: beside weights "
            f"({byte_size(shape.weight_bytes)}), working memory ({byte_size(working)}) and a "
            f"margin ({byte_size(margin)}) there have to be {byte_size(fixed)} of key summaries, "
            f"staging and tables for {workload.sessions * workload.context:,} tokens and the "
            f"least pool of {least * chunk_tokens:,} tokens, {byte_size(least * kv.chunk_bytes)}; "
            "lower --context or --sessions, or give more memory"
        )
    redundant = pool >= wanted
    host, disk = (
        (0, 0) if redundant else _homes(kv, machine, budget, workload, all_chunks, pool, disk_path)
    )
    memory = pager_memory(
        shape,
        kv,
        rows=rows,
        pool_chunks=pool,
        host_chunks=host,
        disk_chunks=disk,
        summary_chunks=summaries,
        seen_chunks=all_chunks,
        on_gpu=machine.on_gpu,
    )
    run = Run(shape, kv, machine, rows, Dense(), pool, host)
    selection, why_selection = _choose_selection(run, workload, redundant)
    default_rows = DEFAULT_ROWS["cuda" if machine.on_gpu else "cpu"][0]
    config = PagerConfig(
        pool_tokens=pool * chunk_tokens,
        chunk_tokens=chunk_tokens,
        rows=None if rows == default_rows else rows,
        selection=selection,
        host_bytes=host * kv.chunk_bytes,
        disk_path=disk_path if disk else None,
        disk_bytes=disk * kv.chunk_bytes,
        summary_bytes=summaries * kv.summary_bytes,
        kv_dtype=cast(Any, kv_dtype),  # KvShape has checked it
    )
    spare = rest - memory.device
    why = [
        reasons.why_pool(redundant, pool, wanted, kv, spare, machine),
        f"chunks of {chunk_tokens} tokens: the size that retrieval was measured with",
        reasons.why_rows(shape, rows, default_rows),
        *reasons.why_copies(shape, spare, machine),
        reasons.why_homes(redundant, host, disk, kv, machine),
        why_selection,
    ]
    return Plan(
        shape,
        machine,
        budget,
        workload,
        config,
        kv,
        rows,
        memory,
        working,
        margin,
        redundant,
        spare,
        tuple(why),
    )


def rows_for(shape: ModelShape, machine: Machine) -> int:
    """M: what an engine takes whose pool is large, and whose small row counts are proven."""
    automatic = PagerConfig(pool_tokens="auto")
    device = "cuda" if machine.on_gpu else "cpu"
    return automatic.row_choices(device, partial(suits_experts, shape))[0]


def _choose_selection(run: Run, workload: Workload, redundant: bool) -> tuple[Selection, str]:
    if redundant:
        return Dense(), "dense: everything is in the pool, and nothing is left out"
    steps = costs.decode(run, workload.context, workload.sessions)
    paging = steps.of("link") + steps.of("disk")
    slower = steps.seconds / (steps.seconds - paging)
    if slower <= _DENSE_MAY_COST:
        return Dense(), (
            f"dense: what the pool does not hold makes a step {slower:.1f} times as long, at most "
            f"{_DENSE_MAY_COST:.0f}"
        )
    topk = topk_for(run.kv, workload.context)
    return topk, (
        f"top-k, {topk.chunks} chunks: dense steps would be {slower:.0f} times as long as without "
        "what the pool does not hold; needles are found, sums over everything need Dense()"
    )


def _homes(
    kv: KvShape,
    machine: Machine,
    budget: Budget,
    workload: Workload,
    chunks: int,
    pool: int,
    disk_path: str | None,
) -> tuple[int, int]:
    """Chunks below the pool, of host memory and of disk: every sealed chunk has its home there."""
    on_disk = budget.disk // kv.chunk_bytes if disk_path else 0
    host = 0
    if machine.on_gpu:
        host = min(chunks, (budget.host - margin_of(budget.host)) // kv.chunk_bytes)
        host = max(0, host)
        alone = kv.chunks(workload.context)
        if pool + host < alone:
            short = (alone - pool - host) * kv.chunk_bytes
            raise CapacityError(
                f"host memory is short of {byte_size(short)}: on a GPU the chunks of a running "
                f"session have to be in the pool or in pinned memory, {alone:,} for "
                f"{workload.context:,} tokens; raise --host-memory, or lower --context"
            )
    needed = chunks - host
    if needed > on_disk:
        room = chunks - needed + on_disk
        raise CapacityError(
            f"{workload.sessions * workload.context:,} tokens take "
            f"{byte_size(chunks * kv.chunk_bytes)} of K/V, of which the pool holds "
            f"{byte_size(pool * kv.chunk_bytes)}; every chunk needs a home below the pool, and "
            f"there is room for {byte_size(room * kv.chunk_bytes)}: give "
            f"--disk-path DIR --disk-bytes {-(-needed * kv.chunk_bytes >> 20)}MiB, lower --context "
            "or --sessions"
        )
    return host, needed
