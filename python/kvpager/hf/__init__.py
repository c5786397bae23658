"""The seam to transformers: runs an unmodified causal LM with attention over chunks."""

from __future__ import annotations

from kvpager.hf.attach import attach
from kvpager.hf.attention import NAME, running
from kvpager.hf.bits import same_bits
from kvpager.hf.head import HEAD_ROWS, Head
from kvpager.hf.layout import layout_of
from kvpager.hf.looks import only_looks
from kvpager.hf.observe import Observation, dummy_mask, observe, packed_inputs
from kvpager.hf.prove import Dropped, RowProof, prove
from kvpager.hf.rotary import KeyMover, find_rotation
from kvpager.hf.rows import RowCounts
from kvpager.hf.shapes import ShapeReport, probe_shapes
from kvpager.hf.start import settle_rows
from kvpager.hf.support import check_supported

__all__ = [
    "HEAD_ROWS",
    "NAME",
    "Dropped",
    "Head",
    "KeyMover",
    "Observation",
    "RowCounts",
    "RowProof",
    "ShapeReport",
    "attach",
    "check_supported",
    "dummy_mask",
    "find_rotation",
    "layout_of",
    "observe",
    "only_looks",
    "packed_inputs",
    "probe_shapes",
    "prove",
    "running",
    "same_bits",
    "settle_rows",
]
