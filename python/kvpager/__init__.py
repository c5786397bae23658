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
    from kvpager.caches import (
        Cache,
        CacheGroup,
        NeedsCheckpoint,
        Ok,
        Refused,
        TrimAnswer,
        TrimCounters,
        TrimReport,
    )
    from kvpager.config import Dense, PagerConfig, TopK, Window
    from kvpager.drafts.model import DraftModel
    from kvpager.engine import Engine
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
    from kvpager.requests.completion import Completion
    from kvpager.requests.request import Request
    from kvpager.requests.scheduler import Scheduler
    from kvpager.sampling import Sampling
    from kvpager.scheduling.agreement import Agreement
    from kvpager.scheduling.options import GenerationOptions
    from kvpager.scheduling.score import Score
    from kvpager.scheduling.stream import GeneratedToken
    from kvpager.segments import (
        Combined,
        Deviation,
        FullRepair,
        NoRepair,
        Piece,
        QueryGuided,
        RepairPolicy,
        SeamTail,
        SegmentHead,
        Stitched,
    )
    from kvpager.segments.segment import Segment
    from kvpager.segments.shelf import Segments
    from kvpager.session import Reuse, Session
    from kvpager.snapshots.saving import SaveHandle
    from kvpager.speculation.prompt_lookup import PromptLookup
    from kvpager.speculation.speculation import Proposer, SpeculationStats
    from kvpager.stores import (
        DirectoryStore,
        FileStore,
        GcReport,
        SaveReport,
        SnapshotStore,
        StoreEntry,
    )
    from kvpager.text.assembly import Assembly

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
    "kvpager.caches": (
        "Cache",
        "CacheGroup",
        "NeedsCheckpoint",
        "Ok",
        "Refused",
        "TrimAnswer",
        "TrimCounters",
        "TrimReport",
    ),
    "kvpager.drafts.model": ("DraftModel",),
    "kvpager.engine": ("Engine",),
    "kvpager.requests.completion": ("Completion",),
    "kvpager.requests.request": ("Request",),
    "kvpager.requests.scheduler": ("Scheduler",),
    "kvpager.scheduling.options": ("GenerationOptions",),
    "kvpager.sampling": ("Sampling",),
    "kvpager.scheduling.agreement": ("Agreement",),
    "kvpager.scheduling.score": ("Score",),
    "kvpager.scheduling.stream": ("GeneratedToken",),
    "kvpager.segments": (
        "Combined",
        "Deviation",
        "FullRepair",
        "NoRepair",
        "Piece",
        "QueryGuided",
        "RepairPolicy",
        "SeamTail",
        "SegmentHead",
        "Stitched",
    ),
    "kvpager.segments.segment": ("Segment",),
    "kvpager.segments.shelf": ("Segments",),
    "kvpager.session": ("Reuse", "Session"),
    "kvpager.snapshots.saving": ("SaveHandle",),
    "kvpager.speculation.prompt_lookup": ("PromptLookup",),
    "kvpager.speculation.speculation": ("Proposer", "SpeculationStats"),
    "kvpager.stores": (
        "DirectoryStore",
        "FileStore",
        "GcReport",
        "SaveReport",
        "SnapshotStore",
        "StoreEntry",
    ),
    "kvpager.text.assembly": ("Assembly",),
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
