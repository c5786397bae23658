"""Where snapshots are kept: single files, or a folder that shares their chunks."""

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
