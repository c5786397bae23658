"""Whether a function of many rows is the same function of each: by experiment, in raw bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only

from kvpager._model.seam.functions import stand_in
from kvpager._model.seam.observe import Call, tensors_in
from kvpager._model.seam.rows import as_bits

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
    """Computes rows of samples in blocks of `base` rows, and tries what changes their bits.

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
            _keeps_bits(sample, table, self._place, spoilt=not sample.constant)
            for sample, table in self._tried
        )

    def row_dependent(self) -> bool:
        """Whether a row has other bits at another index of a block of `base` rows."""
        return not all(_keeps_bits(sample, table, self._place) for sample, table in self._tried)

    def neighbour_dependent(self) -> bool:
        """Whether zeros, NaN and infinities in other rows of a block of `base` change a row."""
        last = self._range(self._rows - self._base, self._rows)
        return not all(
            _keeps_bits(sample, table, last, spoilt=True) for sample, table in self._tried
        )

    def differs(self, count: int) -> bool:
        """Whether rows have other bits in blocks of `count` than in blocks of `base`.

        They have other indices there, and in the last block zeros, NaN and infinities beside them.
        """
        for sample, table in self._tried:
            starts = self._starts(sample, count)
            for start in starts:
                rows = self._range(start, start + count)
                spoilt = start == starts[-1] and not sample.constant
                if not _keeps_bits(sample, table, rows, spoilt=spoilt):
                    return True
        return False

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


def _keeps_bits(sample: Sample, table: _Table, rows: torch.Tensor, *, spoilt: bool = False) -> bool:
    """Whether a block of these rows has the table's bits.

    spoilt: every other row is overwritten, but never the last, and the others are compared.
    """
    block = sample.block(rows)
    kept = torch.ones_like(rows, dtype=torch.bool)
    if spoilt:
        kept[len(rows) % 2 :: 2] = False
        for x in block:
            spoil(x[len(rows) % 2 :: 2])
    found = sample.bits(block)
    before = [x[rows[kept]] for x in table.outputs]
    return table.sound and _equal(before, [x[kept] for x in found])


def spoil(rows: torch.Tensor) -> None:
    """Overwrites rows with what padding, overflow and broken sequences leave behind."""
    if not rows.is_floating_point():
        rows.zero_()
        return
    values = (0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(rows.dtype).max)
    for at, value in enumerate(values[: len(rows)]):
        rows[at :: len(values)].fill_(value)


def _agree(a: _Table, b: _Table) -> bool:
    common = a.filled & b.filled
    return (
        a.sound
        and b.sound
        and _equal([x[common] for x in a.outputs], [x[common] for x in b.outputs])
    )


def _equal(a: Rows, b: Rows) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Replay:
    """Calls a module as it was called, with other rows, more or fewer of them, or other weights.

    Attributes:
        module: the module.
        names: of all modules it stands for.
        inputs: what it was given, by row: each [M, ...].
        outputs: what it makes of it, likewise. Tensors that have no dimension of M elements do not
            belong to rows: arguments are passed on as they are, results are left out.
    """

    def __init__(self, call: Call, rows: int) -> None:
        self._call = call
        self._rows = rows
        given = tensors_in((call.args, call.kwargs))
        self._in_dims = [_row_dimension(x, rows) for x in given]
        self._out_dims: list[int | None] | None = None
        self.module = call.module
        self.names = tuple(call.names)
        self.inputs = [x.movedim(dim, 0) for x, dim in zip(given, self._in_dims) if dim is not None]
        self.outputs = self(self.inputs)

    def __call__(self, rows: Rows, weights: dict[str, torch.Tensor] | None = None) -> Rows:
        """What the module makes of some rows, each [m, ...]; optionally with other weights."""
        fresh = iter(rows)
        replaced = iter(
            [
                x if dim is None else _laid_out(next(fresh).movedim(0, dim), x)
                for x, dim in zip(tensors_in((self._call.args, self._call.kwargs)), self._in_dims)
            ]
        )
        given = (self._call.args, self._call.kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda _: next(replaced), given)
        module = self.module if weights is None else _with_weights(self.module, weights)
        made = tensors_in(module(*args, **kwargs))
        if self._out_dims is None:
            self._out_dims = [_row_dimension(x, self._rows) for x in made]
        return [x.movedim(dim, 0) for x, dim in zip(made, self._out_dims) if dim is not None]


def _with_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A copy that shares all but these weights; the module itself may be running elsewhere."""
    other = copy.copy(module)
    other.__dict__["_parameters"] = {**vars(module)["_parameters"], **weights}
    stand_in(other, module)
    return other


def _laid_out(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A copy of x whose dimensions lie in memory as those of `given` do.

    Down to the strides of dimensions of one element: libraries choose by them too.
    """
    strides = given.stride()
    order = sorted(range(given.ndim), key=lambda dim: -strides[dim])
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _row_dimension(x: torch.Tensor, rows: int) -> int | None:
    """Which dimension counts rows: [1, M, ...], [M, ...] or [1, heads, M, ...]."""
    order = (1, 0, 2) if x.ndim > 1 and x.shape[0] == 1 else (0, 1, 2)
    return next((dim for dim in order if dim < x.ndim and x.shape[dim] == rows), None)
