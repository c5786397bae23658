"""Segments: texts whose K/V are computed once, alone, and reused at any place in other texts."""

from __future__ import annotations

from kvpager._runtime.text.assembly import Assembly
from kvpager.segments.pieces import Piece
from kvpager.segments.policies import (
    DEFAULT_REPAIR,
    Combined,
    Deviation,
    FullRepair,
    NoRepair,
    QueryGuided,
    RepairPolicy,
    SeamTail,
    SegmentHead,
    Stitched,
)
from kvpager.segments.segment import Segment
from kvpager.segments.shelf import Segments

__all__ = [
    "DEFAULT_REPAIR",
    "Assembly",
    "Combined",
    "Deviation",
    "FullRepair",
    "NoRepair",
    "Piece",
    "QueryGuided",
    "RepairPolicy",
    "SeamTail",
    "Segment",
    "SegmentHead",
    "Segments",
    "Stitched",
]
