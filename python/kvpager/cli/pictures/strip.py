"""A snapshot's chunks side by side, in characters: score, last use, provenance."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvpager.cli.pictures.chunks import PROVENANCES, Ages, ChunkTable, Scores

ROWS = 4  # of the score bars
_MARGIN = 12
_LEAST_WIDTH = 40
_WIDEST = 8  # columns of a chunk
_BARS = (" ▁▂▃▄▅▆▇█", " .:|")  # unicode, ASCII; from nothing to a full cell
_SHADES = (" ░▒▓█", " .:+#")
_MARKS = ("·da", ".da")  # as PROVENANCES
_COLOURS = {"score": 30, "use": 110, "exact": 108, "decode": 180, "approximate": 208}


def draw_strip(table: ChunkTable, width: int, *, colour: bool, unicode: bool) -> str:
    """Chunks from left to right, as many to a column as it takes, or a few columns to a chunk.

    Args:
        table: what to draw.
        width: columns there are; below 40 is treated as 40.
        colour: use ANSI colours.
        unicode: use block characters; else ASCII.
    """
    if not table.chunks:
        return "no chunks"
    room = max(width, _LEAST_WIDTH) - _MARGIN
    shown = table.bins(room).widened(min(_WIDEST, room // table.chunks))
    bars, shades, marks = (ramps[0 if unicode else 1] for ramps in (_BARS, _SHADES, _MARKS))

    def row(name: str, cells: str, look: str) -> str:
        drawn = f"\x1b[38;5;{_COLOURS[look]}m{cells}\x1b[0m" if colour else cells.rstrip()
        return f"{name:<{_MARGIN - 1}}{'│' if unicode else '|'}{drawn}"

    lines = []
    notes = [_per_column(table.chunks, shown.chunks)]
    if len(shown.scores) and shown.scores.max() > 0:
        lines += [row(name, cells, "score") for name, cells in _bars(shown.scores, bars)]
        notes.append("score: share of attention mass, square-root scale")
    elif len(shown.scores):
        notes.append("score: none yet, nothing has attended to these chunks")
    if len(shown.ages):
        lines.append(row("last use", _uses(shown.ages, shades), "use"))
        least, most = int(table.ages.min()), int(table.ages.max())
        ages = f"{least:,}" if least == most else f"{least:,} (dark) to {most:,} (light)"
        notes.append(f"last use: {ages} forwards before the save")
    grades = "".join(marks[grade] for grade in shown.grades)
    lines.append(row("provenance", grades, PROVENANCES[shown.grades.max()]))
    seen = [f"{marks[grade]} {PROVENANCES[grade]}" for grade in np.unique(table.grades)]
    notes.append("provenance: " + ", ".join(seen))
    lines.append(_scale(table.tokens, shown.chunks))
    if not len(table.scores) and not len(table.ages):
        notes.append("no hints were saved")
    indent = " " * _MARGIN
    return "\n".join([*lines, *(indent + note for note in notes)])


def _bars(scores: Scores, ramp: str) -> Iterator[tuple[str, str]]:
    """Names and cells of the rows of bars, from the top."""
    steps = len(ramp) - 1
    top = float(scores.max())
    heights = np.sqrt(np.clip(scores, 0, None) / top) * ROWS * steps
    filled = np.ceil(heights).astype(np.int64)  # a score above zero is seen
    label = f"{top:.3f}" if top >= 0.001 else f"{top:.0e}"
    names = [f"score{label:>6}", *[""] * (ROWS - 2), f"{'0':>11}"]
    for number, name in zip(reversed(range(ROWS)), names):
        yield name, "".join(ramp[level] for level in np.clip(filled - number * steps, 0, steps))


def _uses(ages: Ages, ramp: str) -> str:
    dark_to_light = ramp[:0:-1]
    order = np.searchsorted(np.unique(ages), ages)  # by rank: uses may be far apart
    last = max(1, int(order.max()))
    return "".join(dark_to_light[rank * (len(dark_to_light) - 1) // last] for rank in order)


def _scale(tokens: int, columns: int) -> str:
    """Positions below the first, the middle and the end of the strip, where there is room."""
    line = [" "] * (_MARGIN + columns + 24)
    spots = [(0, "0"), (columns, f"{tokens:,} tokens")]
    if columns >= 40:
        spots.insert(1, (columns // 2, f"{tokens // 2:,}"))
    for column, text in spots:
        start = _MARGIN + column
        if column == columns:
            start = max(_MARGIN + 2, start - len(text))
        line[start : start + len(text)] = text
    return "".join(line).rstrip()


def _per_column(chunks: int, columns: int) -> str:
    if chunks <= columns:
        return f"columns per chunk: {columns // chunks}"
    few, many = chunks // columns, math.ceil(chunks / columns)
    return "each column: " + (f"{few} chunks" if few == many else f"{few} or {many} chunks")
