"""From hidden states to logits, always HEAD_ROWS rows at a time.

A matrix product rounds differently when its row count changes, so the rows that need logits are
gathered into a fixed count and padded. `logits_to_keep=1` would change bits, and copies the whole
weight of a bf16 head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

HEAD_ROWS = 16


class Head:
    """A causal LM's output embeddings and what its class does to the logits after them."""

    def __init__(self, model: Any) -> None:
        self._project = model.get_output_embeddings()
        self._finish = _finishing_step(model)

    def __call__(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocab] of some rows of hidden [M, hidden_size], in its dtype."""
        parts = []
        for start in range(0, len(rows), HEAD_ROWS):
            wanted = list(rows[start : start + HEAD_ROWS])
            index = torch.tensor(wanted + [wanted[0]] * (HEAD_ROWS - len(wanted)))
            gathered = hidden.index_select(0, index.to(hidden.device)).unsqueeze(0)
            parts.append(self._finish(self._project(gathered))[0, : len(wanted)])
        return torch.cat(parts)


def _finishing_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the architecture does between its output embeddings and the logits it returns."""
    config = model.config
    if cap := getattr(config, "final_logit_softcapping", None):
        return lambda logits: torch.tanh(logits / cap) * cap
    if (scale := getattr(model, "logit_scale", None)) is not None:
        return lambda logits: logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        if config.model_type.startswith("granite"):
            return lambda logits: logits / scaling
        return lambda logits: logits * scaling
    return lambda logits: logits
