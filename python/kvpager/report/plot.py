"""The residency picture as a PNG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.pager import TIER_DISK, TIER_HOST, TIER_RESIDENT, TIER_SNAPSHOT
from kvpager.report.blocks import home
from kvpager.report.trace import Episode

# Per tier: name, colour where no row read the chunk, colour where one did.
_TIERS = {
    TIER_RESIDENT: ("resident pool", "#7fb8ad", "#0b6e5f"),
    TIER_HOST: ("host", "#dbe4f0", "#86a5d3"),
    TIER_DISK: ("disk", "#f3e3c8", "#d9a441"),
    TIER_SNAPSHOT: ("snapshot file", "#ece9f2", "#a891cc"),
}
_RECALLED = "#e4572e"
_ASKED = "#111111"
_LEAST_SHARE = 0.6  # of an even share of the width, so that short episodes can be read


def draw_png(episodes: list[Episode], chunk_tokens: int, title: str) -> bytes:
    """Chunks upwards, time to the right, one panel per episode; returns the file's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chunks = max(episode.tiers.shape[1] for episode in episodes)
    figure = Figure(figsize=(15, 8), dpi=110)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1,
        len(episodes),
        width_ratios=_widths([len(episode.tiers) for episode in episodes]),
        wspace=0.04,
        left=0.06,
        right=0.95,
        top=0.9,
        bottom=0.19,
    )
    first: Any = None
    for number, episode in enumerate(episodes):
        axes = figure.add_subplot(grid[0, number], sharey=first)
        first = first or axes
        _draw_episode(axes, episode, chunks)
        axes.tick_params(labelleft=number == 0)
    first.set_ylabel(f"chunk ({chunk_tokens} tokens each)")
    figure.suptitle(f"Where every chunk lived: {title}", x=0.06, ha="left", fontsize=13)
    figure.supxlabel("moments, one per forward or group of forwards", y=0.105, fontsize=10)
    figure.legend(
        handles=_legend(episodes), loc="lower center", ncol=4, frameon=False, fontsize=9.5
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_episode(axes: Any, episode: Episode, chunks: int) -> None:
    moments = len(episode.tiers)
    axes.imshow(
        _image(episode, chunks),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0, moments, 0, chunks),
    )
    when, which = np.nonzero(episode.recalled)
    size = float(np.clip(2500 / max(1, len(when)), 3, 22))
    axes.scatter(when + 0.5, which + 0.5, s=size, c=_RECALLED, marker="s", linewidths=0)
    if episode.asked:
        asked = np.array(episode.asked)
        axes.scatter(
            asked[:, 0] + 0.5,
            asked[:, 1] + 0.5,
            s=70,
            facecolors="none",
            edgecolors=_ASKED,
            linewidths=1.4,
            clip_on=False,
            zorder=5,
        )
    axes.set_title(episode.label, fontsize=10)
    axes.set_xlim(0, moments)
    axes.set_ylim(0, chunks)
    axes.locator_params(axis="x", integer=True, nbins=4, prune="upper")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _image(episode: Episode, chunks: int) -> npt.NDArray[np.float64]:
    """RGB [chunks, moments, 3]."""
    from matplotlib.colors import to_rgb

    homes = home(episode.tiers)
    image = np.ones((len(homes), chunks, 3))
    present = image[:, : homes.shape[1]]
    for tier, (_, calm, read) in _TIERS.items():
        present[homes == tier] = to_rgb(calm)
        present[(homes == tier) & episode.selected] = to_rgb(read)
    return np.ascontiguousarray(image.swapaxes(0, 1))


def _legend(episodes: list[Episode]) -> list[Any]:
    from matplotlib.patches import Patch

    seen = {int(tier) for episode in episodes for tier in np.unique(home(episode.tiers))}
    handles: list[Any] = []
    for tier, (name, calm, read) in _TIERS.items():
        if tier in seen:
            handles.append(Patch(facecolor=read, label=f"{name}, selected by a row"))
            handles.append(Patch(facecolor=calm, label=f"{name}, not selected"))
    handles.append(_marker("recalled to the pool", marker="s", color=_RECALLED, markersize=6))
    if any(episode.asked for episode in episodes):
        ring = {"marker": "o", "markerfacecolor": "none", "color": _ASKED, "markersize": 8}
        handles.append(_marker("needle asked for", **ring))
    return handles


def _marker(label: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="", label=label, **look)


def _widths(moments: list[int]) -> list[float]:
    even = sum(moments) / len(moments)
    return [max(count, _LEAST_SHARE * even) for count in moments]
