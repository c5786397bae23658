"""kvpager: pages the KV cache of long conversations through a hard-bounded pool.

See `Engine` for transformers models and `Pager` for a serving stack that runs its own model.
"""

from __future__ import annotations

import logging

from kvpager._version import __version__
from kvpager.config import Dense, PagerConfig, TopK, Window
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    InvariantError,
    NonFiniteError,
    PagerError,
    PrefixMismatchError,
    RestoreNotConsumedError,
    StorageError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from kvpager.pager import (
    ROW_COMMIT,
    ROW_PADDING,
    ROW_READ,
    ChunkInfo,
    Forward,
    Layout,
    Pager,
    Pin,
    Sequence,
    SnapshotInfo,
    open_snapshot,
)
from kvpager.runtime import Engine, Sampling, Score, Session

logging.getLogger("kvpager").addHandler(logging.NullHandler())

__all__ = [
    "ROW_COMMIT",
    "ROW_PADDING",
    "ROW_READ",
    "CapacityError",
    "ChunkInfo",
    "CorruptSnapshotError",
    "Dense",
    "Engine",
    "FingerprintMismatchError",
    "Forward",
    "InvalidArgumentError",
    "InvariantError",
    "Layout",
    "NonFiniteError",
    "Pager",
    "PagerConfig",
    "PagerError",
    "Pin",
    "PrefixMismatchError",
    "RestoreNotConsumedError",
    "Sampling",
    "Score",
    "Sequence",
    "Session",
    "SnapshotInfo",
    "StorageError",
    "TopK",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "Window",
    "__version__",
    "open_snapshot",
]
