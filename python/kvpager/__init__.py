"""kvpager: pages the KV cache of long conversations through a hard-bounded pool.

See `Engine` for transformers models and `Pager` for a serving stack that runs its own model. Names
are loaded when first used, so that `import kvpager` costs nothing until torch is needed.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from kvpager._version import __version__

if TYPE_CHECKING:
    from kvpager.config import Dense, PagerConfig, TopK, Window
    from kvpager.errors import (
        CapacityError,
        CorruptSnapshotError,
        DeviceError,
        FingerprintMismatchError,
        InvalidArgumentError,
        InvariantError,
        ModelChangedError,
        NonFiniteError,
        PagerError,
        PrefixMismatchError,
        RestoreNotConsumedError,
        StorageError,
        UnsupportedModelError,
        UnsupportedVersionError,
        VerificationError,
    )
    from kvpager.hf.looks import only_looks
    from kvpager.pager import (
        ROW_COMMIT,
        ROW_GIVEN,
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
    from kvpager.runtime import (
        Agreement,
        Assembly,
        Cache,
        CacheGroup,
        Combined,
        Completion,
        Deviation,
        DraftModel,
        Engine,
        FullRepair,
        GeneratedToken,
        GenerationOptions,
        NeedsCheckpoint,
        NoRepair,
        Ok,
        Piece,
        PromptLookup,
        Proposer,
        QueryGuided,
        Refused,
        RepairPolicy,
        Request,
        Reuse,
        Sampling,
        SaveHandle,
        Scheduler,
        Score,
        SeamTail,
        Segment,
        SegmentHead,
        Segments,
        Session,
        SpeculationStats,
        Stitched,
        TrimAnswer,
        TrimCounters,
        TrimReport,
    )
    from kvpager.stores import (
        DirectoryStore,
        FileStore,
        GcReport,
        SaveReport,
        SnapshotStore,
        StoreEntry,
    )

_ROOMS = {
    "kvpager.config": (
        "Dense",
        "PagerConfig",
        "TopK",
        "Window",
    ),
    "kvpager.errors": (
        "CapacityError",
        "CorruptSnapshotError",
        "DeviceError",
        "FingerprintMismatchError",
        "InvalidArgumentError",
        "InvariantError",
        "ModelChangedError",
        "NonFiniteError",
        "PagerError",
        "PrefixMismatchError",
        "RestoreNotConsumedError",
        "StorageError",
        "UnsupportedModelError",
        "UnsupportedVersionError",
        "VerificationError",
    ),
    "kvpager.hf.looks": ("only_looks",),
    "kvpager.pager": (
        "ROW_COMMIT",
        "ROW_GIVEN",
        "ROW_PADDING",
        "ROW_READ",
        "ChunkInfo",
        "Forward",
        "Layout",
        "Pager",
        "Pin",
        "Sequence",
        "SnapshotInfo",
        "open_snapshot",
    ),
    "kvpager.runtime": (
        "Agreement",
        "Assembly",
        "Cache",
        "CacheGroup",
        "Combined",
        "Completion",
        "Deviation",
        "DraftModel",
        "Engine",
        "FullRepair",
        "GeneratedToken",
        "GenerationOptions",
        "NeedsCheckpoint",
        "NoRepair",
        "Ok",
        "Piece",
        "PromptLookup",
        "Proposer",
        "QueryGuided",
        "Refused",
        "RepairPolicy",
        "Request",
        "Reuse",
        "Sampling",
        "SaveHandle",
        "Scheduler",
        "Score",
        "SeamTail",
        "Segment",
        "SegmentHead",
        "Segments",
        "Session",
        "SpeculationStats",
        "Stitched",
        "TrimAnswer",
        "TrimCounters",
        "TrimReport",
    ),
    "kvpager.stores": (
        "DirectoryStore",
        "FileStore",
        "GcReport",
        "SaveReport",
        "SnapshotStore",
        "StoreEntry",
    ),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

logging.getLogger("kvpager").addHandler(logging.NullHandler())


def _fix_workspace() -> None:
    """Gives cuBLAS one size of workspace for all products, unless it has been asked for already."""
    torch = sys.modules.get("torch")
    if torch is None or (torch.version.cuda and not torch.cuda.is_initialized()):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_fix_workspace()

__all__ = [
    "ROW_COMMIT",
    "ROW_GIVEN",
    "ROW_PADDING",
    "ROW_READ",
    "Agreement",
    "Assembly",
    "Cache",
    "CacheGroup",
    "CapacityError",
    "ChunkInfo",
    "Combined",
    "Completion",
    "CorruptSnapshotError",
    "Dense",
    "Deviation",
    "DeviceError",
    "DirectoryStore",
    "DraftModel",
    "Engine",
    "FileStore",
    "FingerprintMismatchError",
    "Forward",
    "FullRepair",
    "GcReport",
    "GeneratedToken",
    "GenerationOptions",
    "InvalidArgumentError",
    "InvariantError",
    "Layout",
    "ModelChangedError",
    "NeedsCheckpoint",
    "NoRepair",
    "NonFiniteError",
    "Ok",
    "Pager",
    "PagerConfig",
    "PagerError",
    "Piece",
    "Pin",
    "PrefixMismatchError",
    "PromptLookup",
    "Proposer",
    "QueryGuided",
    "Refused",
    "RepairPolicy",
    "Request",
    "RestoreNotConsumedError",
    "Reuse",
    "Sampling",
    "SaveHandle",
    "SaveReport",
    "Scheduler",
    "Score",
    "SeamTail",
    "Segment",
    "SegmentHead",
    "Segments",
    "Sequence",
    "Session",
    "SnapshotInfo",
    "SnapshotStore",
    "SpeculationStats",
    "Stitched",
    "StorageError",
    "StoreEntry",
    "TopK",
    "TrimAnswer",
    "TrimCounters",
    "TrimReport",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "VerificationError",
    "Window",
    "__version__",
    "only_looks",
    "open_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
