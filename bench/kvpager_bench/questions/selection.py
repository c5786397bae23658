"""How fast chunks are scored and picked, beside reading their summaries at memory bandwidth.

    kvpager bench selection

K/V are random and injected. Each call asks a pager for the chunks of one row: queries prepared,
every summary scored, the best ones picked.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from kvpager import Layout, Pager, PagerConfig, TopK
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report

SCORERS = ("bits2", "bits1", "minmax", "sub16")
GROUPS = (1, 4, 8)
HEADS, DIM, TOKENS = 4, 128, 64
BLOCK = 4096  # tokens of random K/V that are repeated

COLUMNS = (
    Column("scorer", text=True),
    Column("chunks"),
    Column("group"),
    Column("summary_mib", "MiB"),
    Column("select_us", "us"),
    Column("spread", "(max-min)/median", 2),
    Column("rate", "GB/s"),
    Column("of_bandwidth", digits=2),
)


def measure(scorer: str, chunks: int, report: Report, read: float, runs: int) -> None:
    """One row against `chunks` summaries of each kv head, for every group."""
    layout = Layout(
        layers=1, kv_heads=HEADS, k_dim=DIM, v_dim=16, k_dtype="bfloat16", v_dtype="bfloat16"
    )
    config = PagerConfig(pool_tokens=4096, selection=TopK(chunks=32, scorer=scorer))
    pager = Pager(layout, config, rows=64, threads=torch.get_num_threads())
    sequence = pager.sequence()
    k, v = subjects.random_kv(layout, BLOCK, seed=0)
    generator = np.random.default_rng(0)
    for _ in range(chunks * TOKENS // BLOCK):
        sequence.append(generator.integers(8, 1024, BLOCK, dtype=np.int32), k, v)
    bytes_read = pager.stats()["summary_bytes_per_chunk"] * chunks
    for group in GROUPS:
        q = torch.randn(HEADS * group, DIM, generator=torch.Generator().manual_seed(group))
        select = partial(sequence.select, 0, q)
        harness.require_deterministic(select, f"{scorer}, {chunks} chunks")
        timing = harness.measure(select, runs=runs, warm_up=2)
        rate = bytes_read / timing.fastest
        report.add(
            scorer=scorer,
            chunks=chunks,
            group=group,
            summary_mib=bytes_read / 2**20,
            select_us=timing.median * 1e6,
            spread=timing.spread,
            rate=rate / 1e9,
            of_bandwidth=rate / read,
        )
        report.compare(
            f"selection of 32 of {chunks} chunks, {scorer}, {group} query heads to a kv head",
            ours=rate / 1e9,
            theirs=read / 1e9,
            peer="memory bandwidth",
            unit="GB/s",
            aim=0.5 if scorer == "bits2" and group <= 4 else None,
        )
        print(f"{scorer} {chunks} {group}: {rate / 1e9:.1f} GB/s", flush=True)


def main() -> None:
    arguments = harness.cli(__doc__).parse_args()
    record = harness.start(arguments)
    sizes = [256] if arguments.quick else [2048, 16384]
    report = Report(
        harness.report_name("selection", arguments),
        "Scoring summaries and picking chunks, one row",
        COLUMNS,
        {"kv_heads": HEADS, "head_dim": DIM, "selected": 32, "chunk_tokens": TOKENS},
        record,
    )
    read = machine.memory_bandwidth(arguments.threads).read
    for chunks in sizes:
        for scorer in SCORERS:
            measure(scorer, chunks, report, read, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
