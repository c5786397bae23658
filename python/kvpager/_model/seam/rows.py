"""The row counts of an engine's forwards, and comparisons of rows by their raw bits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpager._model.seam.causal_lm import HEAD_ROWS


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


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, of x's shape."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and raw bits are the same; NaN equals NaN, -0 differs from +0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def line_bytes(tensor: torch.Tensor) -> int:
    """Libraries choose a kernel by an address modulo this: a cache line, or what cuBLAS asks."""
    return 64 if tensor.device.type == "cpu" else 256
