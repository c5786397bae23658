"""Which row counts an engine's forwards have: M, and smaller ones that give the same bits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvpager.hf.head import HEAD_ROWS


@dataclass(frozen=True)
class RowCounts:
    """The row counts that carry one set of bits: every exact forward has one of them.

    Attributes:
        rows: M, the most rows of a forward.
        smaller: proven counts below M, ascending.
        head: proven counts of the output head, ascending; HEAD_ROWS is always one of them.
    """

    rows: int
    smaller: tuple[int, ...] = ()
    head: tuple[int, ...] = (HEAD_ROWS,)

    @property
    def ladder(self) -> tuple[int, ...]:
        """Every row count a forward may have, ascending; the last is M."""
        return (*self.smaller, self.rows)

    def fit(self, used: int) -> int:
        """The smallest count of the ladder that holds `used` rows; 0 <= used <= M."""
        return fit(self.ladder, used)

    def describe(self) -> str:
        """One canonical line, for the fingerprint: "4+16+64; head 4+16"."""
        return f"{'+'.join(map(str, self.ladder))}; head {'+'.join(map(str, self.head))}"


def fit(ladder: Sequence[int], used: int) -> int:
    """The smallest of ascending counts that is at least `used`, which is at most the last."""
    at = bisect_left(ladder, used)
    if at == len(ladder):
        raise ValueError(f"{used} rows do not fit into any of {tuple(ladder)}")
    return ladder[at]


HEAD_COUNTS = (1, 4, 16, 64)  # of the head: a decode step needs few, a score all rows


def counts_below(rows: int) -> tuple[int, ...]:
    """Row counts that are tried beside `rows`: powers of two."""
    return tuple(1 << power for power in range(12) if 1 << power < rows)


def spread(proven: Sequence[int], rows: int, apart: int = 4) -> tuple[int, ...]:
    """A few of the ascending counts below `rows`, so that padding costs little everywhere.

    The smallest, then each at least `apart` times the one before, and half of `rows`: most forwards
    of a prompt's end are about as large.
    """
    chosen: list[int] = []
    for count in proven:
        if not chosen or count >= apart * chosen[-1] or count == rows // 2:
            chosen.append(count)
    return tuple(chosen)
