"""Whether a function of many rows is the same function of each: by experiment, in raw bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvpager.hf.bits import as_bits

Rows = list[torch.Tensor]  # tensors whose first dimension is the row


@dataclass(frozen=True)
class Sample:
    """A function of rows and rows to try it on.

    Attributes:
        evaluate: takes the inputs of some rows, each [m, ...], and returns what it makes of them,
            each [m, ...].
        inputs: of R rows, each [R, ...].
        constant: every row is the same, so that each place in a block is tried with it.
        dear: rows take so long that each count is tried on one block only.
    """

    evaluate: Callable[[Rows], Rows]
    inputs: Rows
    constant: bool = False
    dear: bool = False

    def block(self, rows: torch.Tensor) -> Rows:
        """A copy of the inputs of some rows."""
        return [x[rows] for x in self.inputs]

    def bits(self, block: Rows) -> Rows:
        """Raw bits of what the function makes of a block, which it may overwrite."""
        return [as_bits(x) for x in self.evaluate(block)]


@dataclass(frozen=True)
class _Table:
    """Bits of rows, in the blocks that they were computed in."""

    outputs: Rows  # each [R, ...]
    filled: torch.Tensor  # [R] bool
    sound: bool  # no row was computed twice with different bits


class RowwiseProbe:
    """What samples give for their rows in blocks of `base` rows, and what changes it.

    All samples have the same number of rows, at least `base`.
    """

    def __init__(self, samples: Sequence[Sample], base: int) -> None:
        self._rows = len(samples[0].inputs[0])
        self._base = base
        self._device = samples[0].inputs[0].device
        everywhere = [*range(0, self._rows - base, base), self._rows - base]
        self._tried = [(sample, self._table(sample, base, everywhere)) for sample in samples]
        generator = torch.Generator("cpu").manual_seed(1)
        self._place = torch.randperm(base, generator=generator, device="cpu").to(self._device)

    def independent(self) -> bool:
        """Whether a row keeps its bits at another index of a block of `base`, beside anything."""
        return all(
            _keeps_bits(
                sample, table, self._place, None if sample.constant else self._others(self._base)
            )
            for sample, table in self._tried
        )

    def row_dependent(self) -> bool:
        """Whether a row has other bits at another index of a block of `base` rows."""
        return not all(_keeps_bits(sample, table, self._place) for sample, table in self._tried)

    def neighbour_dependent(self) -> bool:
        """Whether zeros, NaN and infinities in other rows of a block of `base` change a row."""
        last = self._range(self._rows - self._base, self._rows)
        others = self._others(self._base)
        return not all(_keeps_bits(sample, table, last, others) for sample, table in self._tried)

    def differs(self, count: int) -> bool:
        """Whether rows have other bits in blocks of `count` than in blocks of `base`.

        They have other indices there, and in the last block zeros, NaN and infinities beside them.
        """
        return not all(
            _keeps_bits(sample, table, self._range(start, start + count), others)
            for sample, table in self._tried
            for start, others in self._blocks(sample, count)
        )

    def classes(self, counts: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The counts, grouped by equal bits of the rows that they have in common."""
        groups: list[tuple[list[int], list[_Table]]] = []
        for count in counts:
            tables = [
                self._table(sample, count, self._starts(sample, count)) for sample, _ in self._tried
            ]
            for members, first in groups:
                if all(map(_agree, tables, first)):
                    members.append(count)
                    break
            else:
                groups.append(([count], tables))
        return tuple(tuple(members) for members, _ in groups)

    def same_reference(self, other: RowwiseProbe) -> bool:
        """Whether another probe of the same samples found the same bits in blocks of `base`."""
        return all(
            _equal(mine.outputs, theirs.outputs)
            for (_, mine), (_, theirs) in zip(self._tried, other._tried)
        )

    def _blocks(self, sample: Sample, count: int) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Where blocks begin, and which of their rows to spoil."""
        *clean, last = self._starts(sample, count)
        for start in clean:
            yield start, None
        yield last, None if sample.constant else self._others(count)

    def _starts(self, sample: Sample, count: int) -> list[int]:
        """Blocks at the beginning, about the middle and at the end: any two counts share rows."""
        last = self._rows - count
        if sample.constant:
            return [0]
        return [last] if sample.dear else sorted({0, last // 2, last})

    def _table(self, sample: Sample, count: int, starts: Iterable[int]) -> _Table:
        outputs: Rows = []
        filled = torch.zeros(self._rows, dtype=torch.bool, device=self._device)
        sound = True
        for start in starts:
            found = sample.bits(sample.block(self._range(start, start + count)))
            if not outputs:
                outputs = [x.new_zeros((self._rows, *x.shape[1:])) for x in found]
            again = filled[start : start + count].clone()
            for table, x in zip(outputs, found):
                rows = table[start : start + count]
                sound = sound and torch.equal(rows[again], x[again])
                rows.copy_(x)
            filled[start : start + count] = True
        return _Table(outputs, filled, sound)

    def _range(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self._device)

    def _others(self, count: int) -> torch.Tensor:
        """Every other row of a block [count], but never the last: who else is in it."""
        return self._range(0, count) % 2 == count % 2


def _keeps_bits(
    sample: Sample, table: _Table, rows: torch.Tensor, spoilt: torch.Tensor | None = None
) -> bool:
    """Whether a block of these rows, some of them spoilt, has the table's bits in the others."""
    block = sample.block(rows)
    kept = torch.ones_like(rows, dtype=torch.bool) if spoilt is None else ~spoilt
    if spoilt is not None:
        for x in block:
            _spoil(x, spoilt)
    found = sample.bits(block)
    before = [x[rows[kept]] for x in table.outputs]
    return table.sound and _equal(before, [x[kept] for x in found])


def _spoil(rows: torch.Tensor, which: torch.Tensor) -> None:
    """Overwrites some rows with what padding, overflow and broken sequences leave behind."""
    if not rows.is_floating_point():
        rows[which] = 0
        return
    largest = torch.finfo(rows.dtype).max
    values = torch.tensor(
        [0.0, torch.nan, torch.inf, -torch.inf, largest], dtype=rows.dtype, device=rows.device
    )
    number = int(which.sum())
    fill = values[torch.arange(number, device=rows.device) % len(values)]
    rows[which] = fill.reshape(-1, *[1] * (rows.ndim - 1)).expand(number, *rows.shape[1:])


def _agree(a: _Table, b: _Table) -> bool:
    common = a.filled & b.filled
    return (
        a.sound
        and b.sound
        and _equal([x[common] for x in a.outputs], [x[common] for x in b.outputs])
    )


def _equal(a: Rows, b: Rows) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
