"""What a store of other engines' blocks costs: puts, reads, the check of a block, and its calls.

    kvpager bench chunk_store
    kvpager bench chunk_store -- --mib 1024 --sizes 10,100000

Blocks are put as one pack, beside writing the same bytes into one file with one fsync, and read
into buffers, beside plain pread of the same bytes into the same buffers, from the page cache and
dropped from it. "queue" is the same read as jobs of 16 blocks on two threads. What the check of
blocks costs is processor time of plain reads of blocks that are checked and of some that are not,
in turns; the share is that of the time of the whole read.

Calls are timed as the store fills with small blocks, in processor time, which no other process
changes: a call costs what it uses, not what there is.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvpager import _core
from kvpager.stores import ChunkQueue, ChunkStore, ReadResult
from kvpager_bench.file_peers import FILE_STATES, prepare
from kvpager_bench.harness import Column, Subject, interleave
from kvpager_bench.places import SCRATCH_DIR, scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

IDENTITY = {"model": "bench"}
BLOCKS = (65_536, 1 << 20)
JOB_BLOCKS, QUEUE_THREADS = 16, 2
SMALL, BATCH = 512, 1000  # bytes of a block, and blocks of a put, of the store that fills
AIMS = {"cached": 0.15, "dropped": 0.02}  # of a read's time: the check
WORDS = {"cached": "in the page cache", "dropped": "from disk"}
WITHIN = 0.5  # aim: at any size at most twice the time of the smallest

BLOCK_COLUMNS = (
    Column("block_kib", "KiB"),
    Column("file", text=True),
    Column("read_gbs", "GB/s"),
    Column("pread_gbs", "GB/s"),
    Column("queue_gbs", "GB/s"),
    Column("check_share", "%", 3),
    Column("read_spread", "(max-min)/median", 2),
)
PUT_COLUMNS = (
    Column("block_kib", "KiB"),
    Column("put_gbs", "GB/s"),
    Column("write_fsync_gbs", "GB/s"),
    Column("put_spread", "(max-min)/median", 2),
)
CALL_COLUMNS = (
    Column("call", text=True),
    Column("blocks"),
    Column("processor_ms", "ms"),
    Column("wall_ms", "ms"),
)


class Blocks:
    """Blocks of one size, in a store and in a plain file."""

    def __init__(self, folder: Path, size: int, total: int) -> None:
        self.size, self.count = size, total // size
        self.bytes = size * self.count
        source = np.random.default_rng(size).integers(0, 256, self.bytes, dtype=np.uint8)
        self._source = source.reshape(self.count, size)
        self._into = np.zeros_like(self._source)
        self._folder, self.plain = folder, folder / f"plain-{size}"
        self._file: int | None = None
        self._puts = itertools.count()
        self.keys: list[bytes] = []
        self.store = ChunkStore(folder / f"store-{size}", IDENTITY, byte_budget=3 * self.bytes)

    def put(self) -> None:
        """As one pack; reads are of the last one that was put."""
        number = next(self._puts)
        self.keys = [b"%d-%d" % (number, i) for i in range(self.count)]
        self.store.put([(key, 0, block) for key, block in zip(self.keys, self._source)])

    def write(self) -> None:
        with self.plain.open("wb", buffering=0) as file:
            for block in self._source:
                file.write(block.data)
            os.fsync(file.fileno())

    def read(self) -> None:
        assert set(self.store.read(self.keys, 0, list(self._into))) == {ReadResult.HIT}

    def pread(self) -> None:
        with self.plain.open("rb", buffering=0) as file:
            for number, block in enumerate(self._into):
                os.preadv(file.fileno(), [block.data], number * self.size)

    def read_by_queue(self) -> None:
        with ChunkQueue(self.store, threads=QUEUE_THREADS, depth=self.count) as queue:
            for at in range(0, self.count, JOB_BLOCKS):
                some = slice(at, at + JOB_BLOCKS)
                queue.read(at, self.keys[some], 0, list(self._into[some]))
            queue.drain()
            jobs = queue.finished()
        assert sum(job.bytes for job in jobs) == self.bytes

    def is_whole(self) -> bool:
        self._into[:] = 0
        self.read()
        return np.array_equal(self._into, self._source)

    def prepare(self, state: str) -> None:
        for path in (self.plain, *Path(self.store.path, "packs").iterdir()):
            prepare(path, state)


def check_seconds(blocks: Blocks, runs: int) -> float:
    """Processor time of the checks of one read, each of a block that has just been read."""
    binding, room = bytes(76), memoryview(bytearray(blocks.size))  # as of a key of 32 bytes
    spent: dict[bool, list[float]] = {True: [], False: []}
    with blocks.plain.open("rb", buffering=0) as file:
        for run in range(2 * runs + 2):
            checks = run % 2 == 0
            start = time.thread_time()
            for number in range(blocks.count):
                os.preadv(file.fileno(), [room], number * blocks.size)
                if checks:
                    _core.block_check(binding, room)
            spent[checks].append(time.thread_time() - start)
    return statistics.median(spent[True][1:]) - statistics.median(spent[False][1:])


def measure_blocks(asked: Asked, folder: Path) -> None:
    table, puts, runs = asked.report(), asked.report("chunk_store_puts"), asked.options.runs
    for size in BLOCKS:
        blocks = Blocks(folder, size, asked.options.mib << 20)
        kib = size // 1024
        timed = interleave({"put": Subject(blocks.put), "write": Subject(blocks.write)}, runs=runs)
        rate = {name: blocks.bytes / timing.median / 1e9 for name, timing in timed.items()}
        puts.add(
            block_kib=kib,
            put_gbs=rate["put"],
            write_fsync_gbs=rate["write"],
            put_spread=timed["put"].spread,
        )
        puts.compare(
            f"storing blocks of {kib} KiB", rate["put"], rate["write"], "write and fsync", "GB/s"
        )
        assert blocks.is_whole()
        check = check_seconds(blocks, runs)
        for state in FILE_STATES:
            before = lambda state=state, blocks=blocks: blocks.prepare(state)  # noqa: E731
            timed = interleave(
                {
                    "read": Subject(blocks.read, before),
                    "pread": Subject(blocks.pread, before),
                    "queue": Subject(blocks.read_by_queue, before),
                },
                runs=runs,
            )
            rate = {name: blocks.bytes / timing.median / 1e9 for name, timing in timed.items()}
            share = check / timed["read"].median
            table.add(
                block_kib=kib,
                file=state,
                read_gbs=rate["read"],
                pread_gbs=rate["pread"],
                queue_gbs=rate["queue"],
                check_share=100 * share,
                read_spread=timed["read"].spread,
            )
            figure = f"blocks of {kib} KiB {WORDS[state]}"
            table.compare(f"reading {figure}", rate["read"], rate["pread"], "pread", "GB/s")
            table.judge(
                f"the check of {figure} takes at most {AIMS[state]:.0%} of a read",
                share <= AIMS[state],
                f"{share:.1%}",
            )
        blocks.store.close()


def calls(store: ChunkStore, size: int, fresh: Iterator[int]) -> dict[str, Callable[[], object]]:
    keys = [b"%d" % number for number in range(0, size, max(1, size // 10))][:10]
    into = [bytearray(SMALL) for _ in keys]

    def put() -> None:
        store.put([(b"fresh-%d" % next(fresh), 0, bytes(SMALL)) for _ in range(8)])

    return {
        "has of 10": lambda: store.has(keys),
        "read of 10": lambda: store.read(keys, 0, into),
        "put of 8": put,
        "stats": store.stats,
        "first has of an object": lambda: ChunkStore(store.path, IDENTITY).has(keys),
        "put of 8 that evicts": put,
    }


def measure_calls(asked: Asked, folder: Path) -> None:
    table, fresh = asked.report("chunk_store_calls"), itertools.count()
    smallest: dict[str, float] = {}
    stored = 0
    for size in asked.options.sizes:
        store = ChunkStore(folder / "calls", IDENTITY, byte_budget="unlimited")
        while stored < size:
            numbers = range(stored, min(stored + BATCH, size))
            store.put([(b"%d" % number, 0, bytes(SMALL)) for number in numbers])
            stored = numbers.stop
        for what, call in calls(store, size, fresh).items():
            if what == "put of 8 that evicts":
                ChunkStore(store.path, IDENTITY, byte_budget=store.stats()["bytes"] + 4096)
            times = []
            for run in range(1 + asked.options.call_runs):
                processor, wall = time.process_time(), time.perf_counter()
                call()
                if run:
                    times.append((time.process_time() - processor, time.perf_counter() - wall))
            cpu, wall = (1e3 * statistics.median(kind) for kind in zip(*times))
            table.add(call=what, blocks=size, processor_ms=cpu, wall_ms=wall)
            theirs = smallest.setdefault(what, cpu)
            if size != asked.options.sizes[0]:
                figure, peer = f"{what}, {size:,} blocks stored", "the same with fewer blocks"
                table.compare(figure, cpu, theirs, peer, "ms", WITHIN, lower_is_better=True)
        store.close()


def measure(asked: Asked) -> None:
    SCRATCH_DIR.mkdir(parents=True, exist_ok=True)
    with scratch_folder(SCRATCH_DIR) as folder:  # on a disk, which temporary files may not be
        measure_blocks(asked, folder)
        measure_calls(asked, folder)


STUDY = Study(
    measure,
    (
        Table("chunk_store", "Reading blocks of a chunk store", BLOCK_COLUMNS),
        Table("chunk_store_puts", "Storing blocks in a chunk store", PUT_COLUMNS),
        Table("chunk_store_calls", "Calls of a chunk store as it fills", CALL_COLUMNS),
    ),
    (
        Option("mib", 256, 16, help="that one put stores"),
        Option("sizes", [10, 10_000, 100_000], quick=[10, 1000], help="blocks in the store"),
        Option("runs", 9, 3),
        Option("call-runs", 25, 5, help="of each call; the median counts"),
    ),
    {"job_blocks": JOB_BLOCKS, "queue_threads": QUEUE_THREADS},
)

if __name__ == "__main__":
    STUDY.main()
