"""Matrix products whose exact result is zero: all that is left is the order of rounding.

A product of random matrices hides another order of summation in its final rounding: in bfloat16
one element in thousands shows it, and a small probe sees none. Here every product has a partner of
opposite sign at a random other place of the sum, so an output is nothing but the errors made on the
way, and nearly every element of another order of summation differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpager._model.seam.rows import line_bytes

_DRAWN = 64  # output features of a weight that are drawn; the others repeat them
_POWERS = 4  # pairs are scaled by 2**-4 .. 2**3, so that sums round at many places


@dataclass(frozen=True)
class Pairing:
    """Which two places of a sum belong together; of an odd number one is left out (and zero).

    Everything is drawn on the CPU, so that every device is tried with the same numbers.

    Attributes:
        first, second: [features // 2] int64 indices.
        features: terms of a sum.
    """

    first: torch.Tensor
    second: torch.Tensor
    features: int

    @classmethod
    def draw(cls, features: int, generator: torch.Generator) -> Pairing:
        """Random pairs of all places of a sum."""
        half = features // 2
        place = torch.randperm(features, generator=generator, device="cpu")
        return cls(place[:half], place[half : 2 * half], features)

    def equal(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Random values [rows, features] float32, the same at both places of a pair."""
        drawn = torch.randn(rows, len(self.first), generator=generator, device="cpu")
        return self._placed(drawn, drawn)

    def opposite(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Random values [rows, features] float32, of opposite sign at the places of a pair."""
        half = len(self.first)
        powers = torch.randint(-_POWERS, _POWERS, (half,), generator=generator, device="cpu")
        drawn = torch.randn(rows, half, generator=generator, device="cpu") * powers.exp2()
        return self._placed(drawn, -drawn)

    def _placed(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(len(first), self.features, device="cpu")
        values[:, self.first], values[:, self.second] = first, second
        return values


def cancelling_product(
    weight: torch.Tensor, rows: int, generator: torch.Generator, *, summed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight like `weight` and inputs [rows, in_features] whose exact product is zero.

    The weight has the shape, dtype, strides, alignment and device of `weight`, which library
    kernels choose by. `summed` is its dimension of in_features.
    """
    pairs = Pairing.draw(weight.shape[summed], generator)
    outputs = weight.shape[1 - summed]
    drawn = pairs.opposite(min(outputs, _DRAWN), generator).to(weight.dtype).to(weight.device)
    made = like(weight)
    by_output = made if summed == 1 else made.t()
    for start in range(0, outputs, _DRAWN):
        by_output[start : start + _DRAWN] = drawn[: outputs - start]
    return made, pairs.equal(rows, generator).to(weight.dtype).to(weight.device)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same shape, dtype, strides, device and place within a line."""
    line = line_bytes(tensor)
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) + 1
    buffer = torch.empty(
        extent + line // tensor.element_size(), dtype=tensor.dtype, device=tensor.device
    )
    start = (tensor.data_ptr() - buffer.data_ptr()) % line // tensor.element_size()
    return buffer.as_strided(tensor.shape, tensor.stride(), start)


_OUTPUTS = 32  # that are brought near zero, at most
_SPARE = 2  # free places per output, so that the equations are well conditioned
_ROUNDS = 3  # each leaves about a 200th in 16 bits


def cancelling_rows(
    layer: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Returns rows [R, ..., in] like `rows`, with some of the outputs [R, ..., out] near zero.

    A quantised layer cannot be given weights whose products cancel, so its rows are chosen instead.
    Some places of a row are left free. The layer's outputs for the rest and for each free place
    alone give equations, and the free places are set so that some outputs come near zero. That is
    repeated with other free places, whose numbers are smaller each time, until those outputs are
    nothing but the rounding errors of their sums.

    `layer` takes R rows at a time. What is no product of each row and a matrix, up to rounding,
    gets rows of no such kind, and keeps all other properties of being tried.
    """
    features = rows.shape[-1]
    if rows[0].numel() != features:
        return rows
    made = layer(rows)
    outputs = made.shape[-1]
    targets = min(features // (2 * _SPARE * _ROUNDS), outputs, _OUTPUTS)
    if not targets or made[0].numel() != outputs:
        return rows
    chosen = torch.randperm(outputs, generator=generator, device="cpu")[:targets].to(rows.device)
    places = torch.randperm(features, generator=generator, device="cpu").to(rows.device)
    free = places[: targets * _SPARE * _ROUNDS].view(_ROUNDS, -1)
    changed = rows.clone()
    changed[..., free.flatten()] = 0
    effect = _effect(layer, rows, free.flatten(), chosen).view(_ROUNDS, -1, targets)
    for at, solution in zip(free, torch.linalg.pinv(effect)):
        left = layer(changed)[..., chosen].double()
        changed[..., at] = (-left @ solution).to(rows.dtype)
    return changed if bool(changed.isfinite().all()) else rows


def _effect(
    layer: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    places: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """[places, chosen] float64: what one at each place alone adds to the chosen outputs."""
    nothing = torch.zeros_like(rows)
    before = layer(nothing)[:1, ..., chosen].double()
    found = []
    for start in range(0, len(places), len(rows)):
        block = places[start : start + len(rows)]
        ones = nothing.clone()
        ones[torch.arange(len(block), device=rows.device), ..., block] = 1
        found.append((layer(ones)[..., chosen].double() - before)[: len(block)])
    effects = torch.cat(found).flatten(1)
    return effects.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
