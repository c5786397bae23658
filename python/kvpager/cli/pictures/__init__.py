"""Pictures of a snapshot's chunks."""

from __future__ import annotations

from kvpager.cli.pictures.chunks import ChunkTable, chunk_table
from kvpager.cli.pictures.strip import draw_strip
from kvpager.cli.pictures.strip_plot import draw_strip_png

__all__ = [
    "ChunkTable",
    "chunk_table",
    "draw_strip",
    "draw_strip_png",
]
