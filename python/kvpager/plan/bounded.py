"""What bounding the pool leaves free for weights, whether or not they fit."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.config import PagerConfig, TopK, frontier_blocks
from kvpager.plan.budget import Budget, Workload, margin_of
from kvpager.plan.machine import Machine
from kvpager.plan.memory import selected_tokens, staging_bytes, working_bytes
from kvpager.plan.shape import KvShape, ModelShape

CHUNKS_SHARE = 32  # TopK reads a 32nd of the context,
LEAST_CHUNKS = 32  # and at least so many chunks


@dataclass(frozen=True)
class Freed:
    """What a bounded pool leaves free where a full cache would be.

    Attributes:
        pool_tokens: of the bounded pool.
        pool_bytes: it, its summaries and staging.
        full_bytes: a cache of all sessions at full length.
        layers: layers of weights that the difference holds.
        hot_experts_full, hot_experts_pool: experts of each layer that fit beside either; 0 for a
            model without.
    """

    pool_tokens: int
    pool_bytes: int
    full_bytes: int
    layers: float
    hot_experts_full: int
    hot_experts_pool: int

    @property
    def bytes(self) -> int:
        """Bytes freed; negative where a short context takes less than the pool."""
        return self.full_bytes - self.pool_bytes


def freed(
    shape: ModelShape,
    kv: KvShape,
    machine: Machine,
    budget: Budget,
    workload: Workload,
    rows: int,
) -> Freed:
    """What bounding the pool leaves for weights, fit they or not."""
    tokens = workload.sessions * workload.context
    selection = topk_for(kv, workload.context)
    frontier = frontier_blocks(kv.chunk_tokens, rows)
    reads = workload.sessions * kv.chunks(selected_tokens(selection, kv.chunk_tokens))
    least = PagerConfig(pool_tokens="auto", chunk_tokens=kv.chunk_tokens).least_pool(rows)
    blocks = max(reads + frontier + 1, least // kv.chunk_tokens)
    chunks = kv.chunks(workload.context) * workload.sessions
    pool = blocks * kv.chunk_bytes
    pool += (chunks + frontier + 1) * kv.summary_bytes + staging_bytes(kv, chunks, machine.on_gpu)
    full = tokens * kv.token_bytes
    rest = budget.device - margin_of(budget.device) - shape.rest_bytes - working_bytes(shape, rows)
    return Freed(
        pool_tokens=blocks * kv.chunk_tokens,
        pool_bytes=pool,
        full_bytes=full,
        layers=(full - pool) / shape.layer_bytes,
        hot_experts_full=_hot_experts(shape, rest - full),
        hot_experts_pool=_hot_experts(shape, rest - pool),
    )


def topk_for(kv: KvShape, context: int) -> TopK:
    """A 32nd of the context, at least 32 chunks, in eights."""
    share = -(-kv.chunks(context) // CHUNKS_SHARE)
    return TopK(chunks=max(LEAST_CHUNKS, -(-share // 8) * 8))


def _hot_experts(shape: ModelShape, free: int) -> int:
    if not shape.experts:
        return 0
    one_of_each_layer = shape.expert_layers * shape.expert_parameters * shape.dtype_bytes
    return int(min(shape.experts, max(0, free // one_of_each_layer)))
