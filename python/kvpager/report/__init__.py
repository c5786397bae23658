"""Pictures: where chunks lived, and what a snapshot says of its own."""

from __future__ import annotations

from kvpager.report.blocks import draw_blocks
from kvpager.report.chunks import ChunkTable, chunk_table
from kvpager.report.plot import draw_png
from kvpager.report.strip import draw_strip
from kvpager.report.strip_plot import draw_strip_png
from kvpager.report.trace import Episode, Trace

__all__ = [
    "ChunkTable",
    "Episode",
    "Trace",
    "chunk_table",
    "draw_blocks",
    "draw_png",
    "draw_strip",
    "draw_strip_png",
]
