"""How all pictures look: their size, colours, labels at the lines, and the file they become."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator
from PIL import Image, PngImagePlugin

# The backend comes before anything that draws.
from kvpager_bench.report import tokens_name

INCHES, DPI = (8.0, 4.5), 150  # 1200 x 675 pixels; text is 11 to 14 pixels high where 800 are shown
SOURCE = "Source"  # the key of a PNG's text that says what it was drawn from
# Colours that colour-blind readers tell apart (Okabe and Ito); ours is the first.
OURS, OTHERS = "#0072B2", ("#D55E00", "#009E73", "#CC79A7", "#6b6b6b", "#E69F00", "#56B4E9")
_COLOURS = 64  # in a file
_GAP = 0.055  # of the axis's height, between two labels
_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def blank(title: str, panels: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure with its title, and its axes: one, or an array of them."""
    with mpl.rc_context(_STYLE):
        figure, axes = plt.subplots(1, panels, figsize=INCHES, layout="constrained", **options)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold")
    return figure, axes


def against_context(axis: Any, contexts: Sequence[float], label: str) -> None:
    """Context to the right and `label` up, both logarithmic."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [tokens_name(int(tokens)) for tokens in contexts])
    axis.minorticks_off()
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("context [tokens]")
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)


def label_ends(axis: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """A label right of the end of each line, in its colour: text, x, y, colour."""
    axis.figure.canvas.draw()  # limits and transforms are final
    place = axis.transData + axis.transAxes.inverted()
    spots = sorted((float(place.transform((x, y))[1]), text, colour) for text, x, y, colour in ends)
    heights = apart([height for height, _, _ in spots])
    for (_, text, colour), height in zip(spots, heights):
        axis.annotate(
            text,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if colour == OURS else "normal",
            annotation_clip=False,
        )


def apart(heights: Sequence[float]) -> list[float]:
    """The ascending heights, moved up as far as it takes that no two are nearer than _GAP."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + _GAP) if placed else height)
    return placed


def save(figure: Any, path: Path, source: str) -> None:
    """Writes the file; it has no software's version inside, and so changes with its figures alone.

    source: what it was drawn from, kept in it. Raises ValueError for a title that does not fit.
    """
    figure.set_dpi(DPI)
    figure.canvas.draw()
    if any(text.get_window_extent().x1 > figure.bbox.x1 for text in figure.texts):
        raise ValueError(f"{path.name}: its title is wider than it: {figure.get_suptitle()!r}")
    pixels = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    told = PngImagePlugin.PngInfo()
    told.add_text(SOURCE, source)
    few = pixels.quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True, pnginfo=told)
    plt.close(figure)
