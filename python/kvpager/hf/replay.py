"""A module's call as a function of rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from kvpager.hf.functions import stand_in
from kvpager.hf.observe import Call, tensors_in
from kvpager.hf.rowwise import Rows


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
        given = [*tensors_in((call.args, call.kwargs))]
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
        args, kwargs = _rebuilt((self._call.args, self._call.kwargs), replaced)
        module = self.module if weights is None else _with_weights(self.module, weights)
        made = [*tensors_in(module(*args, **kwargs))]
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


def _rebuilt(value: Any, replaced: Iterator[torch.Tensor]) -> Any:
    """`value` with its tensors exchanged, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return next(replaced)
    if isinstance(value, dict):
        return {key: _rebuilt(item, replaced) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(_rebuilt(x, replaced) for x in value)
    return value
