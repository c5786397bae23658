"""From hidden states to logits, in one of a few row counts that give the same bits.

A matrix product may round differently when its row count changes, so the rows that need logits are
gathered and padded to a count that is known to give the bits of HEAD_ROWS rows. `logits_to_keep=1`
would change bits, and copies the whole weight of a bf16 head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

HEAD_ROWS = 16
_ALIGNMENT = 64  # bytes: torch's own on a CPU. Kernels may choose their path by it.


class Head:
    """A causal LM's output embeddings and what its class does to the logits after them."""

    def __init__(self, model: Any, counts: Sequence[int] = (HEAD_ROWS,)) -> None:
        """`counts`: ascending row counts that give the same bits (`RowCounts.head`)."""
        self._project = model.get_output_embeddings()
        self._dtype = self._project.weight.dtype
        self.finish = _finishing_step(model)  # of logits [..., vocab], element by element
        self._counts = tuple(counts)

    def __call__(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocab], in the head's dtype, of rows of hidden [M, hidden_size]."""
        largest = self._counts[-1]
        parts = []
        for start in range(0, len(rows), largest):
            wanted = list(rows[start : start + largest])
            count = self._counts[bisect_left(self._counts, len(wanted))]
            gathered = _gathered(hidden, wanted, count)
            gathered = gathered.to(self._dtype)  # some decoders end in float32
            logits = self._project(gathered.unsqueeze(0))
            if self.finish is not None:
                logits = self.finish(logits)
            parts.append(logits[0, : len(wanted)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gathered(hidden: torch.Tensor, wanted: list[int], count: int) -> torch.Tensor:
    """The wanted rows, and others up to `count`; a copy, unless they are the first ones."""
    # A step of decoding wants just those. A copy would begin at an aligned address, so this must.
    if (
        count <= hidden.shape[0]
        and wanted == list(range(len(wanted)))
        and hidden.is_contiguous()
        and hidden.data_ptr() % _ALIGNMENT == 0
    ):
        return hidden[:count]
    index = wanted + [wanted[0]] * (count - len(wanted))
    return hidden.index_select(0, torch.tensor(index, device=hidden.device))


def _finishing_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the architecture does between its output embeddings and the logits it returns."""
    config = model.config
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda logits: torch.tanh(logits / cap) * cap
    if (multiplier := getattr(config, "lm_head_multiplier", None)) is not None:
        return lambda logits: logits * multiplier
    if (scale := getattr(model, "logit_scale", None)) is not None:
        return lambda logits: logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        if config.model_type.startswith("granite"):
            return lambda logits: logits / scaling
        return lambda logits: logits * scaling
    return None
