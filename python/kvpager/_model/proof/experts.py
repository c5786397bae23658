"""Experts: matrices chosen row by row, where rows that choose the same one may meet in a product.

In bfloat16 a few rows with random weights may agree by luck with what they are among other rows, so
nothing is concluded from that: one layer is tried in float32, and in its own dtype with weights
that leave nothing but rounding errors. Only the matrices of a few experts are made up, so that rows
meet in each, and no layer is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvpager._model.proof.cancelling import Pairing
from kvpager._model.proof.rowwise import Replay, Rows, Sample

_FEW = 8
_SCALE = 32.0  # keeps the products of rounding errors among float16's normal numbers
_MOST_BYTES = 1 << 30  # of matrices gathered for the rows of one product

Weights = dict[str, torch.Tensor]


def affordable_rows(call: Replay, dtype: torch.dtype) -> int:
    """Rows whose experts' matrices can be gathered in `dtype` without much memory."""
    chosen = call.inputs[1].shape[-1]
    largest = max(weight[0].numel() for weight in _own(call).values())
    return max(16, _MOST_BYTES // (chosen * largest * dtype.itemsize))


def expert_samples(call: Replay, rows: int, dtype: torch.dtype) -> list[Sample]:
    """Samples to try a layer's experts on, in `dtype`.

    In float32 random weights, which show any other order; in the layer's own dtype sums that
    cancel, of one product at a time. The layer was called with hidden states [M, H], indices of
    experts [M, k] and their weights [M, k], in this order.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    trials = [_random(call, rows, _experts_of(call), generator)]
    if dtype == call.inputs[0].dtype:
        trials += _cancelling(call, *trials[0], generator)
    if dtype != torch.float32:
        trials = trials[1:] or trials
    return [_sample(call, weights, hidden, dtype, generator) for weights, hidden in trials]


def random_experts(call: Replay, rows: int, dtype: torch.dtype) -> list[Sample]:
    """The same with random weights alone."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = _random(call, rows, _experts_of(call), generator)
    return [_sample(call, *drawn, dtype, generator)]


def _experts_of(call: Replay) -> int:
    """How many experts a trial has."""
    chosen = call.inputs[1].shape[-1]
    return min(max(_FEW, chosen), max(len(weight) for weight in _own(call).values()))


def _sample(
    call: Replay,
    weights: Weights,
    hidden: torch.Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Sample:
    rows, chosen, device = len(hidden), call.inputs[1].shape[-1], call.inputs[0].device
    converted = {name: weight.to(dtype).to(device) for name, weight in weights.items()}
    drawn = torch.rand(rows, _experts_of(call), generator=generator, device="cpu")
    index = drawn.argsort(dim=1)[:, :chosen]
    share = torch.rand(rows, chosen, generator=generator, device="cpu").softmax(dim=1)
    inputs = [
        hidden.to(dtype).to(device),
        index.to(call.inputs[1].dtype).to(device),
        share.to(_share_dtype(call, dtype)).to(device),
    ]
    return Sample(_with(call, converted), inputs)


def _random(
    call: Replay, rows: int, experts: int, generator: torch.Generator
) -> tuple[Weights, torch.Tensor]:
    """Weights and hidden states, in float32."""
    features = call.inputs[0].shape[-1]
    weights = {
        name: torch.randn(experts, *weight.shape[1:], generator=generator, device="cpu")
        * features**-0.5
        for name, weight in _own(call).items()
    }
    return weights, torch.randn(rows, features, generator=generator, device="cpu")


def _cancelling(
    call: Replay, random: Weights, hidden: torch.Tensor, generator: torch.Generator
) -> Iterator[tuple[Weights, torch.Tensor]]:
    """Weights and hidden states, in float32, with which one of the two products cancels."""
    up = next((name for name in ("gate_up_proj", "up_proj") if name in random), None)
    if up is None or "down_proj" not in random:
        return
    transposed = bool(getattr(call.module, "is_transposed", False))
    unbiased = random | {
        name: torch.zeros_like(weight) for name, weight in random.items() if name.endswith("bias")
    }
    rows, features = hidden.shape
    pairs = Pairing.draw(features, generator)
    first = _SCALE * _opposite(random[up], pairs, transposed, generator)
    yield unbiased | {up: first}, _SCALE * pairs.equal(rows, generator)
    pairs = Pairing.draw(random["down_proj"].shape[1 if transposed else 2], generator)
    second = _opposite(random["down_proj"], pairs, transposed, generator)
    yield unbiased | {up: _twinned(random[up], pairs, call.module), "down_proj": second}, hidden


def _opposite(
    weight: torch.Tensor, pairs: Pairing, transposed: bool, generator: torch.Generator
) -> torch.Tensor:
    """A weight [experts, out, in], or transposed, whose sums cancel for inputs equal in pairs."""
    by_output = weight.transpose(1, 2) if transposed else weight
    experts, outputs = by_output.shape[:2]
    values = pairs.opposite(experts * outputs, generator).view(experts, outputs, -1)
    return values.transpose(1, 2).contiguous() if transposed else values


def _twinned(weight: torch.Tensor, pairs: Pairing, module: Any) -> torch.Tensor:
    """The first product's weight, changed so that what it gives the second is equal in pairs."""
    twinned = weight.clone()
    by_output = twinned.transpose(1, 2) if getattr(module, "is_transposed", False) else twinned
    gates = by_output.shape[1] // pairs.features  # 2: a gate and a value per element; 1: no gate
    for part in range(gates):
        if getattr(module, "is_concatenated", True):
            first, second = (at + part * pairs.features for at in (pairs.first, pairs.second))
        else:
            first, second = (at * gates + part for at in (pairs.first, pairs.second))
        by_output[:, second] = by_output[:, first]
    return twinned


def _own(call: Replay) -> Weights:
    return dict(call.module.named_parameters(recurse=False))


def _share_dtype(call: Replay, dtype: torch.dtype) -> torch.dtype:
    """Experts' weights are in float32 or in the model's dtype."""
    return torch.float32 if call.inputs[2].dtype == torch.float32 else dtype


def _with(call: Replay, weights: Weights) -> Any:
    def evaluate(rows: Rows) -> Rows:
        return call(rows, weights)

    return evaluate
