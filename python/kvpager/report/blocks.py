"""The residency picture in characters, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvpager.pager import TIER_DISK, TIER_HOST, TIER_RESIDENT, TIER_SNAPSHOT
from kvpager.report.trace import Episode

ROWS = 16
_MARGIN = 7  # the scale at the left, and its line
_LEAST_WIDTH = 40

# Where most chunks of a cell were: (character, ASCII character, colour of 256).
_CELLS = {
    0: (" ", " ", None),
    TIER_SNAPSHOT: ("·", ".", 146),
    TIER_DISK: ("░", ":", 180),
    TIER_HOST: ("▒", "-", 110),
    TIER_RESIDENT: ("█", "#", 30),
}
_RECALLED = ("◆", "o", 208)
_RECALLED_SHARE = 0.02  # of a cell: a coarse picture would show nothing but recalls
_NAMES = {
    TIER_RESIDENT: "resident",
    TIER_HOST: "host",
    TIER_DISK: "disk",
    TIER_SNAPSHOT: "snapshot file",
}


def draw_blocks(episodes: list[Episode], width: int, *, colour: bool, unicode: bool) -> str:
    """Chunks downwards, time to the right, one panel per episode.

    Args:
        episodes: in the order they happened.
        width: columns there are; below 40 is treated as 40.
        colour: use ANSI colours.
        unicode: use block characters; else ASCII.
    """
    chunks = max(episode.tiers.shape[1] for episode in episodes)
    rows = min(ROWS, chunks)
    room = max(width, _LEAST_WIDTH) - _MARGIN - len(episodes)
    columns = _shares([len(episode.tiers) for episode in episodes], room)
    panels = [
        _panel(episode, chunks, rows, wide, colour, unicode)
        for episode, wide in zip(episodes, columns)
    ]
    bar = "│" if unicode else "|"
    lines = ["chunk"]
    for row in range(rows):
        start = chunks * row // rows
        lines.append(f"{start:>5} {bar}" + bar.join(panel[row] for panel in panels))
    names = bar.join(f"{e.label[:wide]:<{wide}}" for e, wide in zip(episodes, columns))
    lines.append(" " * (_MARGIN - 1) + bar + names.rstrip())
    lines.append(_legend(episodes, colour, unicode))
    return "\n".join(lines)


def home(tiers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The fastest tier among each entry's TIER_* bits, 0 for none."""
    result = np.zeros_like(tiers)
    for tier in (TIER_SNAPSHOT, TIER_DISK, TIER_HOST, TIER_RESIDENT):
        result[tiers & tier != 0] = tier
    return result


def _shares(moments: list[int], room: int) -> list[int]:
    """Columns per episode: by its length, but no episode below an even half share."""
    least = max(1, room // (2 * len(moments)))
    spare = max(0, room - least * len(moments))
    total = max(1, sum(moments))
    return [least + spare * count // total for count in moments]


def _panel(
    episode: Episode, chunks: int, rows: int, columns: int, colour: bool, unicode: bool
) -> list[str]:
    """The episode's cells, a string per row of chunks."""
    homes = home(episode.tiers)
    moments, present = homes.shape
    lines = []
    for row in range(rows):
        top, bottom = (
            chunks * row // rows,
            max(chunks * (row + 1) // rows, chunks * row // rows + 1),
        )
        cells = []
        for column in range(columns):
            left = moments * column // columns
            right = max(moments * (column + 1) // columns, left + 1)
            part = homes[left:right, top : min(bottom, present)]
            moved = episode.recalled[left:right, top : min(bottom, present)]
            enough = max(1, int(_RECALLED_SHARE * moved.size))
            cells.append(_cell(part, int(moved.sum()) >= enough, colour, unicode))
        lines.append("".join(cells))
    return lines


def _cell(part: npt.NDArray[np.uint8], recalled: bool, colour: bool, unicode: bool) -> str:
    if recalled:
        return _paint(_RECALLED, colour, unicode)
    values, counts = np.unique(part, return_counts=True)
    main = int(values[counts.argmax()]) if len(values) else 0
    return _paint(_CELLS[main], colour, unicode)


def _paint(look: tuple[str, str, int | None], colour: bool, unicode: bool) -> str:
    character = look[0] if unicode else look[1]
    return f"\x1b[38;5;{look[2]}m{character}\x1b[0m" if colour and look[2] else character


def _legend(episodes: Iterable[Episode], colour: bool, unicode: bool) -> str:
    seen = {int(tier) for episode in episodes for tier in np.unique(home(episode.tiers))}
    parts = [
        f"{_paint(_CELLS[tier], colour, unicode)} {name}"
        for tier, name in _NAMES.items()
        if tier in seen
    ]
    parts.append(f"{_paint(_RECALLED, colour, unicode)} recalled")
    return " " * _MARGIN + "  ".join(parts) + "  (most chunks of a cell; time to the right)"
