"""The results of a run: token ids, K/V of every layer, logits. And the cold run, the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from kvpager._model.seam.state import EMPTY
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.scheduling.chunks import next_chunk
from kvpager._support.tokens import TokenIds
from kvpager.sampling import log_probability

if TYPE_CHECKING:
    from kvpager._model.layout import Layout
    from kvpager.engine import Engine
    from kvpager.pager import Sequence
    from kvpager.session import Session


@dataclass(frozen=True)
class Recording:
    """The tokens, K/V and logits of one sequence of n tokens.

    Attributes:
        tokens: [n] int32.
        keys: one [n, kv_heads, k_dim] per layer, in the dtype they are kept in.
        values: likewise.
        logits: [vocab] by the position of the token they come after, in the model's dtype.
    """

    tokens: TokenIds
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    logits: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities [n - 1] of every token but the first; needs logits everywhere."""
        return np.array(
            [
                log_probability(self.logits[position], int(self.tokens[position + 1]))
                for position in range(len(self.tokens) - 1)
            ],
            dtype=np.float32,
        )

    def save(self, path: Path) -> None:
        """Writes it to a file, bit for bit."""
        tensors = {"tokens": torch.from_numpy(np.asarray(self.tokens))}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values)):
            tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = keys, values
        for position, logits in self.logits.items():
            tensors[f"logits.{position}"] = logits
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads the file that `save` wrote."""
        tensors = load_file(path)
        layers = sum(name.startswith("keys.") for name in tensors)
        return cls(
            tensors["tokens"].numpy(),
            tuple(tensors[f"keys.{layer}"] for layer in range(layers)),
            tuple(tensors[f"values.{layer}"] for layer in range(layers)),
            {
                int(name.partition(".")[2]): tensor
                for name, tensor in tensors.items()
                if name.startswith("logits.")
            },
        )


def record(session: Session, logits: Mapping[int, torch.Tensor] | None = None) -> Recording:
    """Tokens and K/V that a session holds now, with the logits that were seen on the way."""
    return record_sequence(session.core.facts.layout, session.sequence, session.committed, logits)


def record_sequence(
    layout: Layout,
    sequence: Sequence,
    length: int,
    logits: Mapping[int, torch.Tensor] | None = None,
) -> Recording:
    """The first `length` positions of a sequence."""
    pages = [sequence.read_kv(layer, 0, length) for layer in range(layout.layers)]
    return Recording(
        sequence.tokens[:length],
        tuple(keys for keys, _ in pages),
        tuple(values for _, values in pages),
        dict(logits or {}),
    )


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
            if engine.core.facts.recurrence is not None:
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
        return record_sequence(engine.layout, sequence, len(ids), logits)
    finally:
        sequence.close()
