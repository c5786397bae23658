"""Pictures of a snapshot's chunks."""

from __future__ import annotations

from kvpager.report.chunks import ChunkTable, chunk_table
from kvpager.report.strip import draw_strip
from kvpager.report.strip_plot import draw_strip_png

__all__ = [
    "ChunkTable",
    "chunk_table",
    "draw_strip",
    "draw_strip_png",
]
