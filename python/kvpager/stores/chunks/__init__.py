"""A store of opaque blocks of K/V by key, for engines other than kvpager's own."""

from kvpager.stores.chunks.queue import ChunkQueue, JobDone
from kvpager.stores.chunks.reports import ChunkGcReport, DamagedBlock, PutReport, ReadResult
from kvpager.stores.chunks.store import ChunkStore

__all__ = [
    "ChunkGcReport",
    "ChunkQueue",
    "ChunkStore",
    "DamagedBlock",
    "JobDone",
    "PutReport",
    "ReadResult",
]
