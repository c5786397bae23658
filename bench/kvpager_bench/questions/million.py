"""Whether a model goes on with a text of a million tokens that memory can't hold.

    kvpager bench million
    kvpager bench million -- --contexts 32768

A model of the shape of Qwen3-0.6B (random weights, float32) with K/V in 4 bits. Those of the text
are random and injected, since their prefill would take a processor a day. The pool holds 8K tokens,
host memory 4 GiB, the disk what is left; key summaries, by which rows select, stay in memory. A
process saves the text to a folder, saves it again with 64 tokens more, and decodes; a fresh one,
which has no disk to page to, restores it from that folder and decodes the same tokens. The logits
before the first one must have the same bits. K/V of a million tokens take 32 GiB, twice on the disk
while they are paged and saved; their summaries take 9, in memory and in the file.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Engine, Layout, PagerConfig, Session, TopK
from kvpager.stores import DirectoryStore
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column
from kvpager_bench.places import scratch_folder
from kvpager_bench.questions.long_texts import BUDGETED, TURN
from kvpager_bench.study import Asked, Option, Study, Table

SHAPE = "0.6b-fp32"
POOL, HOST, CHUNKS = 8192, 4 << 30, 64
KV, SUMMARY = 32256, 8736  # bytes of a token
BLOCK = 1024  # tokens that are injected at a time
NAME = "text"
MEMORY = 1.3  # of budgets and weights

COLUMNS = (
    Column("context", "tokens"),
    Column("kv_gib", "GiB"),
    Column("disk_gib", "GiB"),
    Column("append_s", "s"),
    Column("decode_ms", "ms"),
    Column("save_s", "s"),
    Column("turn_save_ms", "ms"),
    Column("restore_ms", "ms"),
    Column("first_token_ms", "ms"),
    Column("restored_decode_ms", "ms"),
    Column("memory_gib", "GiB"),
    Column("memory_ratio"),
    Column("same_bits", text=True),
)


def new_engine(context: int, folder: Path | None) -> Engine:
    """An engine that pages to the folder what the pool and host memory do not hold."""
    model = subjects.load_model(SHAPE)
    disk = 0 if folder is None else max(0, KV * (context + 2 * POOL) - HOST)
    config = PagerConfig(
        pool_tokens=POOL,
        selection=TopK(chunks=CHUNKS),
        kv_dtype="q4",
        float_layers=(),
        beyond_max_positions=True,
        host_bytes=HOST,
        summary_bytes=SUMMARY * (context + 2 * POOL),
        disk_path=str(folder) if disk else None,
        disk_bytes=disk,
    )
    return Engine(model, config)


def grow(session: Session, layout: Layout, tokens: int) -> None:
    """Appends random ids and random K/V, whose signs differ from block to block."""
    random = np.random.default_rng(session.length)
    signs = torch.Generator().manual_seed(session.length)
    both = subjects.random_kv(layout, min(BLOCK, tokens), seed=session.length)
    for start in range(0, tokens, BLOCK):
        count = min(BLOCK, tokens - start)
        for kv in both:
            kv *= 2 * torch.randint(2, (layout.layers, 1, *kv.shape[2:]), generator=signs) - 1
        ids = random.integers(8, 1024, count, dtype=np.int32)
        session.sequence.append(ids, *(kv[:, :count] for kv in both))


def decode(session: Session, steps: int) -> dict[str, Any]:
    """The logits behind the text, tokens from there, and what they took."""
    with session.fork() as fork:
        first, _ = harness.timed(lambda: fork.append([9]))
        logits = harness.digest(fork.logits)
        stream = fork.generate(steps + 1, eos=None, stream="tokens")
        next(stream)
        taken = [harness.timed(lambda: next(stream)) for _ in range(steps)]
        assert next(stream, None) is None
    seconds = statistics.median(one for one, _ in taken)
    return {"first": first, "logits": logits, "tokens": [t for _, t in taken], "decode": seconds}


def paged(task: dict[str, Any]) -> dict[str, Any]:
    """The text is made, paged, saved and decoded."""
    folder, context = Path(task["folder"]), task["context"]
    (folder / "paged").mkdir()
    found: dict[str, Any] = {}

    def work(engine: Engine) -> None:
        session = engine.session()
        found["append"], _ = harness.timed(lambda: grow(session, engine.layout, context - TURN))
        store = DirectoryStore(folder / "store")
        found["save"], _ = harness.timed(lambda: session.save(NAME, store=store))
        grow(session, engine.layout, TURN)
        found["turn_save"], _ = harness.timed(lambda: session.save(NAME, store=store))
        found.update(decode(session, task["steps"]))
        found["stats"] = {name: engine.stats()[name] for name in (*BUDGETED, "disk_bytes_used")}

    with new_engine(context, folder / "paged") as engine:
        found["grown"] = harness.peak_growth(lambda: work(engine))
        found["weights"] = sum(p.numel() * p.element_size() for p in engine.model.parameters())
        found["kv"] = context // engine.layout.chunk_tokens * engine.layout.chunk_bytes
    return found


def restored(task: dict[str, Any]) -> dict[str, Any]:
    """The text is restored by a process that never had it."""
    with new_engine(task["context"], None) as engine:
        store = DirectoryStore(Path(task["folder"]) / "store")
        seconds, session = harness.timed(lambda: engine.restore(NAME, store=store))
        return {"restore": seconds, **decode(session, task["steps"])}


def measure(asked: Asked) -> None:
    report = asked.report()
    for context in asked.options.contexts:
        with scratch_folder(asked.options.folder or None) as folder:
            task = {"context": context, "folder": str(folder), "steps": asked.options.steps}
            before = asked.work("paged", **task)
            after = asked.work("restored", **task)
        same = all(before[name] == after[name] for name in ("logits", "tokens"))
        stats, weights = before["stats"], before["weights"]
        memory = weights + before["grown"]
        report.add(
            context=context,
            kv_gib=before["kv"] / 2**30,
            disk_gib=stats["disk_bytes_used"] / 2**30,
            append_s=before["append"],
            decode_ms=1e3 * before["decode"],
            save_s=before["save"],
            turn_save_ms=1e3 * before["turn_save"],
            restore_ms=1e3 * after["restore"],
            first_token_ms=1e3 * (after["restore"] + after["first"]),
            restored_decode_ms=1e3 * after["decode"],
            memory_gib=memory / 2**30,
            memory_ratio=memory / (weights + sum(stats[name] for name in BUDGETED)),
            same_bits="yes" if same else "no",
        )
        name = harness.tokens_name(context)
        report.judge(f"{name}: a restored text goes on with the same bits", same, "logits, tokens")
    last = report.rows[-1]
    report.judge(
        f"{name}: memory of the process is at most {MEMORY} of weights and budgets",
        report.number(last, "memory_ratio") <= MEMORY,
        f"{report.number(last, 'memory_ratio'):.2f}",
    )


STUDY = Study(
    measure,
    (Table("million", "A 0.6B model behind a text that is paged to disk, in 4 bits", COLUMNS),),
    (
        Option("contexts", [32768, 1048576], quick=[4096]),
        Option("steps", 16, quick=2),
        Option("folder", "", help="where there is room for K/V twice; by default for temporaries"),
    ),
    {"shape": SHAPE, "pool_tokens": POOL, "host_bytes": HOST, "chunks": CHUNKS, "kv_dtype": "q4"},
    {"paged": paged, "restored": restored},
)

if __name__ == "__main__":
    STUDY.main()
