"""What a plan says of its choices and refusals."""

from __future__ import annotations

from kvpager.plan.bounded import freed
from kvpager.plan.budget import Budget, Workload, margin_of
from kvpager.plan.machine import Machine
from kvpager.plan.memory import COPY_BYTES, gathered_bytes
from kvpager.plan.shape import KvShape, ModelShape
from kvpager.words import byte_size


def weights_do_not_fit(
    shape: ModelShape,
    kv: KvShape,
    machine: Machine,
    budget: Budget,
    workload: Workload,
    rows: int,
    short: int,
) -> str:
    """Why nothing can run, and for a mixture of experts what a stack of its own could keep."""
    said = (
        f"the weights alone do not fit: {memory_name(machine)} of {byte_size(budget.device)} is "
        f"short of {byte_size(short)} for {shape.name} ({byte_size(shape.weight_bytes)} in "
        f"{shape.dtype}), what a forward takes and a margin of "
        f"{byte_size(margin_of(budget.device))}"
    )
    if not shape.experts:
        return said + "; take a smaller model or dtype, or more memory"
    bounded = freed(shape, kv, machine, budget, workload, rows)
    return said + (
        f". An engine keeps all experts in memory. A stack of your own that keeps the busiest ones "
        f"has room for {bounded.hot_experts_pool} of {shape.experts} experts per layer beside a "
        f"pool of {bounded.pool_tokens:,} tokens, and for {bounded.hot_experts_full} beside a full "
        f"cache of {workload.sessions * workload.context:,}"
    )


def memory_name(machine: Machine) -> str:
    """What the pool's memory is called."""
    return "device memory" if machine.on_gpu else "memory"


def why_pool(
    redundant: bool, pool: int, wanted: int, kv: KvShape, spare: int, machine: Machine
) -> str:
    """The line about the pool."""
    tokens = pool * kv.chunk_tokens
    if redundant:
        return (
            f"pool of {tokens:,} tokens: everything fits, paging is redundant; "
            f"{byte_size(spare)} of {memory_name(machine)} are left"
        )
    return (
        f"pool of {tokens:,} tokens: what fits beside weights, summaries and a margin; "
        f"{byte_size((wanted - pool) * kv.chunk_bytes)} less than everything"
    )


def why_copies(shape: ModelShape, spare: int, machine: Machine) -> list[str]:
    """The line about copies of weights, where they can be had and there is room for them."""
    weights = shape.layer_parameters + shape.all_expert_parameters + shape.head_parameters
    copies = int(weights * COPY_BYTES)
    if machine.on_gpu or shape.dtype != "bfloat16" or copies > spare:
        return []
    return [
        f"no copies of weights: compress_weights=True would take {byte_size(copies)} of what is "
        "left, and forwards of a few rows would read three quarters of what they read now"
    ]


def why_rows(shape: ModelShape, rows: int, default: int) -> str:
    """The line about M."""
    if rows == default:
        return f"forwards of up to {rows} rows: the default"
    return (
        f"forwards of up to {rows} rows: with {default} every forward would gather "
        f"{byte_size(gathered_bytes(shape, default))} of expert weights"
    )


def why_homes(redundant: bool, host: int, disk: int, kv: KvShape, machine: Machine) -> str:
    """The line about what is below the pool."""
    if redundant:
        return "no host memory: no chunk ever leaves the pool"
    parts = []
    if host:
        pinned = " of pinned host memory" if machine.on_gpu else " of host memory"
        parts.append(byte_size(host * kv.chunk_bytes) + pinned)
    if disk:
        parts.append(byte_size(disk * kv.chunk_bytes) + " of disk")
    return " and ".join(parts) + ": a home for every chunk, so that evicting moves nothing"
