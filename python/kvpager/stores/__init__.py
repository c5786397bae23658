"""Stores of snapshots: single files, or a directory whose snapshots share chunks."""

from kvpager._core import SnapshotContent, SnapshotImage, SnapshotReader
from kvpager.stores.base import (
    ByteRanges,
    GcReport,
    SaveReport,
    SnapshotStore,
    StoreEntry,
)
from kvpager.stores.chunks import ChunkQueue, ChunkStore, JobDone, PutReport, ReadResult
from kvpager.stores.directory import DirectoryStore
from kvpager.stores.encryption import StoreKey
from kvpager.stores.file import FileStore
from kvpager.stores.object import ObjectStore

__all__ = [
    "ByteRanges",
    "ChunkQueue",
    "ChunkStore",
    "DirectoryStore",
    "FileStore",
    "GcReport",
    "JobDone",
    "ObjectStore",
    "PutReport",
    "ReadResult",
    "SaveReport",
    "SnapshotContent",
    "SnapshotImage",
    "SnapshotReader",
    "SnapshotStore",
    "StoreEntry",
    "StoreKey",
]
