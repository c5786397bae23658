"""What a turn costs as its text grows to a million tokens and more.

    kvpager bench long_texts --
    kvpager bench long_texts -- --contexts 4096,32768,1048576

Pager and store alone, without a model: K/V of four layers and two heads are random, and so are
queries, which select 4K tokens. A turn decodes a token, prefills 32 in one forward, adds 64, finds
its beginning in a store, is forked, saved over the snapshot before it, restored, and decodes once
more with the restored chunks in the page cache. What grows with the whole text is a scan, a table
or a copy of it; all else follows the turn. Memory: what the process holds beside pool, host memory
and summaries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvpager import Layout, PagerConfig, TopK
from kvpager.pager import ROW_COMMIT, Pager, Sequence
from kvpager.pager.snapshot import SnapshotInfo
from kvpager.stores import DirectoryStore
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column
from kvpager_bench.places import scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

LAYOUT = Layout(layers=4, kv_heads=2, k_dim=64, v_dim=64, k_dtype="bfloat16", v_dtype="bfloat16")
Q_HEADS, ROWS, POOL, TURN = 8, 32, 8192, 64
SELECTION = TopK(chunks=64)
BASE = 32768  # that others are compared with
NEAR = 2.0  # times its cost
PREFILL_NEAR = 1 / 0.3
MOST_MEMORY = 64  # bytes per token

BUDGETED = ("resident_bytes", "host_bytes_used", "summary_bytes_used")
PARTS = ("decode", "prefill", "append", "find", "fork", "save", "restore", "first")
TURNS = (
    Column("context", "tokens"),
    *(Column(f"{part}_ms", "ms") for part in PARTS),
    Column("memory", "bytes per token"),
)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def advance(pager: Pager, sequence: Sequence, rows: int = 1) -> None:
    """Runs a forward of so many rows at the end of the text."""
    spans = [(sequence, sequence.length, rows, ROW_COMMIT)]
    q = torch.randn(rows, Q_HEADS, LAYOUT.k_dim, dtype=torch.bfloat16)
    k = torch.randn(rows, LAYOUT.kv_heads, LAYOUT.k_dim, dtype=torch.bfloat16)
    with pager.begin_spans(spans, [1] * rows) as forward:
        for layer in range(LAYOUT.layers):
            forward.attend(layer, q, k, k, scaling=LAYOUT.k_dim**-0.5)
        forward.commit()


def new_pager(tokens: int, threads: int) -> Pager:
    chunks = tokens // LAYOUT.chunk_tokens + 64
    host = chunks * LAYOUT.chunk_bytes
    config = PagerConfig(pool_tokens=POOL, host_bytes=host, selection=SELECTION)
    return Pager(LAYOUT, config, rows=ROWS, fingerprint={"bench": 1}, threads=threads)


def turn(task: dict[str, Any]) -> dict[str, float]:
    """All figures of one context."""
    tokens, repeats, threads = task["context"], task["repeats"], task["threads"]
    with scratch_folder() as folder:
        pager = new_pager(tokens + 1024, threads)
        sequence = pager.sequence()
        memory = harness.held_growth(
            lambda: subjects.inject(sequence, LAYOUT, tokens, provenance="exact")
        )
        stats = pager.stats()
        memory -= sum(int(stats[name]) for name in BUDGETED)
        store = DirectoryStore(folder / "store")

        def add() -> None:
            subjects.inject(sequence, LAYOUT, TURN, provenance="exact", seed=time.time_ns())

        def save() -> None:
            content = sequence.freeze()
            store.save("turn", content, fingerprint=pager.fingerprint_json, session="{}")

        def find() -> None:
            assert store.find_prefix(pager.chain_hashes(sequence.tokens)) is not None

        save()
        found = {"append_ms": milliseconds(add, repeats)}
        saves = []
        for _ in range(repeats):
            add()
            saves.append(milliseconds(save, 1))
        found["save_ms"] = statistics.median(saves)
        found["find_ms"] = milliseconds(find, repeats)
        found["fork_ms"] = milliseconds(lambda: sequence.fork().close(), repeats)
        found["decode_ms"] = milliseconds(lambda: advance(pager, sequence), 4 * repeats)
        found["prefill_ms"] = milliseconds(lambda: advance(pager, sequence, ROWS), repeats)
        sequence.close()
        restored, first = [], []
        for _ in range(repeats):
            other = new_pager(tokens + 1024, threads)
            start = time.perf_counter()
            again = other.restore(SnapshotInfo.of(store.open("turn")))
            restored.append(time.perf_counter() - start)
            advance(other, again)
            first.append(time.perf_counter() - start)
            other.close()
        found["restore_ms"] = 1e3 * statistics.median(restored)
        found["first_ms"] = 1e3 * statistics.median(first)
        return {**found, "memory": memory / tokens}


def measure(asked: Asked) -> None:
    report = asked.report()
    for context in asked.options.contexts:
        found = asked.work("turn", context=context, repeats=asked.options.repeats)
        report.add(context=context, **found)
    base = next((row for row in report.rows if row["context"] == BASE), None)
    last = report.rows[-1]
    if base is None or last is base:
        return
    memory = report.number(last, "memory")
    report.judge(
        f"{last['context']:,} tokens hold at most {MOST_MEMORY} bytes each beside the budgets",
        memory <= MOST_MEMORY,
        f"{memory:.0f}",
    )
    for part in PARTS:
        name = f"{part}_ms"
        ratio = report.number(last, name) / report.number(base, name)
        near = PREFILL_NEAR if part == "prefill" else NEAR
        report.judge(
            f"{part}: at {last['context']:,} tokens at most {near:.3g} times as long as at "
            f"{BASE:,}",
            ratio <= near,
            f"{ratio:.1f} times",
        )


STUDY = Study(
    measure,
    (Table("long_texts", "A turn of pager and store by the length of its text", TURNS),),
    (
        Option(
            "contexts",
            [4096, BASE, 131072, 524288, 1048576],
            quick=[4096, BASE],
            full=[4096, BASE, 131072, 524288, 1048576, 2097152],
        ),
        Option("repeats", 5, quick=2),
    ),
    {"selected_tokens": 4096, "turn_tokens": TURN, "prefill_rows": ROWS},
    {"turn": turn},
)

if __name__ == "__main__":
    STUDY.main()
