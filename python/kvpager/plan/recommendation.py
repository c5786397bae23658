"""From a model, budgets and a workload to a configuration, as far as memory goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from kvpager._support.words import byte_size
from kvpager.config import DEFAULT_ROWS, PagerConfig, config_to_json
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.plan.memory import (
    PagerMemory,
    margin_of,
    pager_memory,
    pool_bounds,
    staging_bytes,
    suits_experts,
    table_bytes,
    working_bytes,
)
from kvpager.plan.shape import KvShape, ModelShape


@dataclass(frozen=True)
class Budget:
    """Bytes that model and pager may take.

    Attributes:
        device: of the memory that weights and pool are in. On a CPU that is all there is.
        host: on a GPU's host, for the arena; on a CPU of no meaning.
        disk: for spilled chunks; 0: none.
        on_gpu: whether weights and pool are on a GPU.
    """

    device: int
    host: int = 0
    disk: int = 0
    on_gpu: bool = False

    @property
    def device_name(self) -> str:
        """The name of the pool's memory."""
        return "device memory" if self.on_gpu else "memory"


@dataclass(frozen=True)
class Workload:
    """What is to run at once: sessions of so many tokens each, answers included."""

    context: int
    sessions: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; expected 1 or more")

    @property
    def tokens(self) -> int:
        """Tokens of all sessions."""
        return self.context * self.sessions


@dataclass(frozen=True)
class Plan:
    """A recommendation, and where the memory goes.

    Attributes:
        shape, budget, workload: what it is for.
        config: what to give to an Engine.
        kv: the model's K/V in chunks.
        rows: M.
        memory: what the pager takes.
        working: bytes a forward takes for a while.
        margin: bytes left alone.
        redundant: everything fits into the pool: paging would not be needed.
        spare: bytes left where the pool is.
    """

    shape: ModelShape
    budget: Budget
    workload: Workload
    config: PagerConfig
    kv: KvShape
    rows: int
    memory: PagerMemory
    working: int
    margin: int
    redundant: bool
    spare: int

    def to_json(self) -> dict[str, Any]:
        """Everything that a plan says, of types that JSON has."""
        return {
            "model": vars(self.shape)
            | {"parameters": self.shape.parameters, "weight_bytes": self.shape.weight_bytes},
            "budget": vars(self.budget),
            "workload": vars(self.workload),
            "config": config_to_json(self.config),
            "rows": self.rows,
            "kv": vars(self.kv),
            "memory": vars(self.memory)
            | {"weights": self.shape.weight_bytes, "working": self.working, "margin": self.margin},
            "redundant": self.redundant,
            "spare_bytes": self.spare,
        }


def recommend(
    shape: ModelShape,
    budget: Budget,
    workload: Workload,
    *,
    chunk_tokens: int = 64,
    kv_dtype: str = "auto",
    disk_path: str | None = None,
) -> Plan:
    """The configuration that keeps most in the pool, and has a home for every chunk.

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
    if budget.on_gpu:
        shape = replace(shape, gathers_experts=True)
    kv = KvShape.of(shape, chunk_tokens, kv_dtype)
    rows = rows_for(shape, budget.on_gpu)
    working = working_bytes(shape, rows)
    margin = margin_of(budget.device)
    rest = budget.device - margin - shape.weight_bytes - working
    if rest < 0:
        raise CapacityError(
            f"the weights alone do not fit: {budget.device_name} of {byte_size(budget.device)} is "
            f"short of {byte_size(-rest)} for {shape.name} ({byte_size(shape.weight_bytes)} in "
            f"{shape.dtype}), what a forward takes and a margin of {byte_size(margin)}; take a "
            "smaller model or dtype, or more memory"
        )

    all_chunks = workload.sessions * kv.chunks(workload.context)
    automatic = PagerConfig(pool_tokens="auto", chunk_tokens=chunk_tokens)
    least, wanted = pool_bounds(automatic, rows, all_chunks, workload.sessions)
    summaries = wanted + workload.sessions
    fixed = (
        summaries * kv.summary_bytes
        + staging_bytes(kv, all_chunks, budget.on_gpu)
        + table_bytes(shape, kv, rows, all_chunks, budget.on_gpu)
    )
    pool = min(max(wanted, least), (rest - fixed) // kv.chunk_bytes)
    if pool < least:
        short = least * kv.chunk_bytes + fixed - rest
        raise CapacityError(
            f"{budget.device_name} is short of {byte_size(short)}: beside weights "
            f"({byte_size(shape.weight_bytes)}), working memory ({byte_size(working)}) and a "
            f"margin ({byte_size(margin)}) there have to be {byte_size(fixed)} of key summaries, "
            f"staging and tables for {workload.tokens:,} tokens and the least pool of "
            f"{least * chunk_tokens:,} tokens, {byte_size(least * kv.chunk_bytes)}; lower "
            "--context or --sessions, or give more memory"
        )
    redundant = pool >= wanted
    host, disk = (0, 0) if redundant else _homes(kv, budget, workload, all_chunks, pool, disk_path)
    memory = pager_memory(
        shape,
        kv,
        rows=rows,
        pool_chunks=pool,
        host_chunks=host,
        disk_chunks=disk,
        summary_chunks=summaries,
        seen_chunks=all_chunks,
        on_gpu=budget.on_gpu,
    )
    default_rows = DEFAULT_ROWS["cuda" if budget.on_gpu else "cpu"][0]
    config = PagerConfig(
        pool_tokens=pool * chunk_tokens,
        chunk_tokens=chunk_tokens,
        rows=None if rows == default_rows else rows,
        host_bytes=host * kv.chunk_bytes,
        disk_path=disk_path if disk else None,
        disk_bytes=disk * kv.chunk_bytes,
        summary_bytes=summaries * kv.summary_bytes,
        kv_dtype=cast(Any, kv_dtype),  # KvShape has checked it
    )
    left = rest - memory.device
    return Plan(shape, budget, workload, config, kv, rows, memory, working, margin, redundant, left)


def rows_for(shape: ModelShape, on_gpu: bool) -> int:
    """M: what an engine takes whose pool is large, and whose small row counts are proven."""
    automatic = PagerConfig(pool_tokens="auto")
    return automatic.row_choices("cuda" if on_gpu else "cpu", partial(suits_experts, shape))[0]


def _homes(
    kv: KvShape, budget: Budget, workload: Workload, chunks: int, pool: int, disk_path: str | None
) -> tuple[int, int]:
    """Chunks below the pool, of host memory and of disk: every sealed chunk has its home there."""
    on_disk = budget.disk // kv.chunk_bytes if disk_path else 0
    host = 0
    if budget.on_gpu:
        host = max(0, min(chunks, (budget.host - margin_of(budget.host)) // kv.chunk_bytes))
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
        raise CapacityError(
            f"{workload.tokens:,} tokens take {byte_size(chunks * kv.chunk_bytes)} of K/V, of "
            f"which the pool holds {byte_size(pool * kv.chunk_bytes)}; every chunk needs a home "
            f"below the pool, and there is room for {byte_size((host + on_disk) * kv.chunk_bytes)}"
            f": give --disk-path DIR --disk-bytes {-(-needed * kv.chunk_bytes >> 20)}MiB, lower "
            "--context or --sessions"
        )
    return host, needed
