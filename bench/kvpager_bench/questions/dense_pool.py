"""What a pool of an eighth of the context costs dense attention, and that it changes no bit.

    kvpager bench dense_pool --

Prefills a document and decodes after it twice with the same engine settings: once with a pool that
holds everything, once with one of an eighth of the context. Every K/V element, and the logits of
the prompt's end and of every decoded token, are compared as raw bits. Stock transformers (cache
filled in steps, full attention) is timed beside them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch

from kvpager import Dense, Engine, PagerConfig
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report

CHUNK_TOKENS = 64
SHARE = 8  # of the context, as its divisor
READ_TOKENS = 4096  # K/V read back at a time

COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("pool", "tokens"),
    Column("differing_bits"),
    Column("bits_compared"),
    Column("prefill_tokens_per_s", "1/s"),
    Column("prefill_unbounded", "1/s"),
    Column("prefill_transformers", "1/s"),
    Column("prefill_time_ratio", "x"),
    Column("decode_tokens_per_s", "1/s"),
    Column("decode_unbounded", "1/s"),
    Column("decode_transformers", "1/s"),
    Column("decode_time_ratio", "x"),
    Column("recalled_chunks"),
    Column("resident_mib", "MiB"),
    Column("full_cache_mib", "MiB"),
)


@dataclass
class Outcome:
    """Times of one run, and every bit it produced."""

    prefill_seconds: float
    decode_seconds: float
    bits: list[torch.Tensor]
    stats: dict[str, Any]
    token_bytes: int


def run_ours(model: Any, ids: Any, pool_tokens: int, steps: int) -> Outcome:
    config = PagerConfig(pool_tokens=pool_tokens, chunk_tokens=CHUNK_TOKENS, selection=Dense())
    with Engine(model, config) as engine:
        session = engine.session()
        start = time.perf_counter()
        session.prefill(ids)
        prefilled = time.perf_counter()
        logits = [session.logits]
        stream = session.generate(steps + 1, eos=None)
        next(stream)  # from the logits the prefill left
        decode_seconds = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            next(stream)
            decode_seconds += time.perf_counter() - begin
            logits.append(session.logits)
        stats = engine.stats()
        bits = [_raw(tensor) for tensor in logits]
        committed = session.committed
        for layer in range(engine.layout.layers):
            for first in range(0, committed, READ_TOKENS):
                last = min(first + READ_TOKENS, committed)
                bits += [_raw(t) for t in session.sequence.read_kv(layer, first, last)]
        token_bytes = engine.layout.token_bytes
    return Outcome(prefilled - start, decode_seconds / steps, bits, stats, token_bytes)


def run_stock(model: Any, ids: Any, steps: int) -> tuple[float, float]:
    """Seconds of the prefill and per decode step."""
    start = time.perf_counter()
    cache, _ = subjects.stock_prefill(model, ids, subjects.PREFILL_TOKENS)
    seconds = time.perf_counter() - start
    step = harness.measure(lambda: subjects.stock_step(model, cache, [9]), runs=steps)
    return seconds, step.median


def differing_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    """Of two runs' raw bytes. Raises MissingNumberError if they are not of the same shapes."""
    if [t.shape for t in a] != [t.shape for t in b]:
        raise harness.MissingNumberError("the two runs did not produce the same shapes")
    ones = torch.tensor([bin(i).count("1") for i in range(256)])
    return sum(int((ones[(x ^ y).long()]).sum()) for x, y in zip(a, b) if not torch.equal(x, y))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument(
        "--shapes", type=harness.parse_list, default=[subjects.SHIPPED, "gqa8-bf16"]
    )
    parser.add_argument("--contexts", type=harness.parse_ints, help="of the shipped model")
    parser.add_argument("--wide-contexts", type=harness.parse_ints, help="of the other shapes")
    parser.add_argument("--steps", type=int, default=16, help="decoded tokens")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.steps = arguments.shapes[:1], 4
    contexts = arguments.contexts or ([2048] if arguments.quick else [4096, 8192, 16384])
    wide = arguments.wide_contexts or [4096]
    record = harness.start(arguments)
    report = Report(
        harness.report_name("dense_pool", arguments),
        f"Dense attention through a pool of 1/{SHARE} of the context, beside one that holds all",
        COLUMNS,
        {"chunk_tokens": CHUNK_TOKENS, "steps": arguments.steps, "pool_share": 1 / SHARE},
        record,
    )
    for shape in arguments.shapes:
        model = subjects.load_model(shape)
        for tokens in contexts if shape == subjects.SHIPPED else wide:
            measure_context(report, shape, model, tokens, arguments)
    total = sum(report.number(row, "differing_bits") for row in report.rows)
    report.judge("not one bit differs from the unbounded pool", total == 0, f"{total:.0f} differ")
    report.finish()


def measure_context(
    report: Report, shape: str, model: Any, tokens: int, arguments: argparse.Namespace
) -> None:
    steps = arguments.steps
    ids = subjects.random_ids(model, tokens, seed=1)
    pool = tokens // SHARE
    room = tokens + steps + 4 * CHUNK_TOKENS
    unbounded = room + -room % CHUNK_TOKENS
    run_ours(model, subjects.random_ids(model, 256, seed=2), unbounded, 2)  # warms other tokens
    free = run_ours(model, ids, unbounded, steps)
    bounded = run_ours(model, ids, pool, steps)
    stock_prefill, stock_step = run_stock(model, ids, steps)
    if bounded.stats["chunks_recalled"] + bounded.stats["chunks_evicted"] == 0:
        raise harness.MissingNumberError("the bounded pool never paged: nothing was measured")
    report.add(
        shape=shape,
        context=tokens,
        pool=pool,
        differing_bits=differing_bits(free.bits, bounded.bits),
        bits_compared=8 * sum(tensor.numel() for tensor in free.bits),
        prefill_tokens_per_s=tokens / bounded.prefill_seconds,
        prefill_unbounded=tokens / free.prefill_seconds,
        prefill_transformers=tokens / stock_prefill,
        prefill_time_ratio=bounded.prefill_seconds / free.prefill_seconds,
        decode_tokens_per_s=1 / bounded.decode_seconds,
        decode_unbounded=1 / free.decode_seconds,
        decode_transformers=1 / stock_step,
        decode_time_ratio=bounded.decode_seconds / free.decode_seconds,
        recalled_chunks=bounded.stats["chunks_recalled"],
        resident_mib=bounded.stats["resident_bytes"] / 2**20,
        full_cache_mib=tokens * bounded.token_bytes / 2**20,
    )
    print(f"{shape} {tokens}: measured", flush=True)


if __name__ == "__main__":
    main()
