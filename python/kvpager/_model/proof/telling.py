"""Numbers that show by which of its code paths an element-wise function computed an element.

torch computes what fills whole vectors with one approximation, and the elements left over, at the
end of a tensor or of a thread's share, with another: of sigmoid in float32, one result in twenty
differs. A few numbers chosen at random may all agree. So a function is given all numbers of a
16-bit dtype, or many of float32, in each way that torch tells apart; those whose results differ are
what the model's own shapes are then tried on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvpager._model.proof.operations import Operation, rebuilt
from kvpager._model.proof.rowwise import spoil
from kvpager._model.seam.rows import as_bits

Numbers = list[torch.Tensor]  # one per tensor argument: [n], or a scalar's []

_MANY = 1 << 15  # numbers of one call: torch gives no more to one thread
_ODD = 15  # elements: less than a vector of any processor
_ODD_CALLS = 16
_KEPT = 2  # telling numbers of each way
# IEEE 754 defines every bit of their results, which leaves no choice to any path.
_DEFINED = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "sign", "floor", "ceil", "round"}
    | {"maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "eq", "ne", "lt", "le"}
    | {"gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"}
    | {"bitwise_not", "isnan", "isinf", "isfinite", "copy"}
)


def telling_numbers(operation: Operation, device: torch.device) -> Numbers:
    """Numbers [k] for each tensor of an element-wise operation; none where no path is telling.

    Raises:
        RuntimeError: the operation does not take tensors of one dimension.
    """
    # A product that is added to something need not be rounded: alpha, and complex numbers.
    fused = any(name == "alpha" for name, _ in operation.named)
    fused = fused or any(x.dtype.is_complex for x in (*operation.tensors, *operation.results))
    if operation.name in _DEFINED and not fused:
        return []
    generator = torch.Generator("cpu").manual_seed(5)
    kept: list[Numbers] = []
    for numbers in _drawn(operation, generator, device):
        plain = _results(operation, numbers)
        kept += [_chosen(numbers, plain, others) for others in _other_ways(operation, numbers)]
    found = [_joined(xs) for xs in zip(*kept)]
    return found if any(x.ndim and len(x) for x in found) else []


def draw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers of ordinary size, and of every power of two; small integers; True."""
    if dtype.is_complex:
        return torch.complex(*(draw(shape, dtype.to_real(), generator) for _ in range(2)))
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device="cpu")
    if not dtype.is_floating_point:
        return torch.randint(1, 8, tuple(shape), generator=generator, device="cpu").to(dtype)
    drawn = torch.randn(tuple(shape), generator=generator, device="cpu")
    powers = torch.randint(-12, 12, tuple(shape), generator=generator, device="cpu")
    wide = torch.rand(tuple(shape), generator=generator, device="cpu") < 0.25
    return (drawn * torch.where(wide, powers.float().exp2(), 4.0)).to(dtype)


def agree(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether elements have the same bits, or are both NaN, of any sign and payload."""
    same = as_bits(a) == as_bits(b)
    return same | (a.isnan() & b.isnan())


def _drawn(
    operation: Operation, generator: torch.Generator, device: torch.device
) -> Iterator[Numbers]:
    """Many numbers per tensor: all there are of one 16-bit tensor, in random order."""
    specs = operation.tensors
    varied = [spec for spec in specs if spec.shape]
    if len(varied) == 1 and varied[0].dtype in (torch.bfloat16, torch.float16):
        order = torch.randperm(1 << 16, generator=generator, device="cpu") - (1 << 15)
        everything = order.to(torch.int16).view(varied[0].dtype)
        for half in (everything[:_MANY], everything[_MANY:]):
            yield [
                half.to(device) if x.shape else draw((), x.dtype, generator).to(device)
                for x in specs
            ]
    else:
        yield [draw((_MANY,) if x.shape else (), x.dtype, generator).to(device) for x in specs]


def _results(operation: Operation, numbers: Numbers) -> torch.Tensor:
    """Results of the operation on copies of these, which it may write to."""
    fresh = iter([_copied(x) for x in numbers])
    args, named = rebuilt((operation.arguments, operation.named), fresh)
    made: torch.Tensor = operation.op(*args, **dict(named))
    return made


def _other_ways(operation: Operation, numbers: Numbers) -> Iterator[torch.Tensor]:
    """The results where elements lie apart, in short pieces, elsewhere, and beside extremes."""
    plain = _results(operation, numbers)
    yield _results(operation, [x if x.ndim == 0 else _spaced(x) for x in numbers])
    whole = _MANY - _MANY % _ODD
    pieces = [x if x.ndim == 0 else _padded(x[:whole].view(-1, _ODD)) for x in numbers]
    yield torch.cat([_results(operation, pieces).reshape(-1), plain[whole:]])
    short = [
        _results(operation, [x if x.ndim == 0 else x[at : at + _ODD] for x in numbers])
        for at in range(0, _ODD * _ODD_CALLS, _ODD)
    ]
    yield torch.cat([*short, plain[_ODD * _ODD_CALLS :]])
    yield _results(operation, [x.roll(5) if x.ndim else x for x in numbers]).roll(-5)
    for parity in (0, 1):
        beside = [x.clone() for x in numbers]
        for x in beside:
            if x.ndim and x.is_floating_point():
                spoil(x[parity::2])
        found = _results(operation, beside)
        found[parity::2] = plain[parity::2]
        yield found


def _spaced(x: torch.Tensor) -> torch.Tensor:
    """The same [n] with as much room between elements, so that no vector is loaded."""
    return x.new_zeros((*x.shape, 2))[..., 0].copy_(x)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """The same [n, few] with room behind every row, so that each is a tensor's end."""
    return x.new_zeros((len(x), x.shape[1] + 1))[:, :-1].copy_(x)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps included."""
    if x.is_contiguous():
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _chosen(numbers: Numbers, plain: torch.Tensor, others: torch.Tensor) -> Numbers:
    """Up to a few numbers with other results."""
    where = (~agree(plain, others)).nonzero()[:, 0]
    where = where[:: max(1, len(where) // _KEPT)][:_KEPT]
    return [x if x.ndim == 0 else x[where] for x in numbers]


def _joined(found: Sequence[torch.Tensor]) -> torch.Tensor:
    return found[0] if found[0].ndim == 0 else torch.cat(list(found))
