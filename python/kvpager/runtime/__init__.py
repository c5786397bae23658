"""The runtime: sessions of a model over a pager, packed into forwards of proven row counts."""

from __future__ import annotations

from kvpager.runtime.agreement import Agreement
from kvpager.runtime.completion import Completion
from kvpager.runtime.draft import DraftModel
from kvpager.runtime.engine import Engine
from kvpager.runtime.generation_options import GenerationOptions
from kvpager.runtime.group import (
    Cache,
    CacheGroup,
    NeedsCheckpoint,
    Ok,
    Refused,
    TrimAnswer,
    TrimCounters,
    TrimReport,
)
from kvpager.runtime.prompt_lookup import PromptLookup
from kvpager.runtime.request import Request
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.saving import SaveHandle
from kvpager.runtime.scheduler import Scheduler
from kvpager.runtime.score import Score
from kvpager.runtime.segments import (
    Assembly,
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
from kvpager.runtime.segments.segment import Segment
from kvpager.runtime.segments.shelf import Segments
from kvpager.runtime.session import Reuse, Session
from kvpager.runtime.speculation import Proposer, SpeculationStats
from kvpager.runtime.stream import GeneratedToken

__all__ = [
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
]
