"""The cold run that everything else is compared with: from token 0, M rows at a time, alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.execution.batch import Batch
from kvpager.hf.state import EMPTY
from kvpager.scheduling.chunks import next_chunk
from kvpager.tokens import TokenIds
from kvpager.verify.recording import Recording, record_sequence

if TYPE_CHECKING:
    import torch

    from kvpager.engine import Engine


def cold_run(engine: Engine, ids: TokenIds, salt: str) -> Recording:
    """K/V of every layer and logits at every position of `ids` [n], computed from nothing.

    Every forward has M rows, those after the prompt's last are padding, and the head as many as it
    ever has; of a model with recurrent layers it has the rows of a chunk, or of the prompt's tail.
    Nothing is shared: `salt` must be new. This is the definition of the bits that are promised, so
    it uses neither sessions nor their scheduling.

    Raises:
        CapacityError: the engine's budgets cannot hold the prompt.
    """
    logits: dict[int, torch.Tensor] = {}
    sequence = engine.pager.sequence(salt=salt)
    state = EMPTY
    try:
        sequence.reserve(len(ids))
        for start in range(0, len(ids), engine.rows):
            if engine.core.recurrence is not None:
                batch = next_chunk(engine.core, sequence, ids, start, state)
                rows = range(batch.used)
            else:
                batch = Batch(engine.rows)
                rows = batch.commit(sequence, start, ids[start : start + engine.rows])
                batch.used = engine.rows  # M rows also where fewer would hold them
            batch.wanted = [*rows, *[0] * (-len(rows) % engine.row_counts.head[-1])]
            for row, after in zip(rows, engine.core.runner.run(batch)):
                logits[start + row] = after.clone()
            state = batch.after or EMPTY
        return record_sequence(engine, sequence, len(ids), logits)
    finally:
        sequence.close()
