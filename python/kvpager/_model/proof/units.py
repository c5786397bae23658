"""The parts of a model that rows pass through one after another, each to be tried alone.

A part is a module without children, the experts of a layer, or the output head; modules that a
library cannot tell apart by shape count once. Attention is not among them: it is kvpager's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from kvpager._model.proof.cancelling import cancelling_product, cancelling_rows
from kvpager._model.proof.experts import affordable_rows, expert_samples, random_experts
from kvpager._model.proof.rowwise import Replay, RowwiseProbe, Sample
from kvpager._model.seam.causal_lm import HEAD_ROWS, Head
from kvpager._model.seam.expert_products import multiplies
from kvpager._model.seam.linear import takes
from kvpager._model.seam.observe import Call, Observation, tensors_in
from kvpager._model.weights.held import is_plain, is_quantised
from kvpager._model.weights.supported import has_expert_weights
from kvpager.errors import UnsupportedModelError

_ACTIVATION_TRIALS = 8
_QUANTISED_TRIALS = 4  # a count of one row is tried with three rows of each
_NOTHING = (torch.nn.Dropout, torch.nn.Identity)
_PLAIN_PRODUCTS = (torch.nn.Linear, Conv1D)  # their content adds nothing to a product that cancels


@dataclass(frozen=True)
class Unit:
    """One part.

    Attributes:
        kind: class name of its module.
        modules: names of the modules it stands for.
        in_features, out_features: elements of a row that go in and come out.
        dtype: of its weights, or of what goes in.
        base: the row count that others are compared with.
        samples: makes what to try, of a given number of rows.
        gathers: it gathers matrices for every row, so that many rows take much memory.
        quantised: its weights are.
    """

    kind: str
    modules: tuple[str, ...]
    in_features: int
    out_features: int
    dtype: torch.dtype
    base: int
    samples: Callable[[int], list[Sample]]
    gathers: bool = False
    quantised: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{self.in_features} -> {self.out_features}"
        return f"{self.modules[0]} ({self.kind} {shape}, {dtype})"


def units_of(seen: Observation) -> list[Unit]:
    """Every part whose arguments and results have a dimension of rows, smallest first."""
    units: list[Unit] = []
    for call in seen.calls:
        replay = Replay(call, seen.rows)
        if has_expert_weights(call.module):
            own = multiplies(call.module, *call.args, **call.kwargs)
            units += _expert_units(replay, seen.rows, own_products=own)
        elif takes(call.module, *call.args, **call.kwargs):
            continue  # all row counts have the same bits, by the order of its operations
        elif replay.inputs and replay.outputs and not isinstance(call.module, _NOTHING):
            units.append(_unit(replay, seen.rows, partial(_samples, replay)))
    units.sort(key=lambda unit: unit.in_features * unit.out_features)
    return units


def head_unit(model: Any, seen: Observation) -> Unit:
    """The output head, with what the architecture does to its logits. Its base is HEAD_ROWS."""
    module = model.get_output_embeddings()
    name = next(name for name, other in model.named_modules() if other is module)
    replay = Replay(Call(module, (seen.hidden[None],), {}, [name]), seen.rows)
    finish = Head(model).finish
    taken = takes(module, seen.hidden[None].to(module.weight.dtype))

    def samples(rows: int) -> list[Sample]:
        products = [] if taken else _products(replay, rows)
        if not products and is_quantised(module):
            products = _samples(replay, rows)
        products = [replace(sample, dear=True) for sample in products]
        if finish is None:
            return products
        generator = torch.Generator("cpu").manual_seed(0)
        logits = _random_like(_as_many(replay.outputs[0], rows), generator)
        return [*products, Sample(lambda x: [finish(x[0])], [logits])]

    return _unit(replay, HEAD_ROWS, samples)


def tried_products(model: Any, seen: Observation) -> frozenset[int]:
    """Addresses of the weights whose products are tried with the part they belong to."""
    return frozenset(
        model.get_submodule(name).weight.data_ptr()
        for call in seen.calls
        if _multiplies(call.module, tensors_in((call.args, call.kwargs)))
        for name in call.names
    )


def _unit(replay: Replay, base: int, samples: Callable[[int], list[Sample]]) -> Unit:
    weights = [*replay.module.parameters(recurse=False)]
    return Unit(
        kind=type(replay.module).__name__,
        modules=replay.names,
        in_features=replay.inputs[0][0].numel(),
        out_features=replay.outputs[0][0].numel(),
        dtype=(weights or replay.inputs)[0].dtype,
        base=base,
        samples=samples,
        quantised=is_quantised(replay.module),
    )


def _expert_units(replay: Replay, rows: int, *, own_products: bool) -> list[Unit]:
    """A layer's experts in their own dtype, and in float32 if that is another.

    Of kvpager's own products only what is around them is tried: all row counts have the same bits
    of those, by the order of their operations.
    """
    floating = [x.is_floating_point() for x in replay.inputs]
    kind = type(replay.module).__name__
    if floating != [True, False, True]:
        raise UnsupportedModelError(
            f"{replay.names[0]} ({kind}) is not called with hidden states, experts' indices and "
            "their weights, so its rows could not be shown to be independent; use an architecture "
            'of transformers whose experts run with "batched_mm"'
        )
    own = next(replay.module.parameters(recurse=False)).dtype
    if own_products:
        return [_unit(replay, rows, partial(random_experts, replay, dtype=own))]
    unit = _unit(replay, rows, partial(expert_samples, replay, dtype=own))
    unit = replace(unit, gathers=True)
    if own == torch.float32:
        return [unit]
    wide = min(rows, affordable_rows(replay, torch.float32))
    samples = partial(expert_samples, replay, dtype=torch.float32)
    return [unit, replace(unit, dtype=torch.float32, base=wide, samples=samples)]


def _samples(replay: Replay, rows: int) -> list[Sample]:
    """Samples for a module: a product that cancels, random rows, and what it was given."""
    given = [_as_many(x, rows) for x in replay.inputs]
    samples = _products(replay, rows)
    if samples and type(replay.module) in _PLAIN_PRODUCTS:
        return samples
    samples.append(Sample(replay, given))
    if not any(x.is_floating_point() for x in given):
        return samples
    generator = torch.Generator("cpu").manual_seed(0)
    if is_quantised(replay.module):
        for _ in range(_QUANTISED_TRIALS):
            drawn = [_random_like(x, generator) for x in given]
            if len(drawn) == 1:
                drawn = [cancelling_rows(lambda x: replay([x])[0], drawn[0], generator)]
            samples.append(Sample(replay, drawn))
        return samples
    has_weights = any(True for _ in replay.module.parameters())
    if has_weights or len(given) > 1:
        samples.append(Sample(replay, [_random_like(x, generator) for x in given]))
    else:
        for _ in range(_ACTIVATION_TRIALS):
            row = _random_like(given[0][:1], generator)
            samples.append(Sample(replay, [row.expand_as(given[0])], constant=True))
    return samples


def _products(replay: Replay, rows: int) -> list[Sample]:
    """A product that cancels, if a module multiplies its only argument by a matrix."""
    if not _multiplies(replay.module, replay.inputs):
        return []
    weight: Any = replay.module.weight
    bias: Any = getattr(replay.module, "bias", None)
    summed = _summed(replay.module)
    given = replay.inputs[0]
    generator = torch.Generator("cpu").manual_seed(0)
    vectors = rows * given[0].numel() // given.shape[-1]
    made, inputs = cancelling_product(weight, vectors, generator, summed=summed)
    weights = {"weight": made}
    if bias is not None:  # as small as what is left of the products
        drawn = torch.randn(bias.shape, generator=generator, device="cpu") * 2**-18
        weights["bias"] = drawn.to(bias.dtype).to(bias.device)
    return [Sample(partial(replay, weights=weights), [inputs.view(rows, *given.shape[1:])])]


def _multiplies(module: Any, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a module is a product of its only argument and its weight, as far as shapes tell."""
    weight = getattr(module, "weight", None)
    if len(inputs) != 1 or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return False
    if not is_plain(weight) or is_quantised(module):
        return False
    return inputs[0].dtype == weight.dtype and inputs[0].shape[-1] == weight.shape[_summed(module)]


def _summed(module: Any) -> int:
    """The dimension of a weight that a product adds up over."""
    return 0 if isinstance(module, Conv1D) else 1


def _as_many(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Some rows, repeated or cut to a number of them."""
    return x[torch.arange(rows, device=x.device) % len(x)]


def _random_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values where x has real ones; integers as they are."""
    if not x.is_floating_point():
        return x
    drawn = torch.randn(x.shape, generator=generator, device="cpu") * 4
    return drawn.to(x.dtype).to(x.device)


class Part:
    """A unit of a model. What it is tried on is made anew for each question, and not kept."""

    def __init__(self, model: Any, unit: Unit, rows: int) -> None:
        """`rows`: how many are tried in all, at least the unit's base."""
        self._model = model
        self._unit = unit
        self._rows = rows
        self._checked = False

    def differing(self, counts: Sequence[int]) -> dict[int, str]:
        """Of some row counts those that give other bits than the base, each with what differs.

        Raises:
            UnsupportedModelError: rows of the base depend on their index or on one another.
        """
        tried = [count for count in counts if count <= self._rows]
        if self._checked and not tried:
            return {}
        samples = self._unit.samples(self._rows)
        if not samples:  # nothing of it is torch's
            self._checked = True
            return {}
        probe = RowwiseProbe(samples, self._unit.base)
        if not self._checked:
            self._require_independent_rows(probe)
            self._checked = True
        return {count: what for count in tried if (what := self._difference(probe, count))}

    def _difference(self, probe: RowwiseProbe, count: int) -> str | None:
        try:
            if probe.differs(count):
                return str(self._unit)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"{self._unit}, which fails with it ({error})"
        return None

    def _require_independent_rows(self, probe: RowwiseProbe) -> None:
        if probe.independent():
            return
        base = self._unit.base
        if probe.neighbour_dependent():
            what = "what other rows of the forward hold"
            remedy = "use an architecture or implementation that computes each row alone"
            if self._unit.quantised:
                what += " (a scale of activations over several rows, or columns chosen by them)"
                remedy = "quantise weights alone, or activations by a scale of each token"
        else:
            what = "its index in the forward"
            remedy = "set rows to a multiple of 64, or use one torch thread or another dtype"
        raise UnsupportedModelError(
            f"{type(self._model).__name__}: the bits of a row depend on {what} in {self._unit}, "
            f"with {base} rows and {torch.get_num_threads()} threads, so no saved K/V could be "
            f"trusted; {remedy}"
        )
