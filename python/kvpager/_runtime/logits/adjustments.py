"""Changes logits [vocab] float64 in place, before the temperature.

The arithmetic of transformers' and vLLM's processors, in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Logits = npt.NDArray[np.float64]
_TokenIds = npt.NDArray[np.int32]


def add(values: _Logits, ids: npt.NDArray[np.intp], biases: _Logits) -> None:
    """Adds a bias to the logit of each of these tokens, ids without repetitions."""
    values[ids] += biases


def penalize_repetition(values: _Logits, tokens: _TokenIds, penalty: float) -> None:
    """Divides positive logits of every token of the text by the penalty, multiplies the others.

    As transformers' RepetitionPenaltyLogitsProcessor (CTRL, arXiv 1909.05858).
    """
    occurs = np.zeros(len(values), dtype=np.bool_)
    occurs[tokens] = True
    ids = np.flatnonzero(occurs)
    found = values[ids]
    values[ids] = np.where(found < 0, found * penalty, found / penalty)


def penalize_produced(
    values: _Logits, produced: _TokenIds, frequency: float, presence: float
) -> None:
    """Subtracts frequency times its count, and presence, from the logit of each produced token.

    As the OpenAI API describes it and vLLM applies it.
    """
    ids, counts = np.unique(produced, return_counts=True)
    values[ids] -= frequency * counts
    values[ids] -= presence
