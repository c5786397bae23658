"""`pool_tokens="auto"`: as much pool as a model's longest context needs, as far as memory goes."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager import _core
from kvpager._support.notebook import card
from kvpager._support.words import byte_size
from kvpager.config import PagerConfig
from kvpager.errors import CapacityError
from kvpager.plan.memory import margin_of, pool_bounds, staging_bytes, summary_slots
from kvpager.plan.shape import KvShape

UNKNOWN_CONTEXT = 131_072  # of a model that does not say what it was made for
_DEVICE_TABLES = 512 << 20  # tables and partial results on a GPU, which grow with the context


@dataclass(frozen=True)
class PoolChoice:
    """The chosen pool, and the figures it was chosen from.

    Attributes:
        pool_tokens: the choice.
        wanted_tokens: what the longest context and a forward beside it would take.
        least_tokens: what the configuration's forwards need.
        free_bytes: memory that was free, weights being loaded.
        margin_bytes: of it, left alone.
        other_bytes: of it, for the host arena (on a CPU), summaries, staging and tables.
        pool_bytes: what the pool takes.
    """

    pool_tokens: int
    wanted_tokens: int
    least_tokens: int
    free_bytes: int
    margin_bytes: int
    other_bytes: int
    pool_bytes: int

    @property
    def complete(self) -> bool:
        """Whether a session of the longest context stays in the pool as a whole."""
        return self.pool_tokens >= self.wanted_tokens

    def __str__(self) -> str:
        why = (
            "the longest context and a forward"
            if self.complete
            else f"what fits of the {self.wanted_tokens:,} that the longest context takes"
        )
        return (
            f"pool of {self.pool_tokens:,} tokens ({byte_size(self.pool_bytes)}): {why}; "
            f"{byte_size(self.free_bytes)} free, {byte_size(self.margin_bytes)} left alone, "
            f"{byte_size(self.other_bytes)} for host arena, summaries, staging and tables"
        )

    def _repr_html_(self) -> str:
        """The figures as a table, for notebooks."""
        facts = [
            ("pool", f"{self.pool_tokens:,} tokens, {byte_size(self.pool_bytes)}"),
            ("wanted", f"{self.wanted_tokens:,} tokens: the longest context and a forward"),
            ("least", f"{self.least_tokens:,} tokens"),
            ("free memory", byte_size(self.free_bytes)),
            ("left alone", byte_size(self.margin_bytes)),
            ("host arena, summaries, tables", byte_size(self.other_bytes)),
        ]
        return card("Plan of the pool", facts)


def choose_pool(
    config: PagerConfig,
    layout: _core.Layout,
    *,
    rows: int,
    max_positions: int,
    free_bytes: int,
    device: str,
) -> PoolChoice:
    """A pure function of its arguments. More free memory never gives a smaller pool.

    Args:
        config: with `pool_tokens` "auto"; its other options are kept.
        layout: of the model's chunks.
        rows: M.
        max_positions: the longest context; 0: unknown.
        free_bytes: where the pool goes to, now that the weights are there.
        device: kind of it: "cpu", "cuda" or "shim".

    Raises:
        CapacityError: not even the least pool fits; says by how much.
    """
    kv = KvShape.of_layout(layout)
    least, wanted = pool_bounds(config, rows, kv.chunks(max_positions or UNKNOWN_CONTEXT))
    wanted = max(least, wanted)
    on_gpu = device != "cpu"
    host = config.host_budget_on(device) // kv.chunk_bytes
    disk = config.disk_bytes // kv.chunk_bytes
    margin = margin_of(free_bytes)
    other = staging_bytes(kv, host, on_gpu) + (_DEVICE_TABLES if on_gpu else 0)
    slot = kv.summary_bytes if config.summary_bytes == "auto" else 0
    if config.summary_bytes != "auto":
        other += config.summary_budget
    if on_gpu:  # where the arena is elsewhere, and all summaries are allocated at once
        other += summary_slots(0, host, disk) * slot
    elif config.host_bytes == "auto":
        # Mapped, and taken as chunks come: no more than one longest context, and half of it all.
        half = max(0, free_bytes - margin - other) // 2
        other += min(wanted, host, half // (kv.chunk_bytes + slot)) * (kv.chunk_bytes + slot)
    else:
        other += host * (kv.chunk_bytes + slot)
    fits = (free_bytes - margin - other) // (kv.chunk_bytes + slot)
    if fits < least:
        short = least * (kv.chunk_bytes + slot) + other + margin - free_bytes
        raise CapacityError(
            f'pool_tokens is "auto", and {free_bytes:,} bytes are free where the pool goes: '
            f"{short:,} too few for the least pool of {least * kv.chunk_tokens:,} tokens "
            f"(rows {rows}) beside {other:,} bytes of host arena, summaries, staging and tables "
            f"and a margin of {margin:,}. Lower host_bytes or rows, or give pool_tokens as a number"
        )
    pool = min(wanted, fits)
    return PoolChoice(
        pool_tokens=pool * kv.chunk_tokens,
        wanted_tokens=wanted * kv.chunk_tokens,
        least_tokens=least * kv.chunk_tokens,
        free_bytes=free_bytes,
        margin_bytes=margin,
        other_bytes=other + pool * slot,
        pool_bytes=pool * kv.chunk_bytes,
    )
