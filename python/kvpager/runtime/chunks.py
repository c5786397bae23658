"""Chunks of a model with recurrent layers, each from the state before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvpager.hf.state import RecurrentState
from kvpager.pager import Sequence
from kvpager.runtime.batch import Batch
from kvpager.runtime.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine

Forward = Callable[[Batch], torch.Tensor]


def next_chunk(
    engine: Engine, sequence: Sequence, tokens: TokenIds, start: int, state: RecurrentState
) -> Batch:
    """The rows from `start` to the end of its chunk, or of the tokens, after the state there."""
    size = engine.layout.chunk_tokens
    rows = min(engine.rows, len(tokens) - start, size - start % size)
    batch = Batch(rows, exact=rows == engine.rows)
    batch.before = state
    batch.commit(sequence, start, tokens[start : start + rows])
    return batch


def extend_from_states(
    engine: Engine, sequence: Sequence, tokens: TokenIds, forward: Forward
) -> None:
    """Makes a sequence hold all of `tokens`, of which it holds the first.

    What it holds after the last position at which a state is kept is computed again.
    """
    states = engine.states_of(sequence)
    assert states is not None
    try:
        sequence.reserve(len(tokens))
        while (state := states.at(sequence.length)) is None:
            sequence.trim(states.nearest(sequence.length))
        while (start := sequence.length) < len(tokens):
            batch = next_chunk(engine, sequence, tokens, start, state)
            forward(batch)
            assert batch.after is not None
            state = batch.after
            states.advance(state)
    finally:
        states.close()
