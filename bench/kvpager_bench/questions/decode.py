"""Decode time per token as the context grows, and where it goes.

    kvpager bench decode --
    kvpager bench decode -- --shapes shipped --contexts 4096,32768

K/V of the context are random and injected: only time is measured. Each step is a forward of M rows
of which one decodes. "model" is the transformers model with its attention taken out, "scan" scores
summaries and selects, "attention" walks the chosen chunks, "rest" is everything else (begin,
commit, writing, paging, sampling). Beside them: dense attention by the same kernels at the same
length, and stock transformers with a full DynamicCache, which decodes one row per forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvpager import Dense, Engine, PagerConfig, Session, TopK
from kvpager.config import DEFAULT_SCORER
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Timing

CHUNKS = 32
POOL_TOKENS = 4096
WARM_UP_STEPS = 2
JUDGED_FROM = 8192  # below, selecting 32 chunks saves little and nobody would

COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("step_ms", "ms"),
    Column("model_ms", "ms"),
    Column("scan_ms", "ms"),
    Column("attention_ms", "ms"),
    Column("rest_ms", "ms"),
    Column("spread", "(max-min)/median", 2),
    Column("dense_step_ms", "ms"),
    Column("dense_attention_ms", "ms"),
    Column("scan_of_dense_attention", "%", 2),
    Column("transformers_step_ms", "ms"),
    Column("over_transformers", "x"),
    Column("summary_share", "% of K/V bytes", 2),
)


@dataclass
class Split:
    """Seconds per decode step; the parts are medians over the steps."""

    steps: Timing
    model: float
    scan: float
    attention: float
    rest: float


@dataclass
class DecoderClock:
    """Seconds inside the model's decoder, attention included."""

    seconds: float = 0.0
    started: list[float] = field(default_factory=list)

    @contextmanager
    def running(self, decoder: torch.nn.Module) -> Iterator[None]:
        handles = [
            decoder.register_forward_pre_hook(lambda *_: self.started.append(time.perf_counter())),
            decoder.register_forward_hook(lambda *_: self._stop()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _stop(self) -> None:
        self.seconds += time.perf_counter() - self.started.pop()


def decode_split(session: Session, steps: int) -> Split:
    """Decodes in a fork and splits the time of its steps."""
    engine = session.engine
    decoder = engine.model.get_decoder()  # type: ignore[no-untyped-call]
    clock = DecoderClock()
    seconds: list[float] = []
    parts: list[tuple[float, float, float, float]] = []
    with session.fork() as fork, clock.running(decoder):
        stream = fork.generate(WARM_UP_STEPS + steps + 1, eos=None)
        for _ in range(WARM_UP_STEPS):
            next(stream)
        for _ in range(steps):
            clock.seconds = 0.0
            before = engine.stats()
            start = time.perf_counter()
            next(stream)
            seconds.append(time.perf_counter() - start)
            after = engine.stats()
            if after["forwards"] != before["forwards"] + 1:
                raise harness.MissingNumberError("a decode step was not one forward")
            spent = {name: after[name] - before[name] for name in after if "seconds_" in name}
            model = clock.seconds - spent["seconds_attention"] + spent["seconds_head"]
            scan, attention = spent["seconds_scan"], spent["seconds_attend"]
            parts.append((model, scan, attention, seconds[-1] - model - scan - attention))
    return Split(Timing(tuple(seconds)), *(statistics.median(part) for part in zip(*parts)))


def next_logits(session: Session) -> str:
    with session.fork() as fork:
        fork.append([9])
        return harness.digest(fork.logits)


def measure_ours(
    model: Any, tokens: int, steps: int, selection: Dense | TopK
) -> tuple[Split, dict[str, Any]]:
    with Engine(model, PagerConfig(pool_tokens=POOL_TOKENS, selection=selection)) as engine:
        session = engine.session()
        subjects.inject(session.sequence, engine.layout, tokens, vocab=engine.vocab_size)
        harness.require_deterministic(lambda: next_logits(session), f"{selection}, {tokens} tokens")
        split = decode_split(session, steps)
        return split, engine.stats()


@torch.inference_mode()
def measure_stock(model: Any, tokens: int, steps: int, layout: Any) -> Timing:
    """One-token steps over a full cache of random K/V."""
    cache = DynamicCache(config=model.config)
    one_layer = replace(layout, layers=1)
    for layer in range(layout.layers):
        k, v = subjects.random_kv(one_layer, tokens, seed=layer)
        cache.update(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), layer)
    return harness.measure(
        lambda: subjects.stock_step(model, cache, [9]), runs=steps, warm_up=WARM_UP_STEPS
    )


def measure_shape(shape: str, arguments: argparse.Namespace, report: Report) -> None:
    model = subjects.load_model(shape)
    for tokens in arguments.contexts:
        topk, stats = measure_ours(model, tokens, arguments.steps, TopK(chunks=CHUNKS))
        dense, _ = measure_ours(model, tokens, arguments.steps, Dense())
        with Engine(model, PagerConfig(pool_tokens=POOL_TOKENS)) as engine:
            layout = engine.layout
        stock = measure_stock(model, tokens, arguments.steps, layout)
        step = topk.steps.median
        report.add(
            shape=shape,
            context=tokens,
            step_ms=step * 1e3,
            model_ms=topk.model * 1e3,
            scan_ms=topk.scan * 1e3,
            attention_ms=topk.attention * 1e3,
            rest_ms=topk.rest * 1e3,
            spread=topk.steps.spread,
            dense_step_ms=dense.steps.median * 1e3,
            dense_attention_ms=dense.attention * 1e3,
            scan_of_dense_attention=100 * topk.scan / dense.attention,
            transformers_step_ms=stock.median * 1e3,
            over_transformers=stock.median / step,
            summary_share=100 * stats["summary_bytes_per_chunk"] / stats["chunk_bytes"],
        )
        print(
            f"{shape} {tokens}: {step * 1e3:.2f} ms, stock {stock.median * 1e3:.2f} ms", flush=True
        )


def judge(report: Report, shape: str) -> None:
    rows = [row for row in report.rows if row["shape"] == shape]
    attention = [report.number(row, "attention_ms") for row in rows]
    report.judge(
        f"{shape}: the attention part is flat from the shortest to the longest context",
        max(attention) <= 1.3 * min(attention),
        ", ".join(f"{part:.3g} ms" for part in attention),
    )
    shares = {
        int(report.number(row, "context")): report.number(row, "scan_of_dense_attention")
        for row in rows
        if report.number(row, "context") >= JUDGED_FROM
    }
    if shares:
        report.judge(
            f"{shape}: from {harness.tokens_name(JUDGED_FROM)} on the scan takes at most 8% of "
            "full attention's time at the same length",
            max(shares.values()) <= 8,
            ", ".join(f"{harness.tokens_name(at)} {share:.1f}%" for at, share in shares.items()),
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--shapes", type=harness.parse_list, default=list(subjects.SHAPES))
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 6
    arguments.contexts = arguments.contexts or (
        [2048, 4096] if arguments.quick else [4096, 8192, 16384, 32768, 65536]
    )
    record = harness.start(arguments)
    report = Report(
        harness.report_name("decode", arguments),
        f"Decode with {CHUNKS} selected chunks, split into its parts",
        COLUMNS,
        {
            "shapes": arguments.shapes,
            "chunks": CHUNKS,
            "pool_tokens": POOL_TOKENS,
            "scorer": DEFAULT_SCORER,
            "steps": arguments.steps,
            "rows": PagerConfig(pool_tokens=POOL_TOKENS).resolve_rows(),
        },
        record,
    )
    for shape in arguments.shapes:
        measure_shape(shape, arguments, report)
        judge(report, shape)
    report.finish()


if __name__ == "__main__":
    main()
