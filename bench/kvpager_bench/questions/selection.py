"""How fast chunks are scored and picked, beside reading their summaries at memory bandwidth.

    kvpager bench selection

K/V are random and injected. What is timed is selection as a forward's layers call it, by the
pager's own clock (`seconds_scan`): queries prepared, every summary scored, the best ones picked,
the ledger told. Layers take turns, so that a layer's summaries are not in a cache when they are
read again. Many rows share one reading of the summaries: beside them stands what as many lone rows
would take.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch

from kvpager import Layout, Pager, PagerConfig, TopK
from kvpager.pager import ROW_COMMIT, Sequence
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Timing

SCORERS = ("bits2", "mean")
GROUPS = (1, 4, 8)
ROWS = (1, 64)
HEADS, DIM, TOKENS = 4, 128, 64
LAYER_CHUNKS = 8192  # of all layers together, at least: of bits2 they are 78 MiB
BLOCK = 4096  # tokens of random K/V that are repeated

COLUMNS = (
    Column("scorer", text=True),
    Column("chunks"),
    Column("group"),
    Column("rows"),
    Column("summary_mib", "MiB"),
    Column("select_us", "us"),
    Column("spread", "(max-min)/median", 2),
    Column("rate", "GB/s"),
    Column("of_bandwidth", digits=2),
    Column("dot_ns", "ns per summary, query head and row", 2),
    Column("over_lone_rows", "x", optional=True),
)


class Subject:
    """A pager with `chunks` sealed chunks of one sequence at each of a few layers."""

    def __init__(self, scorer: str, chunks: int) -> None:
        self.layout = Layout(
            layers=max(1, LAYER_CHUNKS // chunks),
            kv_heads=HEADS,
            k_dim=DIM,
            v_dim=16,
            k_dtype="bfloat16",
            v_dtype="bfloat16",
        )
        config = PagerConfig(pool_tokens=4096, selection=TopK(chunks=32, scorer=scorer))
        self.pager = Pager(
            self.layout,
            config,
            rows=max(ROWS),
            smaller_rows=(1,),
            threads=torch.get_num_threads(),
        )
        self.sequence: Sequence = self.pager.sequence()
        k, v = subjects.random_kv(self.layout, BLOCK, seed=0)
        generator = np.random.default_rng(0)
        for _ in range(chunks * TOKENS // BLOCK):
            self.sequence.append(generator.integers(8, 1024, BLOCK, dtype=np.int32), k, v)
        summary = self.pager.stats()["summary_bytes_per_chunk"]
        self.layer_bytes = summary // self.layout.layers * chunks

    def select_seconds(self, rows: int, group: int, runs: int) -> Timing:
        """Of selection at one layer of a forward of `rows` rows, which is not committed."""
        generator = torch.Generator().manual_seed(group)
        q = torch.randn(rows, HEADS * group, DIM, generator=generator)
        k = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
        v = torch.randn(rows, HEADS, 16, generator=generator).bfloat16()
        start = self.sequence.length
        seconds = []
        with self.pager.begin(
            [self.sequence] * rows,
            np.arange(start, start + rows),
            np.full(rows, 9, dtype=np.int32),
            np.full(rows, ROW_COMMIT, dtype=np.uint8),
        ) as forward:
            layers = itertools.cycle(range(self.layout.layers))
            forward.attend(next(layers), q, k, v, scaling=DIM**-0.5)  # finds the summaries
            for layer in itertools.islice(layers, runs):
                before = self.pager.stats()["seconds_scan"]
                forward.attend(layer, q, k, v, scaling=DIM**-0.5)
                seconds.append(self.pager.stats()["seconds_scan"] - before)
        return Timing(tuple(seconds))

    def close(self) -> None:
        self.sequence.close()
        self.pager.close()


def measure(scorer: str, chunks: int, report: Report, read: float, runs: int) -> None:
    """Every group, for a lone row and for many."""
    subject = Subject(scorer, chunks)
    for group in GROUPS:
        q = torch.randn(HEADS * group, DIM, generator=torch.Generator().manual_seed(group))
        select = partial(subject.sequence.select, 0, q)
        harness.require_deterministic(select, f"{scorer}, {chunks} chunks")
        lone = 0.0
        for rows in ROWS:
            timing = subject.select_seconds(rows, group, runs)
            rate = subject.layer_bytes / timing.median
            if rows == 1:
                lone = timing.median
            report.add(
                scorer=scorer,
                chunks=chunks,
                group=group,
                rows=rows,
                summary_mib=subject.layer_bytes / 2**20,
                select_us=timing.median * 1e6,
                spread=timing.spread,
                rate=rate / 1e9,
                of_bandwidth=rate / read,
                dot_ns=timing.median * 1e9 / (chunks * HEADS * group * rows),
                over_lone_rows=rows * lone / timing.median if rows > 1 else NOT_APPLICABLE,
            )
            name = f"selection of 32 of {chunks} chunks, {scorer}, {group} query heads to a kv head"
            if rows == 1:
                report.compare(
                    name,
                    ours=rate / 1e9,
                    theirs=read / 1e9,
                    peer="memory bandwidth",
                    unit="GB/s",
                    aim=0.5 if scorer == "bits2" and group <= 4 else None,
                )
            else:
                report.compare(
                    f"{name}, {rows} rows",
                    ours=timing.median * 1e3,
                    theirs=rows * lone * 1e3,
                    peer=f"{rows} lone rows",
                    unit="ms",
                    aim=None,
                    lower_is_better=True,
                )
            print(f"{scorer} {chunks} {group} {rows}: {rate / 1e9:.1f} GB/s", flush=True)
    subject.close()


def main() -> None:
    arguments = harness.cli(__doc__).parse_args()
    record = harness.start(arguments)
    sizes = [256] if arguments.quick else [2048, 16384]
    report = Report(
        harness.report_name("selection", arguments),
        "Scoring summaries and picking chunks at one layer",
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
