"""A snapshot's chunks as a PNG: score, last use, provenance."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from kvpager.cli.pictures.chunks import PROVENANCES, ChunkTable

_COLUMNS = 2048  # more chunks than that are grouped: the picture has no more pixels
_SCORE = "#0b6e5f"
_GRADES = ("#7fb8ad", "#d9a441", "#e4572e")  # as PROVENANCES


def draw_strip_png(table: ChunkTable, title: str) -> bytes:
    """Positions to the right; returns the file's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = table.bins(_COLUMNS)
    figure = Figure(figsize=(12, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    score, use, grade = figure.subplots(3, 1, sharex=True, height_ratios=[6, 1, 1])
    edges = np.linspace(0, table.tokens, shown.chunks + 1)
    _draw_scores(score, edges, shown)
    _draw_uses(use, table.tokens, shown)
    _draw_grades(grade, table.tokens, shown)
    grade.set_xlabel(f"position (chunks of {table.chunk_tokens} tokens)")
    grade.set_xlim(0, max(1, table.tokens))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_scores(axes: Any, edges: Any, shown: ChunkTable) -> None:
    if len(shown.scores):
        axes.stairs(shown.scores, edges, fill=True, color=_SCORE)
        axes.set_ylim(bottom=0)
    else:
        axes.text(0.5, 0.5, "no scores were saved", transform=axes.transAxes, ha="center")
        axes.set_yticks([])
    axes.set_ylabel("score (share of\nattention mass)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_uses(axes: Any, tokens: int, shown: ChunkTable) -> None:
    if len(shown.ages):
        ranks = np.searchsorted(np.unique(shown.ages), shown.ages)
        most = max(1, int(ranks.max()))
        _image(axes, tokens, ranks, cmap="Blues_r", vmin=0, vmax=1.3 * most)
    else:
        axes.text(0.5, 0.5, "not saved", transform=axes.transAxes, ha="center", va="center")
    _name(axes, "last use\n(dark: later)")


def _draw_grades(axes: Any, tokens: int, shown: ChunkTable) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap(_GRADES)
    _image(axes, tokens, shown.grades, cmap=colours, vmin=0, vmax=len(_GRADES) - 1)
    _name(axes, "provenance")
    seen = [int(grade) for grade in np.unique(shown.grades)]
    handles = [Patch(facecolor=_GRADES[grade], label=PROVENANCES[grade]) for grade in seen]
    axes.legend(handles=handles, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.9))


def _image(axes: Any, tokens: int, values: Any, **colours: Any) -> None:
    axes.imshow(
        values[None, :], aspect="auto", interpolation="nearest", extent=(0, tokens, 0, 1), **colours
    )


def _name(axes: Any, text: str) -> None:
    axes.set_yticks([])
    axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=9)
