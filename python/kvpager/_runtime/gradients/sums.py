"""Gradients of parameters, summed over many forwards of few rows.

A gradient of a weight is a product as large as the weight. Made for each forward of M rows, these
products would take longer than all others together. So the linear layers and embeddings of a
backward pass leave their rows here, where a product is made of many rows at once, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as transformers calls it
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from kvpager._model.seam.linear import LinearLayers, StandIn, computing

_ROWS = 256  # that wait for a product
_PLAIN = (Tensor, torch.nn.Parameter)


class _Rows(NamedTuple):
    """Rows that wait for a product: x [r, k], gradients [r, n], and each row's expert."""

    x: Tensor
    gradients: Tensor
    chosen: Tensor | None


class Sums:
    """Sums of gradients, by parameter; in float32 for 16-bit parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._sums: dict[int, Tensor] = {}
        self._waiting: dict[int, list[_Rows]] = {}
        self._rows: dict[int, int] = {}

    def takes(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight is summed here."""
        return id(weight) in self._parameters and type(weight) in _PLAIN

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds a gradient of the parameter's shape."""
        self._sum(id(parameter)).add_(gradient)

    def add_rows(self, weight: int, index: Tensor, gradients: Tensor) -> None:
        """Adds gradients [n, ...] to rows `index` [n] of a parameter, named by its id."""
        total = self._sum(weight)
        total.index_add_(0, index, gradients.to(total.dtype))

    def add_product(
        self, weight: int, x: Tensor, gradients: Tensor, chosen: Tensor | None = None
    ) -> None:
        """Adds gradients [r, n] transposed times x [r, k] to a parameter [n, k], by its id.

        chosen: [r], the matrix of each row, of a parameter [matrices, n, k].
        """
        waiting = self._waiting.setdefault(weight, [])
        waiting.append(_Rows(x, gradients, chosen))
        self._rows[weight] = self._rows.get(weight, 0) + len(x)
        if self._rows[weight] >= _ROWS:
            self._multiply(weight)

    def taken(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """The sums in the parameters' dtypes, None for those without a gradient; forgets them."""
        for weight in list(self._waiting):
            self._multiply(weight)
        sums = [self._sums.pop(id(parameter), None) for parameter in parameters]
        return [
            None if one is None else one.to(parameter.dtype)
            for one, parameter in zip(sums, parameters)
        ]

    def _sum(self, weight: int) -> Tensor:
        if weight not in self._sums:
            parameter = self._parameters[weight]
            self._sums[weight] = parameter.new_zeros(parameter.shape, dtype=_wide(parameter))
        return self._sums[weight]

    def _multiply(self, weight: int) -> None:
        waiting = self._waiting.pop(weight)
        del self._rows[weight]
        wide = _wide(self._parameters[weight])
        x = _joined([each.x for each in waiting]).to(wide)
        gradients = _joined([each.gradients for each in waiting]).to(wide)
        choices = [each.chosen for each in waiting if each.chosen is not None]
        if choices:
            total, chosen = self._sum(weight), _joined(choices)
            for matrix in _different(chosen):
                own = chosen == matrix
                total[matrix].addmm_(gradients[own].T, x[own])
        elif weight in self._sums:
            self._sums[weight].addmm_(gradients.T, x)
        else:
            self._sums[weight] = gradients.T @ x


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))


def _different(chosen: Tensor) -> list[int]:
    """The matrices that rows chose, ascending."""
    return [int(matrix) for matrix in np.unique(chosen.cpu().numpy())]


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _remember(ctx: Any, sums: Sums, weight: Tensor, *saved: Tensor) -> None:
    """Notes in a function's context what its backward pass needs of a product with a weight."""
    ctx.save_for_backward(*saved)
    ctx.sums, ctx.weight, ctx.summed = sums, id(weight), sums.takes(weight)


class _Product(torch.autograd.Function):
    """A product that was computed, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], sums: Sums, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        _remember(ctx, sums, weight, x, weight)
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            of_x = (rows @ weight).view(x.shape)
        if ctx.needs_input_grad[3]:
            x = x.reshape(-1, weight.shape[1])
            if ctx.summed:
                ctx.sums.add_product(ctx.weight, x, rows)
            else:
                of_weight = rows.T @ x
        if ctx.needs_input_grad[4]:
            of_bias = rows.sum(0, dtype=torch.float32).to(gradient.dtype)
        return None, None, of_x, of_weight, of_bias


class _ExpertProduct(torch.autograd.Function):
    """A product of experts that was computed, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        sums: Sums,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chosen: Tensor,
    ) -> Tensor:
        _remember(ctx, sums, weight, x, weight, chosen.reshape(-1))
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, weight, chosen = ctx.saved_tensors
        choices = len(chosen) // len(x)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            each = gradient.new_empty((len(chosen), weight.shape[2]))
            for matrix in _different(chosen):
                own = chosen == matrix
                each[own] = gradient[own] @ weight[matrix]
            of_x = each.view(len(x), choices, -1).sum(1)
        if ctx.needs_input_grad[3]:
            repeated = x.repeat_interleave(choices, 0)
            if ctx.summed:
                ctx.sums.add_product(ctx.weight, repeated, gradient, chosen)
            else:
                of_weight = torch.zeros_like(weight)
                for matrix in _different(chosen):
                    own = chosen == matrix
                    of_weight[matrix] = gradient[own].T @ repeated[own]
        if ctx.needs_input_grad[4]:
            of_bias = gradient.new_zeros((weight.shape[0], weight.shape[1]))
            of_bias.index_add_(0, chosen, gradient)
        return None, None, of_x, of_weight, of_bias, None


class _Embedding(torch.autograd.Function):
    """Rows of a table, whose gradients are summed."""

    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], sums: Sums, index: Tensor, weight: Tensor, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.sums, ctx.weight, ctx.padding = sums, id(weight), padding
        return made.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        index = ctx.saved_tensors[0].reshape(-1)
        rows = gradient.reshape(len(index), -1)
        if ctx.padding is not None:
            kept = index != ctx.padding
            index, rows = index[kept], rows[kept]
        ctx.sums.add_rows(ctx.weight, index, rows)
        return None, None, None, None, None


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in tensors
    )


class TrainedLayers(StandIn):
    """Stands in for the layers of an engine's forwards: the same products, with gradients."""

    def __init__(self, layers: LinearLayers, sums: Sums) -> None:
        super().__init__(layers)
        self._sums = sums

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor | None:
        """Computes what the layers it stands in for compute, and records it for gradients."""
        assert self._layers is not None
        with torch.no_grad():
            made = self._layers.product(x, weight, bias, chosen)
        if made is None or not _wants_gradient(x, weight, bias):
            return made
        if chosen is not None:
            return _apply(_ExpertProduct, [made], self._sums, x, weight, bias, chosen)
        return _apply(_Product, [made], self._sums, x, weight, bias)


@contextmanager
def summing(layers: LinearLayers | None, sums: Sums) -> Iterator[None]:
    """Has products of these layers, or of torch, sum the gradients of their weights there."""
    with computing(None if layers is None else TrainedLayers(layers, sums)), _Summing(sums):
        yield


class _Summing(TorchFunctionMode):
    """Has the gradients of torch's own linear layers and embeddings summed."""

    def __init__(self, sums: Sums) -> None:
        super().__init__()
        self._sums = sums

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(args, kwargs)
        return func(*args, **kwargs)

    def _linear(
        self,
        input: Tensor,  # noqa: A002  # as torch names it
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        if not self._sums.takes(weight) or not _wants_gradient(weight):
            return F.linear(input, weight, bias)
        with torch.no_grad():
            made = F.linear(input, weight, bias)
        return _apply(_Product, [made], self._sums, input, weight, bias)

    def _embedding(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        given = {**dict(zip((*names, "sparse"), args)), **kwargs}
        weight = given["weight"]
        plain = not any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        if not plain or not self._sums.takes(weight) or not _wants_gradient(weight):
            return F.embedding(*args, **kwargs)
        with torch.no_grad():
            made = F.embedding(*args, **kwargs)
        padding = given.get("padding_idx")
        if padding is not None:
            padding %= len(weight)
        return _apply(_Embedding, [made], self._sums, given["input"], weight, padding)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return made
