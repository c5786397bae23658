"""Chunks of a model with recurrent layers, each from the state before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpager._model.seam.state import RecurrentState
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._support.tokens import TokenIds
from kvpager.pager import Sequence

Forward = Callable[[Batch], torch.Tensor]


def next_chunk(
    core: EngineCore, sequence: Sequence, tokens: TokenIds, start: int, state: RecurrentState
) -> Batch:
    """The rows from `start` to the end of its chunk, or of the tokens, after the state there."""
    size = core.facts.layout.chunk_tokens
    rows = min(core.rows, len(tokens) - start, size - start % size)
    batch = Batch(rows, exact=rows == core.rows)
    batch.before = state
    batch.commit(sequence, start, tokens[start : start + rows])
    return batch


def extend_from_states(
    core: EngineCore, sequence: Sequence, tokens: TokenIds, forward: Forward
) -> None:
    """Makes a sequence hold all of `tokens`, of which it holds the first.

    What it holds after the last position at which a state is kept is computed again.
    """
    states = core.states_of(sequence)
    assert states is not None
    try:
        sequence.reserve(len(tokens))
        while (state := states.at(sequence.length)) is None:
            sequence.trim(states.nearest(sequence.length))
        while (start := sequence.length) < len(tokens):
            batch = next_chunk(core, sequence, tokens, start, state)
            forward(batch)
            assert batch.after is not None
            state = batch.after
            states.advance(state)
    finally:
        states.close()
