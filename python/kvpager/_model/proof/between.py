"""What a forward does between the parts of a model: every operation, in the shapes of each count.

Additions, gates, softmax, sorting: functions that no module calls its own. Which are called, and
with what, is recorded; each distinct one is tried alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvpager._model.proof.operation_trial import OperationTrial, Pair, trial_of
from kvpager._model.proof.operations import PRODUCT, UNKNOWN, Operation, recorded
from kvpager._model.proof.units import tried_products
from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import Head, decoder_of
from kvpager._model.seam.observe import Observation, Recorder, packed_inputs
from kvpager._model.weights import numerics
from kvpager._model.weights.held import is_quantised
from kvpager._model.weights.supported import has_expert_weights
from kvpager.errors import UnsupportedModelError

_log = logging.getLogger(__name__)


class Between:
    """The operations of a function of rows, asked which row counts give the bits of `base`."""

    def __init__(
        self, model: Any, run: Callable[[int], None], base: int, seen: Observation
    ) -> None:
        """`run` computes a number of rows, of any content."""
        self._name = type(model).__name__
        self._device = seen.hidden.device
        self._run = run
        self._base = base
        self._tried = tried_products(model, seen)
        self._parts = [
            module
            for module in model.modules()
            if is_quantised(module) and not any(module.children())
        ]
        self._experts = {
            tuple(sorted(weight.shape[1:]))
            for call in seen.calls
            if has_expert_weights(call.module)
            for weight in call.module.parameters(recurse=False)
            if weight.ndim == 3
        }
        self._whole: list[Operation] | None = None

    def differing(self, counts: Sequence[int]) -> dict[int, str]:
        """Of some row counts those that give other bits than the base, each with what differs.

        Raises:
            UnsupportedModelError: a row's bits depend on its place in an operation of `base` rows.
        """
        if self._whole is None:
            self._whole = self._recorded(self._base)
            self._require_independent_rows()
        return {count: what for count in counts if (what := self._difference(count))}

    def _recorded(self, count: int) -> list[Operation]:
        return recorded(lambda: self._run(count), self._tried, self._parts)

    def _require_independent_rows(self) -> None:
        few = 2 if self._base != 2 else 3  # beside which the dimensions of rows show
        pairs = self._pairs(few)
        if pairs is None:
            _log.info("%s does other operations with %d rows", self._name, few)
        for pair in pairs or ():
            if not self._keeps_rows(pair):
                raise UnsupportedModelError(
                    f"{self._name}: the bits of a row depend on its index in the forward in "
                    f"{pair.whole}, with {self._base} rows and {torch.get_num_threads()} threads, "
                    "so no saved K/V could be trusted; set rows to a multiple of 64, or use one "
                    "torch thread or another dtype"
                )

    def _keeps_rows(self, pair: Pair) -> bool:
        """Whether all rows of the base come out alike, where that can be tried."""
        try:
            trial = self._trial(pair)
            return trial is None or trial.same_rows(pair.whole)
        except (RuntimeError, ValueError, IndexError) as error:
            _log.info("%s cannot be tried alone: %s", pair.whole, error)
            return True

    def _difference(self, count: int) -> str | None:
        try:
            pairs = self._pairs(count)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"{self._name}, which fails with it ({error})"
        if pairs is None:
            return f"{self._name}, which then does other operations"
        for pair in pairs:
            if pair.whole.kind == UNKNOWN and pair.has_rows and not pair.whole.in_part:
                return f"{pair.other}, which is not known to be of each row alone"
            try:
                trial = self._trial(pair)
                if trial is not None and not trial.same_rows(pair.other):
                    return str(pair.other)
            except (RuntimeError, ValueError, IndexError) as error:
                return f"{pair.other}, which cannot be tried alone ({error})"
        return None

    def _pairs(self, count: int) -> list[Pair] | None:
        """Each distinct operation with what it is in a forward of `count`; None if others are."""
        whole, other = self._whole or [], self._recorded(count)
        if len(other) != len(whole):
            return None
        pairs = dict.fromkeys(map(Pair, whole, other))
        return [*pairs] if all(pair.matches() for pair in pairs) else None

    def _trial(self, pair: Pair) -> OperationTrial | None:
        """How to try it; None for what was tried otherwise, mixes rows, or cannot be repeated."""
        if not pair.has_rows or pair.whole.kind == UNKNOWN or self._tried_otherwise(pair):
            return None
        dims = pair.row_dimensions, pair.result_dimensions
        return trial_of(pair.whole, *dims, self._device, _settings(self._device))

    def _tried_otherwise(self, pair: Pair) -> bool:
        """Whether it is the product of a part: of a module's weight, or of experts'."""
        if pair.whole.kind != PRODUCT:
            return False
        factors = pair.whole.tensors[-2:]
        return any(
            x.tried or (tuple(sorted(x.shape[-2:])) in self._experts and len(x.shape) == 3)
            for x in factors
        )


def decoder_run(model: Any, seen: Observation) -> Callable[[int], None]:
    """Runs rows of made-up tokens through a model without its head; nothing is kept."""

    def run(count: int) -> None:
        index = torch.arange(count, device=seen.tokens.device) % seen.rows
        with running(Recorder()):
            decoder_of(model)(**packed_inputs(seen.tokens[index], seen.positions[index]))

    return run


def finishing_run(model: Any, seen: Observation) -> Callable[[int], None]:
    """Runs what a model's class does to logits, on rows of zeros."""
    head = Head(model)
    weight = model.get_output_embeddings().weight

    def run(count: int) -> None:
        if head.finish is not None:
            head.finish(weight.new_zeros((1, count, len(weight)), device=seen.hidden.device))

    return run


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Settings of this process that the bits of an operation depend on."""
    switches = numerics.settings(device)
    return (torch.get_num_threads(), torch.is_inference_mode_enabled(), *switches.items())
