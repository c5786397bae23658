"""How fast chunks move between pool, host arena and disk, beside copying the same bytes.

    kvpager bench paging --
    kvpager bench paging -- --layouts gqa4-bf16

K/V are random and injected. Every sealed chunk has a home below the pool, written once when it was
sealed: bringing a chunk back is one copy, and letting it go is none. A run brings chunks back that
have not been touched for longer than any cache remembers, one at a time or 32 in one call, and lets
them go again; the peer copies as many bytes between memory of the same size, in the same order, in
pieces of the same size. From disk (a spill file in the page cache) the peer reads them with pread;
ours compares checksums too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvpager import Layout, Pager, PagerConfig, TopK
from kvpager.pager import Sequence
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Subject
from kvpager_bench.places import scratch_folder

POOL_CHUNKS = 64
GROUP = 32  # chunks brought back in one call
RUN_BYTES = 64 << 20  # brought back in a run
ARENA_BYTES = 256 << 20  # many times any cache
MORE_BYTES = 16 << 20  # of a budget, for what is not a sealed chunk
AIMS = {1: 0.75, GROUP: 0.9}
TIERS = ("host", "disk")

COLUMNS = (
    Column("layout", text=True),
    Column("tier", text=True),
    Column("chunk_kib", "KiB"),
    Column("chunks", "per call"),
    Column("promote_us", "us per chunk"),
    Column("copy_us", "us per chunk"),
    Column("promote_gbs", "GB/s"),
    Column("copy_gbs", "GB/s"),
    Column("share", "of copy", 2),
    Column("evict_us", "us per chunk"),
    Column("spread", "(max-min)/median", 2),
)
SEAL_COLUMNS = (
    Column("layout", text=True),
    Column("tier", text=True),
    Column("chunk_kib", "KiB"),
    Column("seal_us", "us per chunk"),
    Column("copy_us", "us per chunk"),
)


@dataclass
class Turns:
    """Takes chunks of an arena in turn, so that none comes again before all others have."""

    chunks: int
    next: int = 0

    def take(self, count: int) -> int:
        if self.next + count > self.chunks:
            self.next = 0
        first, self.next = self.next, self.next + count
        return first


@dataclass
class Paged:
    """A sequence whose chunks are all below the pool."""

    pager: Pager
    sequence: Sequence
    chunks: int
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.chunks)
        self.pager.evict_all()

    def promote(self, count: int, calls: int) -> None:
        """Brings `count` chunks back at a time; those of earlier calls have to give way."""
        size = self.pager.layout.chunk_tokens
        for _ in range(calls):
            first = self.turns.take(count)
            self.sequence.pin(first * size, (first + count) * size).release()

    def let_go(self) -> None:
        self.pager.evict_all()


class Copies:
    """The same bytes between memory of the same size, in the same order."""

    def __init__(self, layout: Layout, chunks: int) -> None:
        self.arena = np.ones((chunks, layout.chunk_bytes), dtype=np.uint8)
        self.pool = np.ones((POOL_CHUNKS, layout.chunk_bytes), dtype=np.uint8)
        self.turns, self.blocks = Turns(chunks), Turns(POOL_CHUNKS)

    def __call__(self, count: int, calls: int) -> None:
        for _ in range(calls):
            first, block = self.turns.take(count), self.blocks.take(count)
            np.copyto(self.pool[block : block + count], self.arena[first : first + count])


class Reads:
    """The same bytes out of a file in the page cache."""

    def __init__(self, layout: Layout, chunks: int, folder: Path) -> None:
        self.bytes = layout.chunk_bytes
        self.pool = np.ones((POOL_CHUNKS, layout.chunk_bytes), dtype=np.uint8)
        self.turns, self.blocks = Turns(chunks), Turns(POOL_CHUNKS)
        self.path = folder / "plain"
        np.ones((chunks, layout.chunk_bytes), dtype=np.uint8).tofile(self.path)
        self.file = os.open(self.path, os.O_RDONLY)

    def __call__(self, count: int, calls: int) -> None:
        for _ in range(calls):
            first, block = self.turns.take(count), self.blocks.take(count)
            os.preadv(self.file, [self.pool[block : block + count].data], first * self.bytes)

    def close(self) -> None:
        os.close(self.file)
        self.path.unlink()


def open_pager(layout: Layout, chunks: int, tier: str, folder: Path, threads: int) -> Pager:
    size = (chunks + 1) * layout.chunk_bytes + MORE_BYTES
    config = PagerConfig(
        pool_tokens=POOL_CHUNKS * layout.chunk_tokens,
        selection=TopK(chunks=8, sinks=layout.chunk_tokens, recent=layout.chunk_tokens),
        host_bytes=size if tier == "host" else 0,
        disk_bytes=size if tier == "disk" else 0,
        disk_path=str(folder) if tier == "disk" else None,
    )
    return Pager(layout, config, rows=64, fingerprint={"subject": "bench"}, threads=threads)


def measure_tier(
    report: Report, seals: Report, name: str, tier: str, folder: Path, runs: int, threads: int
) -> None:
    layout = subjects.LAYOUTS[name]
    chunks = ARENA_BYTES // layout.chunk_bytes
    peer: Copies | Reads = (
        Copies(layout, chunks) if tier == "host" else Reads(layout, chunks, folder)
    )
    with closing(open_pager(layout, chunks, tier, folder, threads)) as pager:
        # Once to touch fresh memory; the measured run follows.
        warm_up = pager.sequence()
        subjects.inject(warm_up, layout, chunks * layout.chunk_tokens)
        warm_up.close()
        untouched = pager.stats()
        sequence = pager.sequence()
        subjects.inject(sequence, layout, chunks * layout.chunk_tokens, provenance="exact")
        touched = pager.stats()
        paged = Paged(pager, sequence, chunks)
        paged.promote(GROUP, chunks // GROUP)  # every block and every page is touched
        shares = {}
        for count in AIMS:
            calls = max(1, RUN_BYTES // (count * layout.chunk_bytes))
            shares[count] = measure_count(report, name, tier, paged, peer, count, calls, runs)
        seals.add(
            layout=name,
            tier=tier,
            chunk_kib=layout.chunk_bytes / 1024,
            seal_us=1e6 * (touched["seconds_seal"] - untouched["seconds_seal"]) / chunks,
            copy_us=shares[1],
        )
    if isinstance(peer, Reads):
        peer.close()


def measure_count(
    report: Report,
    name: str,
    tier: str,
    paged: Paged,
    peer: Callable[[int, int], None],
    count: int,
    calls: int,
    runs: int,
) -> float:
    """Adds a row; returns the peer's microseconds per chunk."""
    layout = paged.pager.layout
    timings = harness.interleave(
        {
            "promote": Subject(partial(paged.promote, count, calls), paged.let_go),
            "copy": Subject(partial(peer, count, calls)),
            "evict": Subject(paged.let_go, partial(paged.promote, GROUP, 1)),
        },
        runs=runs,
    )
    moved = count * calls
    each = {what: 1e6 * timings[what].median / moved for what in ("promote", "copy")}
    rate = {what: layout.chunk_bytes / us / 1e3 for what, us in each.items()}
    report.add(
        layout=name,
        tier=tier,
        chunk_kib=layout.chunk_bytes / 1024,
        chunks=count,
        promote_us=each["promote"],
        copy_us=each["copy"],
        promote_gbs=rate["promote"],
        copy_gbs=rate["copy"],
        share=rate["promote"] / rate["copy"],
        evict_us=1e6 * timings["evict"].median / GROUP,
        spread=timings["promote"].spread,
    )
    words = "one chunk" if count == 1 else f"{count} chunks"
    report.compare(
        f"bringing {words} of {layout.chunk_bytes >> 10} KiB back from {tier}",
        ours=rate["promote"],
        theirs=rate["copy"],
        peer="memcpy" if tier == "host" else "pread (page cache)",
        unit="GB/s",
        aim=AIMS[count] if tier == "host" else 0.75,
    )
    return each["copy"]


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--layouts", type=harness.parse_list, default=list(subjects.LAYOUTS))
    parser.add_argument("--runs", type=int)
    parser.add_argument("--folder", type=Path, help="where the spill file goes; a temporary folder")
    arguments = parser.parse_args()
    runs = arguments.runs or (2 if arguments.quick else 15 if arguments.full else 7)
    record = harness.start(arguments)
    settings = {
        "pool_chunks": POOL_CHUNKS,
        "group": GROUP,
        "arena_bytes": ARENA_BYTES,
        "run_bytes": RUN_BYTES,
        "runs": runs,
    }
    report = Report(
        harness.report_name("paging", arguments),
        "Bringing chunks back into the pool, beside copying the same bytes",
        COLUMNS,
        settings,
        record,
    )
    seals = Report(
        harness.report_name("paging_seal", arguments),
        "Sealing a chunk: checksums, summary and the copy in its home",
        SEAL_COLUMNS,
        settings,
        record,
    )
    with scratch_folder(arguments.folder) as folder:
        for name in arguments.layouts:
            for tier in TIERS:
                measure_tier(report, seals, name, tier, folder, runs, arguments.threads)
    report.judge(
        "letting a chunk go copies nothing",
        all(
            report.number(row, "evict_us") < report.number(row, "copy_us") / 2
            for row in report.rows
        ),
        ", ".join(
            f"{row['layout']} {report.number(row, 'evict_us'):.2f} us" for row in report.rows
        ),
    )
    report.finish()
    seals.finish()


if __name__ == "__main__":
    main()
