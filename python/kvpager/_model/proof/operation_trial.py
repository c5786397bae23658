"""One operation of a forward in forwards of different row counts: the same rows, to the bit?

Two recorded calls, one of a forward of M rows and one of another, tell which dimensions count rows:
those whose sizes differ. Every row is given the same content. Then all rows of both calls must come
out alike, wherever a row lies and whoever shares its vector, thread or tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvpager._model.proof.cancelling import Pairing
from kvpager._model.proof.operations import (
    BY_ROW,
    POINTWISE,
    PRODUCT,
    Operation,
    TensorSpec,
    rebuilt,
)
from kvpager._model.proof.rowwise import spoil
from kvpager._model.proof.telling import agree, draw, telling_numbers

Contents = list[torch.Tensor]  # one per tensor argument; of one element where rows are counted
Rows = list[torch.Tensor]
Dimensions = tuple[tuple[int, ...], ...]  # of each tensor those that count rows

_ELEMENTS = 1024  # about so many numbers of a row are tried in all
_LEAST, _MOST = 12, 64  # contents of a row


@dataclass(frozen=True)
class Pair:
    """A call in a forward of M rows and the same call in one of another count."""

    whole: Operation
    other: Operation

    def matches(self) -> bool:
        """Whether they do the same to tensors of as many dimensions."""
        mine, theirs = self.whole, self.other
        return (
            mine.op is theirs.op
            and mine.settings == theirs.settings
            and _dimensions(mine) == _dimensions(theirs)
        )

    @property
    def row_dimensions(self) -> Dimensions:
        """Of each tensor argument those that count rows."""
        return _differing(self.whole.tensors, self.other.tensors)

    @property
    def result_dimensions(self) -> Dimensions:
        """Of each result those that count rows."""
        return _differing(self.whole.results, self.other.results)

    @property
    def has_rows(self) -> bool:
        """Whether there are rows in its arguments, and in its results."""
        return any(self.row_dimensions) and any(self.result_dimensions)


class OperationTrial:
    """Tries one operation on rows, in the shapes of M and of other counts."""

    def __init__(
        self, whole: Operation, dims: Dimensions, result_dims: Dimensions, device: torch.device
    ) -> None:
        """`dims` count rows of its arguments, `result_dims` of its results; see Pair."""
        self._whole = whole
        self._device = device
        self._dims = dims
        self._result_dims = result_dims
        self._contents = [*self._made_up(whole)]
        self._reference: list[Rows] | None = None
        self._answers: dict[Operation, bool] = {}

    def same_rows(self, operation: Operation) -> bool:
        """Whether all rows are those of a forward of M, and are not changed by others."""
        for asked in (self._whole, operation):
            if asked not in self._answers:
                self._answers[asked] = self._tried(asked)
        return self._answers[operation]

    def _tried(self, operation: Operation) -> bool:
        found = [self._rows(operation, content) for content in self._contents]
        if self._reference is None:
            self._reference = [[x for x, _ in rows] for rows in found]
        alike = [same for rows in found for _, same in rows]
        alike += [
            agree(mine, theirs).all()
            for before, rows in zip(self._reference, found)
            for mine, (theirs, _) in zip(before, rows)
        ]
        alike += self._beside_others(operation)
        return bool(torch.stack(alike).all())

    def _rows(
        self, operation: Operation, content: Contents
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A row of each result, and whether all others are the same."""
        found = []
        for made, dims in zip(self._called(operation, content), self._result_dims):
            if dims:
                row = _first(made, dims)
                found.append((row, agree(made, row).all()))
        return found

    def _beside_others(self, operation: Operation) -> list[torch.Tensor]:
        """Whether rows keep their bits where every other one holds infinities and the like."""
        sizes = {
            spec.shape[dim]
            for specs, dims in (
                (operation.tensors, self._dims),
                (operation.results, self._result_dims),
            )
            for spec, of in zip(specs, dims)
            for dim in of
        }
        single = all(len(of) <= 1 for of in (*self._dims, *self._result_dims))
        if len(sizes) != 1 or not single or sizes == {1}:
            return []
        alike = []
        for parity in (0, 1):
            content = self._contents[0]
            made = self._called(operation, content, spoilt=parity)
            for x, dims, mine in zip(made, self._result_dims, self._plain(0)):
                if dims:
                    kept = x.movedim(dims[0], 0)[1 - parity :: 2]
                    alike.append(agree(kept, mine.movedim(dims[0], 0)).all())
        return alike

    def _plain(self, index: int) -> Iterator[torch.Tensor]:
        """A row of each result of the first call; nothing for those without rows."""
        rows = iter(self._reference[index] if self._reference else ())
        for dims in self._result_dims:
            yield next(rows) if dims else torch.empty(0, device=self._device)

    def _called(
        self, operation: Operation, content: Contents, spoilt: int | None = None
    ) -> list[torch.Tensor]:
        made = []
        for spec, dims, x in zip(operation.tensors, self._dims, content):
            tensor = laid_out(spec, x, self._device)
            if spoilt is not None and dims and tensor.is_floating_point() and all(spec.stride):
                spoil(tensor.movedim(dims[0], 0)[spoilt::2])
            made.append(tensor)
        args, named = rebuilt((operation.arguments, operation.named), iter(made))
        out = operation.op(*args, **dict(named))
        return [*out] if isinstance(out, (tuple, list)) else [out]

    def _made_up(self, operation: Operation) -> Iterator[Contents]:
        shapes = [
            tuple(1 if at in dims or spec.stride[at] == 0 else n for at, n in enumerate(spec.shape))
            for spec, dims in zip(operation.tensors, self._dims)
        ]
        generator = torch.Generator("cpu").manual_seed(7)
        if operation.kind == POINTWISE:
            numbers = telling_numbers(operation, self._device)
            many = max((len(x) for x in numbers if x.ndim), default=0)
            for at in range(many):
                yield [
                    (x if x.ndim == 0 else x[at]).expand(shape) for x, shape in zip(numbers, shapes)
                ]
        width = max(torch.Size(shape).numel() for shape in shapes)
        if operation.kind == PRODUCT:
            yield [x.to(self._device) for x in _product(operation, shapes, generator)]
            return
        plain = operation.kind == POINTWISE or not any(
            spec.dtype.is_floating_point for spec in operation.tensors
        )
        trials = 2 if plain else min(max(_ELEMENTS // width, _LEAST), _MOST)
        for trial in range(trials):
            yield [
                _content(shape, spec.dtype, generator, opposite=bool(trial % 2)).to(self._device)
                if operation.kind == BY_ROW
                else draw(shape, spec.dtype, generator).to(self._device)
                for shape, spec in zip(shapes, operation.tensors)
            ]


def laid_out(spec: TensorSpec, content: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that lies in memory as a recorded one did and holds this, repeated along rows."""
    extent = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride)) + 1
    start = spec.offset // spec.dtype.itemsize
    buffer = torch.zeros(extent + start, dtype=spec.dtype, device=device)
    once = tuple(1 if step == 0 else n for n, step in zip(spec.shape, spec.stride))
    buffer.as_strided(once, spec.stride, start).copy_(content.expand(once))
    return buffer.as_strided(spec.shape, spec.stride, start)


def _content(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, opposite: bool
) -> torch.Tensor:
    """Numbers of a row; every other time those whose sum is zero, but for rounding."""
    if not dtype.is_floating_point or not opposite or not shape:
        return draw(shape, dtype, generator)
    size = torch.Size(shape)
    if shape[-1] > 1:
        pairs = Pairing.draw(shape[-1], generator)
        return pairs.opposite(size.numel() // shape[-1], generator).view(size).to(dtype)
    pairs = Pairing.draw(size.numel(), generator)
    return pairs.opposite(1, generator).view(size).to(dtype)


def _product(
    operation: Operation, shapes: list[tuple[int, ...]], generator: torch.Generator
) -> Contents:
    """Factors whose products are zero but for rounding; small numbers to add to them."""
    *added, first, second = shapes
    dtypes = [spec.dtype for spec in operation.tensors]
    summed = first[-1]
    if summed == 1:  # nothing is added up
        return [draw(shape, dtype, generator) for shape, dtype in zip(shapes, dtypes)]
    pairs = Pairing.draw(summed, generator)
    a = pairs.equal(torch.Size(first).numel() // summed, generator).view(first)
    if len(second) == 1:
        b = pairs.opposite(1, generator)[0]
    else:
        outputs = torch.Size(second).numel() // summed
        b = pairs.opposite(outputs, generator).view(*second[:-2], second[-1], summed)
        b = b.transpose(-1, -2)
    small = [draw(shape, torch.float32, generator) * 2**-18 for shape in added]
    return [x.to(dtype) for x, dtype in zip([*small, a, b], dtypes)]


def _first(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in dims:
        x = x.narrow(dim, 0, 1)
    return x


def _dimensions(operation: Operation) -> tuple[int, ...]:
    return tuple(len(spec.shape) for spec in (*operation.tensors, *operation.results))


def _differing(mine: tuple[TensorSpec, ...], theirs: tuple[TensorSpec, ...]) -> Dimensions:
    return tuple(
        tuple(at for at, (a, b) in enumerate(zip(x.shape, y.shape)) if a != b)
        for x, y in zip(mine, theirs)
    )


@lru_cache(maxsize=1024)
def trial_of(
    whole: Operation,
    dims: Dimensions,
    result_dims: Dimensions,
    device: torch.device,
    settings: tuple[Any, ...],
) -> OperationTrial:
    """The trial of an operation under some settings of torch; what it found holds for them."""
    del settings
    return OperationTrial(whole, dims, result_dims, device)
