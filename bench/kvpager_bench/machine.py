"""What this machine can do: the rooflines that figures are put beside, measured in the same run."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kvpager_bench import file_peers
from kvpager_bench.harness import timed
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


class MemoryReader:
    """Reads `bytes` of memory that is warm in no cache: a subject for `harness.interleave`.

    In torch's threads, as kernels beside it: others would share processors with torch's, which wait
    for the next call without sleeping.
    """

    def __init__(self, bytes_: int = MEMORY_BYTES) -> None:
        self._data = torch.ones(bytes_ // 8, dtype=torch.int64)
        self.bytes = self._data.nbytes

    def __call__(self) -> torch.Tensor:
        """The sum of all numbers, which are 1."""
        return self._data.sum()


class MemoryCopier(MemoryReader):
    """Copies `bytes` of memory to memory that is there already."""

    def __init__(self, bytes_: int = MEMORY_BYTES) -> None:
        super().__init__(bytes_)
        self._target = torch.full_like(self._data, 2)  # zeroed pages may not be there yet

    def __call__(self) -> torch.Tensor:
        """The copy."""
        return self._target.copy_(self._data)


@functools.cache
def memory_bandwidth() -> tuple[Rate, Rate]:
    """Of reading, and of copying, where a byte counts once; measured once per process."""
    return _rate(MemoryReader()), _rate(MemoryCopier())


def _rate(subject: MemoryReader) -> Rate:
    subject()
    return Rate(tuple(subject.bytes / timed(subject)[0] for _ in range(RUNS)))


@functools.cache
def disk_bandwidth(folder: Path) -> tuple[Rate, Rate]:
    """Of writing with an fsync, and of reading, to where `folder` lies; measured once per process.

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
            writes.append(DISK_BYTES / timed(lambda: file_peers.write_synced(path, data))[0])
            file_peers.prepare(path, "dropped")
            reads.append(DISK_BYTES / timed(lambda: file_peers.read_file(path))[0])
    finally:
        path.unlink(missing_ok=True)
    return Rate(tuple(writes)), Rate(tuple(reads))
