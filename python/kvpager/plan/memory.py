"""Bytes that a pager will take; `Pager.stats()` has the same of an existing one."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager import _core
from kvpager.config import PagerConfig, frontier_blocks
from kvpager.plan.shape import KvShape, ModelShape

_STREAMED_SEQUENCES = 4  # of which the host stages a split each
_STAGING_BYTES = 256 << 20
_SCRATCH_BYTES = 256 << 20
_GROUP_SCRATCH_BYTES = 512 << 20
_SPLIT_CHUNKS, _GROUP_CHUNKS = 4, 64  # of tensor attention
_FIRST_ENTRIES = 1024
_ENTRY_BYTES = 64  # tables and results of a chunk that a forward may see
_BOUNCES = 4
COPY_BYTES = 1.5  # of a weight, with compress_weights
_GATHERED_ANYWAY = 256 << 20  # of expert weights, where the model is small
_MARGIN_SHARE = 16  # a sixteenth of a memory stays free,
_LEAST_MARGIN = 256 << 20  # and at least this many bytes


def margin_of(memory: int) -> int:
    """Bytes of a memory that stay free, for the framework, fragmentation and everything else."""
    return max(_LEAST_MARGIN, memory // _MARGIN_SHARE)


@dataclass(frozen=True)
class PagerMemory:
    """The memory that a pager maps, pins or allocates.

    Attributes:
        pool, summaries, staging, tables: where the pool is; tables include partial results.
        host: the arena of paged-out chunks; on a GPU pinned.
        pinned: on a GPU, what else is pinned: copies of the summaries, transfer buffers.
        disk: the spill file.
    """

    pool: int
    summaries: int
    staging: int
    tables: int
    host: int
    pinned: int
    disk: int

    @property
    def device(self) -> int:
        """Bytes where the pool is, the host arena apart."""
        return self.pool + self.summaries + self.staging + self.tables

    @property
    def total(self) -> int:
        """Bytes of all memories and of disk."""
        return self.device + self.host + self.pinned + self.disk


def pool_bounds(config: PagerConfig, rows: int, chunks: int, sessions: int = 0) -> tuple[int, int]:
    """The least pool of M = `rows`, and one that holds `chunks` beside a forward; in chunks.

    sessions: each of which keeps a block for its tail.
    """
    beside = frontier_blocks(config.chunk_tokens, rows) + 1
    least = max(config.least_pool(rows) // config.chunk_tokens, beside + sessions)
    return least, chunks + beside


def summary_slots(pool_chunks: int, host_chunks: int, disk_chunks: int) -> int:
    """Summaries a pager has room for with `summary_bytes` "auto"."""
    return 2 * (host_chunks + disk_chunks) + pool_chunks


def staging_bytes(kv: KvShape, host_chunks: int, on_gpu: bool) -> int:
    """For slices on their way to where attention reads them."""
    if not on_gpu:
        return _core.CHUNKS_PER_SPLIT * _STREAMED_SEQUENCES * kv.slice_bytes
    slices = min(_STAGING_BYTES // (2 * kv.slice_bytes), host_chunks)
    return 2 * slices * kv.slice_bytes


def table_bytes(shape: ModelShape, kv: KvShape, rows: int, chunks: int, on_gpu: bool) -> int:
    """Tables of a forward that sees so many chunks, and partial results: an upper bound."""
    if not on_gpu:
        return 0
    entries = _FIRST_ENTRIES
    while entries < chunks:
        entries *= 2
    state = rows * shape.q_heads * (shape.v_dim + 8) * 4
    splits = min(_SCRATCH_BYTES, state * -(-entries // _SPLIT_CHUNKS))
    groups = min(_GROUP_SCRATCH_BYTES, state * -(-entries // _GROUP_CHUNKS))
    return max(splits, groups) + entries * (_ENTRY_BYTES + rows * shape.kv_heads // 8)


def pager_memory(
    shape: ModelShape,
    kv: KvShape,
    *,
    rows: int,
    pool_chunks: int,
    host_chunks: int,
    disk_chunks: int,
    summary_chunks: int,
    seen_chunks: int,
    on_gpu: bool,
) -> PagerMemory:
    """The memory of a pager with so many blocks, host slots, disk slots and summary slots.

    seen_chunks: chunks of all sequences of a forward.
    """
    summaries = summary_chunks * kv.summary_bytes
    return PagerMemory(
        pool=pool_chunks * kv.chunk_bytes,
        summaries=summaries,
        staging=staging_bytes(kv, host_chunks, on_gpu),
        tables=table_bytes(shape, kv, rows, seen_chunks, on_gpu),
        host=host_chunks * kv.chunk_bytes,
        pinned=summaries + _BOUNCES * kv.chunk_bytes if on_gpu else 0,
        disk=disk_chunks * kv.chunk_bytes,
    )


def working_bytes(shape: ModelShape, rows: int) -> int:
    """The temporary memory of a forward of `rows` rows: activations, logits, gathered experts."""
    widest = max(4 * shape.hidden, 3 * shape.intermediate, 2 * shape.q_heads * shape.k_dim)
    activations = rows * (8 * shape.hidden + widest) * 4
    logits = 8 * shape.vocab * 4
    return activations + logits + gathered_bytes(shape, rows)


def gathered_bytes(shape: ModelShape, rows: int) -> int:
    """Copies of expert weights, one per row and expert it takes: two thirds of them at a time.

    None where experts are kvpager's products (`ModelShape.gathers_experts`).
    """
    copies = rows * shape.experts_per_token if shape.gathers_experts else 0
    return copies * shape.expert_parameters * shape.dtype_bytes * 2 // 3


def suits_experts(shape: ModelShape, rows: int) -> bool:
    """Whether forwards of a model may have `rows` rows by default.

    For a mixture of experts, the copies that a forward gathers may take at most an eighth of the
    weights' bytes, or 256 MiB. A function of the model alone, because M changes bits.
    """
    return gathered_bytes(shape, rows) <= max(shape.weight_bytes // 8, _GATHERED_ANYWAY)
