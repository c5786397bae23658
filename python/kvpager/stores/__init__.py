"""Stores of snapshots: single files, or a directory whose snapshots share chunks."""

from kvpager.stores.base import GcReport, SaveReport, SnapshotStore, StoreEntry
from kvpager.stores.directory import DirectoryStore
from kvpager.stores.file import FileStore

__all__ = [
    "DirectoryStore",
    "FileStore",
    "GcReport",
    "SaveReport",
    "SnapshotStore",
    "StoreEntry",
]
