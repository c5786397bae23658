"""What this machine can do: the rooflines that figures are put beside, measured in the same run."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kvpager_bench import file_peers
from kvpager_bench.report import MissingNumberError

MEMORY_BYTES = 256 << 20  # many times any cache
DISK_BYTES = 512 << 20
RUNS = 15
DISK_RUNS = 3


@dataclass(frozen=True)
class Rate:
    """Bytes per second of several runs. A roofline is the best of them."""

    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs or not all(0 < rate < math.inf for rate in self.runs):
            raise MissingNumberError(f"rates are {self.runs}; expected some above 0")

    @property
    def best(self) -> float:
        return max(self.runs)

    @property
    def median(self) -> float:
        return median(self.runs)


@dataclass(frozen=True)
class MemoryBandwidth:
    """What `threads` threads read and copy; a copied byte counts once."""

    threads: int
    reads: Rate
    copies: Rate

    @property
    def read(self) -> float:
        """Bytes per second, best of several runs."""
        return self.reads.best

    @property
    def copy(self) -> float:
        """Bytes copied per second, best of several runs."""
        return self.copies.best


@dataclass(frozen=True)
class DiskBandwidth:
    """What one thread writes to a folder, fsync included, and reads back past the page cache."""

    writes: Rate
    reads: Rate

    @property
    def write(self) -> float:
        """Bytes per second, best of several runs."""
        return self.writes.best

    @property
    def cold_read(self) -> float:
        """Bytes per second, best of several runs."""
        return self.reads.best


class _InTorch:
    """A call in so many of torch's threads, as kernels beside it: others would share processors
    with torch's, which wait for the next call without sleeping."""

    def __init__(self, threads: int, bytes_: int = MEMORY_BYTES) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; expected at least 1")
        self._threads = threads
        self._data = torch.ones(bytes_ // 8, dtype=torch.int64)
        self.bytes = self._data.nbytes

    def _run(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        before = torch.get_num_threads()
        if before == self._threads:
            return call()
        torch.set_num_threads(self._threads)
        try:
            return call()
        finally:
            torch.set_num_threads(before)


class MemoryReader(_InTorch):
    """Reads `bytes` of memory that is warm in no cache: a subject for `harness.interleave`."""

    def __call__(self) -> torch.Tensor:
        """The sum of all numbers, which are 1."""
        return self._run(self._data.sum)


class MemoryCopier(_InTorch):
    """Copies `bytes` of memory to memory that is there already."""

    def __init__(self, threads: int, bytes_: int = MEMORY_BYTES) -> None:
        super().__init__(threads, bytes_)
        self._target = torch.full_like(self._data, 2)  # zeroed pages may not be there yet

    def __call__(self) -> torch.Tensor:
        """The copy."""
        return self._run(lambda: self._target.copy_(self._data))


@functools.cache
def memory_bandwidth(threads: int) -> MemoryBandwidth:
    """Of reading and of copying; measured once per process and number of threads."""
    return MemoryBandwidth(
        threads, *(_rate(kind(threads)) for kind in (MemoryReader, MemoryCopier))
    )


def _rate(subject: MemoryReader | MemoryCopier) -> Rate:
    subject()
    return Rate(tuple(subject.bytes / _seconds(subject) for _ in range(RUNS)))


@functools.cache
def disk_bandwidth(folder: Path) -> DiskBandwidth:
    """Of the disk that `folder` lies on; measured once per process and folder.

    Writes DISK_BYTES that do not compress. What the page cache held is dropped before each read,
    as far as the system honours it: on a memory file system it does not.
    """
    data = np.random.default_rng(0).integers(0, 256, DISK_BYTES, dtype=np.uint8)
    writes, reads = [], []
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="bandwidth-", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        for _ in range(DISK_RUNS):
            path.unlink()  # a fresh file each time: overwriting is another thing
            writes.append(DISK_BYTES / _seconds(lambda: file_peers.write_synced(path, data)))
            file_peers.prepare(path, "dropped")
            reads.append(DISK_BYTES / _seconds(lambda: file_peers.read_file(path)))
    finally:
        path.unlink(missing_ok=True)
    return DiskBandwidth(Rate(tuple(writes)), Rate(tuple(reads)))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
