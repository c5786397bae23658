"""Pictures of where chunks lived."""

from __future__ import annotations

from kvpager.report.blocks import draw_blocks
from kvpager.report.plot import draw_png
from kvpager.report.trace import Episode, Trace

__all__ = ["Episode", "Trace", "draw_blocks", "draw_png"]
