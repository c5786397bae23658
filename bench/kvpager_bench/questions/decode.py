"""Decode time per token as the context grows, and where it goes.

    kvpager bench decode
    kvpager bench decode -- --shapes shipped --contexts 8192,32768

A pool of 4K tokens, and at most 4K tokens attended to: sinks, recent window and selected chunks
together. K/V of the context are random and injected: only time is measured. Each step is a forward
of which one row decodes. "model" is the transformers model with its attention taken out, "scan"
scores summaries and selects, "attention" walks the chosen chunks, "rest" is everything else (begin,
commit, writing, paging, sampling). Beside them: dense attention by the same kernels at the same
length, stock transformers with a full DynamicCache, and llama.cpp with its own full cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvpager import Dense, Engine, PagerConfig, Session, TopK
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Timing
from kvpager_bench.module_clock import clocked
from kvpager_bench.peers import llama
from kvpager_bench.study import Asked, Option, Study, Table

POOL_TOKENS = 4096
CHUNKS = (
    POOL_TOKENS - subjects.SINKS - subjects.RECENT
) // 64 - 1  # the row's own chunk is one more
LAYERS = 4  # of gqa8: K/V of 128K in float32 take 4 GiB, and a copy of them the stock cache
WARM_UP_STEPS = 3
FLAT = 0.9
SCAN_AIM = 12.5  # at most 8% of full attention
AHEAD_FROM = {"gqa8-bf16": 16384, "gqa8-fp32": 32768}  # of transformers' full attention
FAR = 131072
FAR_AIM = 5.0
KV_TOKENS = 4096  # random K/V that are repeated

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
    Column("tokens_per_s", "1/s"),
    Column("dense_tokens_per_s", "1/s"),
    Column("transformers_tokens_per_s", "1/s"),
    Column("llama_tokens_per_s", "1/s", optional=True),
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


def decode_split(engine: Engine, session: Session, steps: int) -> Split:
    """Decodes in a fork and splits the time of its steps."""
    seconds: list[float] = []
    parts: list[tuple[float, float, float, float]] = []
    with session.fork() as fork, clocked([session.core.model.get_decoder()]) as clock:
        stream = fork.generate(WARM_UP_STEPS + steps + 1, eos=None, stream="tokens")
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


def grow(session: Session, kv: KV, tokens: int, vocab: int) -> None:
    """Injects random ids and repeated random K/V until the session has `tokens`."""
    generator = np.random.default_rng(session.length)
    while session.length < tokens:
        count = min(kv.k.shape[1], tokens - session.length)
        ids = generator.integers(8, vocab, count, dtype=np.int32)
        session.sequence.append(ids, kv.k[:, :count], kv.v[:, :count])


@dataclass
class KV:
    """K and V [layers, KV_TOKENS, kv_heads, dim]."""

    k: torch.Tensor
    v: torch.Tensor


def measure_ours(
    model: Any, contexts: list[int], steps: int, selection: Dense | TopK
) -> tuple[dict[int, Split], dict[str, Any], Any]:
    """The split at every context; one session grows through them."""
    config = PagerConfig(pool_tokens=POOL_TOKENS, selection=selection, beyond_max_positions=True)
    with Engine(model, config) as engine:
        kv = KV(*subjects.random_kv(engine.layout, KV_TOKENS, seed=0))
        session = engine.session()
        splits = {}
        for tokens in contexts:
            grow(session, kv, tokens, engine.vocab_size)
            harness.require_deterministic(
                lambda: next_logits(session), f"{selection}, {tokens} tokens"
            )
            splits[tokens] = decode_split(engine, session, steps)
        return splits, engine.stats(), engine.layout


@torch.inference_mode()
def measure_stock(model: Any, contexts: list[int], steps: int, layout: Any) -> dict[int, Timing]:
    """One-token steps over a full cache of random K/V."""
    timings = {}
    for tokens in contexts:
        cache = DynamicCache(config=model.config)
        for layer in range(layout.layers):
            k, v = subjects.random_kv(replace(layout, layers=1), KV_TOKENS, seed=layer)
            repeats = (1, -(-tokens // KV_TOKENS), 1, 1)
            k = k.repeat(repeats)[:, :tokens].transpose(1, 2).contiguous()
            v = v.repeat(repeats)[:, :tokens].transpose(1, 2).contiguous()
            cache.update(k, v, layer)
        step = partial(subjects.stock_step, model, cache, [9])
        timings[tokens] = harness.measure(step, runs=steps, warm_up=WARM_UP_STEPS)
    return timings


def measure_shape(asked: Asked, shape: str) -> None:
    """Selected, dense, transformers and llama.cpp, one after the other."""
    model = subjects.load_model(shape, layers=LAYERS)
    contexts, steps = asked.options.contexts, asked.options.steps
    few, report = max(4, steps // 3), asked.report()
    topk, stats, layout = measure_ours(model, contexts, steps, TopK(chunks=CHUNKS))
    dense, _, _ = measure_ours(model, contexts, few, Dense())
    stock = measure_stock(model, contexts, few, layout)
    peer: dict[int, Timing] = {}
    if not llama.missing() and not asked.quick:
        peer = llama.decode(
            llama.shape_of(model), contexts, threads=asked.threads, tokens=16, runs=3
        )
    for tokens in contexts:
        ours, full, step = topk[tokens], dense[tokens], topk[tokens].steps.median
        report.add(
            shape=shape,
            context=tokens,
            step_ms=step * 1e3,
            model_ms=ours.model * 1e3,
            scan_ms=ours.scan * 1e3,
            attention_ms=ours.attention * 1e3,
            rest_ms=ours.rest * 1e3,
            spread=ours.steps.spread,
            dense_step_ms=full.steps.median * 1e3,
            dense_attention_ms=full.attention * 1e3,
            scan_of_dense_attention=100 * ours.scan / full.attention,
            transformers_step_ms=stock[tokens].median * 1e3,
            over_transformers=stock[tokens].median / step,
            tokens_per_s=1 / step,
            dense_tokens_per_s=1 / full.steps.median,
            transformers_tokens_per_s=1 / stock[tokens].median,
            llama_tokens_per_s=1 / peer[tokens].median if peer else harness.NOT_APPLICABLE,
            summary_share=100 * stats["summary_bytes_per_chunk"] / stats["chunk_bytes"],
        )


def judge(report: Report, shape: str) -> None:
    """Puts each promise beside its peer."""
    rows = [row for row in report.rows if row["shape"] == shape]
    first, last = rows[0], rows[-1]
    far, near = (harness.tokens_name(int(report.number(row, "context"))) for row in (last, first))
    report.compare(
        f"decode attention at {far} over that at {near}, 4K selected, {shape}",
        report.number(last, "attention_ms"),
        report.number(first, "attention_ms"),
        "kvpager, short context",
        "ms",
        FLAT,
        lower_is_better=True,
    )
    report.compare(
        f"scan beside full attention at {far}, {shape}",
        report.number(last, "scan_ms"),
        report.number(last, "dense_attention_ms"),
        "kvpager, dense",
        "ms",
        SCAN_AIM,
        lower_is_better=True,
    )
    for row in rows:
        context, ours = int(report.number(row, "context")), report.number(row, "tokens_per_s")
        figure = f"decode at {harness.tokens_name(context)}, 4K selected, {shape}"
        aim = 1.0 if context >= AHEAD_FROM.get(shape, FAR) else None
        if context >= FAR and shape != subjects.SHIPPED:
            aim = FAR_AIM
        theirs = report.number(row, "transformers_tokens_per_s")
        report.compare(figure, ours, theirs, "transformers", "tokens/s", aim)
        if row["llama_tokens_per_s"] != harness.NOT_APPLICABLE:
            theirs = report.number(row, "llama_tokens_per_s")
            report.compare(figure, ours, theirs, llama.title(), "tokens/s")


def measure(asked: Asked) -> None:
    if reason := llama.missing():
        asked.report().skip(llama.title(), reason)
    for shape in asked.options.shapes:
        measure_shape(asked, shape)
        judge(asked.report(), shape)


STUDY = Study(
    measure,
    (
        Table(
            "decode", f"Decode with {POOL_TOKENS} tokens attended to, split into its parts", COLUMNS
        ),
    ),
    (
        Option("shapes", subjects.SHAPES),
        Option("contexts", [8192, 32768, FAR], [2048, 4096], [8192, 16384, 32768, 65536, FAR]),
        Option("steps", 24, quick=6),
    ),
    {
        "layers": LAYERS,  # of gqa8
        "chunks": CHUNKS,
        "pool_tokens": POOL_TOKENS,
    },
)

if __name__ == "__main__":
    STUDY.main()
