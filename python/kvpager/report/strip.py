"""A snapshot's chunks side by side, in characters: score, last use, provenance."""

from __future__ import annotations

import math

import numpy as np

from kvpager.report.chunks import PROVENANCES, Ages, ChunkTable, Grades, Scores

ROWS = 4  # of the score bars
_MARGIN = 12
_LEAST_WIDTH = 40
_WIDEST = 8  # columns of a chunk
_BARS = (" ▁▂▃▄▅▆▇█", " .:|")  # unicode, ASCII; from nothing to a full cell
_SHADES = (" ░▒▓█", " .:+#")
_GRADES = (("·", "."), ("d", "d"), ("a", "a"))  # as PROVENANCES
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
    shown = table.bins(min(table.chunks, room)).widened(min(_WIDEST, room // table.chunks))
    columns = shown.chunks
    axis = "│" if unicode else "|"
    lines = []
    notes = [_per_column(table.chunks, columns)]
    if len(shown.scores) and shown.scores.max() > 0:
        lines += _bars(shown.scores, axis, colour, unicode)
        notes.append("score: share of attention mass, square-root scale")
    elif len(shown.scores):
        notes.append("score: none yet, nothing has attended to these chunks")
    if len(shown.ages):
        lines.append(_row("last use", _uses(shown.ages, unicode), "use", axis, colour))
        least, most = int(table.ages.min()), int(table.ages.max())
        ages = f"{least:,}" if least == most else f"{least:,} (dark) to {most:,} (light)"
        notes.append(f"last use: {ages} forwards before the save")
    grades = _grades(shown.grades, unicode)
    lines.append(_row("provenance", grades, PROVENANCES[int(shown.grades.max())], axis, colour))
    notes.append("provenance: " + ", ".join(_seen(table.grades, unicode)))
    lines.append(_scale(table.tokens, columns))
    if not len(table.scores) and not len(table.ages):
        notes.append("no hints were saved")
    indent = " " * _MARGIN
    return "\n".join([*lines, *(indent + note for note in notes)])


def _bars(scores: Scores, axis: str, colour: bool, unicode: bool) -> list[str]:
    ramp = _BARS[0] if unicode else _BARS[1]
    steps = len(ramp) - 1
    top = float(scores.max())
    heights = np.sqrt(np.clip(scores, 0, None) / top) * ROWS * steps
    filled = np.ceil(heights).astype(np.int64)  # a score above zero is seen
    lines = []
    for row in reversed(range(ROWS)):
        cells = "".join(ramp[min(steps, max(0, int(h) - row * steps))] for h in filled)
        name = "score" if row == ROWS - 1 else ""
        value = _label(top) if row == ROWS - 1 else "0" if row == 0 else ""
        lines.append(_row(f"{name:5}{value:>6}", cells, "score", axis, colour))
    return lines


def _uses(ages: Ages, unicode: bool) -> str:
    ramp = (_SHADES[0] if unicode else _SHADES[1])[:0:-1]  # from dark to light
    order = np.searchsorted(np.unique(ages), ages)  # by rank: uses may be far apart
    last = max(1, int(order.max()))
    return "".join(ramp[int(rank) * (len(ramp) - 1) // last] for rank in order)


def _grades(grades: Grades, unicode: bool) -> str:
    return "".join(_GRADES[int(grade)][0 if unicode else 1] for grade in grades)


def _seen(grades: Grades, unicode: bool) -> list[str]:
    return [
        f"{_GRADES[int(grade)][0 if unicode else 1]} {PROVENANCES[int(grade)]}"
        for grade in np.unique(grades)
    ]


def _row(name: str, cells: str, look: str, axis: str, colour: bool) -> str:
    shown = f"\x1b[38;5;{_COLOURS[look]}m{cells}\x1b[0m" if colour else cells.rstrip()
    return f"{name:<{_MARGIN - 1}}{axis}{shown}"


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


def _label(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
