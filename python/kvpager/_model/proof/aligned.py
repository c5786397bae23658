"""Tests a model with recurrent layers at start: is a chunk a function of state and tokens?

Rows of such a model depend on each other, so there are no row counts to prove: one forward computes
a chunk alone, from the state before it. The test requires that an equal forward gives equal bits,
does not change the state it starts from, and really continues from that state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvpager._model.seam.attention import running
from kvpager._model.seam.causal_lm import (
    HEAD_ROWS,
    Head,
    decoder_of,
    made_up_tokens,
    requiring,
)
from kvpager._model.seam.hooks import Watch
from kvpager._model.seam.observe import (
    Observation,
    Recorder,
    RowTensors,
    difference,
    require_plain_head,
)
from kvpager._model.seam.recurrent import Recurrence
from kvpager._model.seam.rows import RowCounts, same_bits
from kvpager._model.seam.state import EMPTY, RecurrentState
from kvpager.errors import UnsupportedModelError

_SHORT = 4  # rows just behind a state, where its trace is clearest
_CLOSE = 0.2  # fraction of the distance that leaving out a part of the state causes


def settle_states(model: Any, chunk_tokens: int) -> tuple[Observation, RowCounts, Recurrence]:
    """Runs the model on made-up tokens; returns a forward, its row counts, and how to run it.

    A forward has a chunk's rows. Where layers go on from a state with one row only, it has one.

    Args:
        model: a causal LM that `check_supported` accepted and `attach` knows.
        chunk_tokens: rows of a chunk.

    Raises:
        UnsupportedModelError: its states cannot be carried, or forwards are not repeatable.
    """
    trial = _Trial(model, chunk_tokens)
    first = trial.run(EMPTY, trial.rows, head=True)
    second = trial.run(first.state, trial.rows)
    trial.require_same(trial.run(EMPTY, trial.rows), first, "from nothing")
    trial.require_same(trial.run(first.state, trial.rows), second, "from a state")
    rows = trial.rows if trial.goes_on(first.state, _SHORT) else 1
    if rows == 1 and not trial.goes_on(first.state, 1):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its recurrent layers do not go on from a state they are "
            "given, neither with several rows nor with one; use another architecture"
        )
    if not trial.agrees(first.state, _SHORT if rows > 1 else 1):
        raise UnsupportedModelError(
            f"{type(model).__name__}: a forward that begins at the state of another is not close "
            "to one forward of all tokens; use another architecture"
        )
    place = trial.recurrence.layers
    seen = Observation(
        tokens=trial.tokens[: trial.rows],
        positions=trial.positions[: trial.rows],
        layers={place[layer]: call for layer, call in first.attention.calls.items()},
        hidden=first.hidden,
        calls=[],
        windows=dict.fromkeys(place.values()),  # states go back further than windows
    )
    return seen, RowCounts(rows), trial.recurrence


@dataclass
class _Outcome:
    attention: Recorder
    hidden: torch.Tensor  # [rows, hidden_size]
    state: RecurrentState

    @property
    def rows(self) -> RowTensors:
        return self.attention.calls, self.hidden

    def tensors(self, last: int = 0) -> list[torch.Tensor]:
        """Hidden states, queries, keys and values (of the `last` rows; 0: of all), and state."""
        rows = [self.hidden, *(x for call in self.attention.calls.values() for x in call)]
        return [*(x[-last:] for x in rows), *self.state.tensors]


class _Trial:
    """Made-up tokens of a few chunks, and forwards over them."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.tokens = made_up_tokens(model, 2 * rows, torch.Generator("cpu").manual_seed(0))
        self.positions = torch.arange(2 * rows, device=model.device)
        self.recurrence = Recurrence(model)
        self._name = type(model).__name__

    def run(self, state: RecurrentState, rows: int, *, head: bool = False) -> _Outcome:
        """The `rows` tokens after a state, which must stay as it is."""
        at = slice(state.position, state.position + rows)
        before = [tensor.clone() for tensor in state.tensors]
        recorder = Recorder()
        cache = self.recurrence.cache(state)
        inputs = self.recurrence.inputs(self.tokens[at], self.positions[at], cache)
        attention = self.recurrence.attention(cache, recorder, by_cache_layer=True)
        runs = requiring(
            f"{self._name} does not run on the tokens after a state",
            "use a decoder-only causal LM that keeps the state of its recurrent layers in a "
            "transformers Cache",
        )
        with torch.inference_mode(), running(attention), runs:
            hidden = self._hidden(inputs, rows, head)
        if not state.position and rows == self.rows:
            self.recurrence.observed(cache, hidden, list(recorder.calls))
        after = self.recurrence.taken(cache, at.stop, hidden[-1])
        if not all(map(same_bits, before, state.tensors)):
            raise UnsupportedModelError(
                f"{self._name}: a forward changed the state that it began with, which was a copy's "
                "source; use another architecture"
            )
        return _Outcome(recorder, hidden, after)

    def _hidden(self, inputs: dict[str, Any], rows: int, head: bool) -> torch.Tensor:
        if not head:
            hidden: torch.Tensor = decoder_of(self.model)(**inputs)[0][0]
            return hidden
        seen: list[torch.Tensor] = []
        keep = torch.arange(HEAD_ROWS, device=self.model.device) % rows
        with Watch(decoder_of(self.model), lambda _, args, out: seen.append(out[0][0])):
            logits = self.model(**inputs, logits_to_keep=keep).logits[0]
        ours = Head(self.model)(seen[0], keep.tolist())
        require_plain_head(self.model, logits, ours.to(logits.dtype))
        return seen[0]

    def require_same(self, again: _Outcome, before: _Outcome, where: str) -> None:
        """Raises UnsupportedModelError unless a forward repeated itself."""
        if what := difference(before.rows, again.rows):
            self._refuse_noise(what, where)
        for slot, one, other in zip(
            self.recurrence.shape.slots, before.state.tensors, again.state.tensors
        ):
            if not same_bits(one, other):
                self._refuse_noise(f"the state of layer {slot.layer} ({slot.name})", where)

    def _refuse_noise(self, what: str, where: str) -> None:
        raise UnsupportedModelError(
            f"{self._name}: {what} differ between two forwards of the same tokens {where}, so no "
            "saved K/V could be trusted; use another architecture, dtype or device"
        )

    def goes_on(self, state: RecurrentState, rows: int) -> bool:
        """Whether each kind of a state's tensors makes a difference to the rows after it.

        Some layers continue their convolution but restart their recurrence.
        """
        carried = self.run(state, rows).tensors()
        return not any(all(map(same_bits, carried, other)) for other in self._without(state, rows))

    def agrees(self, state: RecurrentState, rows: int) -> bool:
        """Whether rows after a state are close to what one forward of everything gives them."""
        whole = self.run(EMPTY, state.position + rows).tensors(rows)
        carried = _distance(self.run(state, rows).tensors(), whole)
        return all(
            carried <= _CLOSE * _distance(other, whole) for other in self._without(state, rows)
        )

    def _without(self, state: RecurrentState, rows: int) -> Iterator[list[torch.Tensor]]:
        """Results of the rows after a state, with each kind of its tensors set to zero in turn."""
        kinds = [slot.name for slot in self.recurrence.shape.slots]
        for kind in sorted(set(kinds)):
            tensors = tuple(
                torch.zeros_like(tensor) if name == kind else tensor
                for name, tensor in zip(kinds, state.tensors)
            )
            yield self.run(RecurrentState(state.position, tensors, state.hidden), rows).tensors()


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Sum of the distances of all pairs, each relative to the norm of the other's tensor."""
    return sum(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(some, others)
    )
