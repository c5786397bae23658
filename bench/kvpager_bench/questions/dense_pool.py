"""What a pool of an eighth of the context costs dense attention, and that it changes no bit.

    kvpager bench dense_pool
    kvpager bench dense_pool -- --full

Prefills a document and decodes after it twice with the same engine settings: once with a pool that
holds everything, once with one of an eighth of the context. Every K/V element, and the logits of
the prompt's end and of every decoded token, are compared as raw bits. Stock transformers (cache
filled in steps, full attention) is timed beside them; decode steps of the three take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
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


class Ours:
    """One engine with a prompt in it, and every bit that it has produced."""

    def __init__(self, model: Any, ids: Any, pool_tokens: int, steps: int) -> None:
        config = PagerConfig(pool_tokens=pool_tokens, chunk_tokens=CHUNK_TOKENS, selection=Dense())
        self.engine = Engine(model, config)
        self._session = self.engine.session()
        start = time.perf_counter()
        self._session.prefill(ids)
        self.prefill_seconds = time.perf_counter() - start
        self._logits = [self._session.logits]
        self._stream = self._session.generate(steps + 1, eos=None, stream="tokens")
        next(self._stream)  # from the logits the prefill left

    def step(self) -> float:
        """Decodes a token; returns its seconds."""
        start = time.perf_counter()
        next(self._stream)
        seconds = time.perf_counter() - start
        self._logits.append(self._session.logits)
        return seconds

    def bits(self) -> list[torch.Tensor]:
        """Of all logits, and of the K/V of every position."""
        bits = [_raw(tensor) for tensor in self._logits]
        committed = self._session.committed
        for layer in range(self.engine.layout.layers):
            for first in range(0, committed, READ_TOKENS):
                last = min(first + READ_TOKENS, committed)
                bits += [_raw(t) for t in self._session.sequence.read_kv(layer, first, last)]
        return bits


def decode_in_turn(runs: Sequence[Callable[[], float]], steps: int) -> list[float]:
    """Seconds per step of each, the mean of `steps`, so that what pages is in it."""
    seconds = [0.0] * len(runs)
    for _ in range(steps):
        for i, run in enumerate(runs):
            seconds[i] += run()
    return [total / steps for total in seconds]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
    parser.add_argument("--layers", type=int, help="of the other shapes")
    parser.add_argument("--steps", type=int, default=16, help="decoded tokens")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.steps = arguments.shapes[:1], 4
    contexts = arguments.contexts or (
        [2048] if arguments.quick else [4096, 8192, 16384] if arguments.full else [8192]
    )
    wide = arguments.wide_contexts or ([4096] if arguments.full else [2048])
    arguments.layers = arguments.layers or (8 if arguments.full else 4)
    record = harness.start(arguments)
    report = Report(
        harness.report_name("dense_pool", arguments),
        f"Dense attention through a pool of 1/{SHARE} of the context, beside one that holds all",
        COLUMNS,
        {"chunk_tokens": CHUNK_TOKENS, "steps": arguments.steps, "pool_share": 1 / SHARE},
        record,
    )
    for shape in arguments.shapes:
        model = subjects.load_model(shape, layers=arguments.layers)
        for tokens in contexts if shape == subjects.SHIPPED else wide:
            measure_context(report, shape, model, tokens, arguments)
    total = sum(report.number(row, "differing_bits") for row in report.rows)
    report.judge("not one bit differs from the unbounded pool", total == 0, f"{total:.0f} differ")
    report.finish()


def measure_context(
    report: Report, shape: str, model: Any, tokens: int, arguments: argparse.Namespace
) -> None:
    steps = arguments.steps
    name = f"{shape} at {harness.tokens_name(tokens)}"
    ids = subjects.random_ids(model, tokens, seed=1)
    pool = tokens // SHARE
    room = tokens + steps + 4 * CHUNK_TOKENS
    unbounded = room + -room % CHUNK_TOKENS
    warm = subjects.random_ids(model, 256, seed=2)  # other tokens
    Ours(model, warm, unbounded, 2).engine.close()
    stock = subjects.beside(model)
    free, bounded = Ours(model, ids, unbounded, steps), Ours(model, ids, pool, steps)
    with free.engine, bounded.engine:
        start = time.perf_counter()
        cache, _ = subjects.stock_prefill(stock, ids, subjects.PREFILL_TOKENS)
        stock_prefill = time.perf_counter() - start
        subjects.stock_step(stock, cache, [9])
        free_step, bounded_step, stock_step = decode_in_turn(
            [
                free.step,
                bounded.step,
                lambda: timed(lambda: subjects.stock_step(stock, cache, [9])),
            ],
            steps,
        )
        stats = bounded.engine.stats()
        bits, others = free.bits(), bounded.bits()
        token_bytes = free.engine.layout.token_bytes
    if stats["chunks_recalled"] + stats["chunks_evicted"] == 0:
        raise harness.MissingNumberError("the bounded pool never paged: nothing was measured")
    report.add(
        shape=shape,
        context=tokens,
        pool=pool,
        differing_bits=differing_bits(bits, others),
        bits_compared=8 * sum(tensor.numel() for tensor in bits),
        prefill_tokens_per_s=tokens / bounded.prefill_seconds,
        prefill_unbounded=tokens / free.prefill_seconds,
        prefill_transformers=tokens / stock_prefill,
        prefill_time_ratio=bounded.prefill_seconds / free.prefill_seconds,
        decode_tokens_per_s=1 / bounded_step,
        decode_unbounded=1 / free_step,
        decode_transformers=1 / stock_step,
        decode_time_ratio=bounded_step / free_step,
        recalled_chunks=stats["chunks_recalled"],
        resident_mib=stats["resident_bytes"] / 2**20,
        full_cache_mib=tokens * token_bytes / 2**20,
    )
    report.compare(
        f"dense decode through a pool of 1/{SHARE}, {name}",
        ours=1 / bounded_step,
        theirs=1 / free_step,
        peer="a pool that holds all",
        unit="tokens/s",
        aim=None,
    )
    report.compare(
        f"dense prefill through a pool of 1/{SHARE}, {name}",
        ours=tokens / bounded.prefill_seconds,
        theirs=tokens / free.prefill_seconds,
        peer="a pool that holds all",
        unit="tokens/s",
        aim=None,
    )
    report.compare(
        f"dense decode through a pool of 1/{SHARE}, {name}",
        ours=1 / bounded_step,
        theirs=1 / stock_step,
        peer="transformers",
        unit="tokens/s",
        aim=None,
    )
    print(f"{shape} {tokens}: measured", flush=True)


if __name__ == "__main__":
    main()
