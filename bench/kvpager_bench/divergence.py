"""How far one distribution over the vocabulary is from another, token by token and pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Numbers: TypeAlias = npt.NDArray[np.float64]


def kl_divergences(expected: torch.Tensor, logits: torch.Tensor) -> Numbers:
    """KL(softmax(expected) || softmax(logits)) of each row, over the whole vocabulary, in nats.

    Never below 0, which only rounding reaches.

    expected, logits: [rows, vocab] of any dtype; all is computed in float64.
    """
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (expected, logits))
    apart: Numbers = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0.0).numpy()
    return apart


@dataclass(frozen=True)
class Sample:
    """What each scored token says, [tokens] each.

    logprob: of the token, natural. kl: from the expected distribution, in nats. same_top: whether
    both find the same token most likely.
    """

    logprob: Numbers
    kl: Numbers
    same_top: npt.NDArray[np.bool_]

    @property
    def perplexity(self) -> float:
        """exp of minus the mean log-probability."""
        return float(np.exp(-self.logprob.mean()))


def sample(
    expected: torch.Tensor, logits: torch.Tensor, tokens: npt.NDArray[np.integer[Any]]
) -> Sample:
    """Of `tokens` [n], which logits [n, vocab] predict, beside the expected ones [n, vocab].

    Raises ValueError where the shapes are not these.
    """
    if expected.shape != logits.shape or len(tokens) != len(logits):
        raise ValueError(
            f"logits {list(logits.shape)} of {len(tokens)} tokens beside {list(expected.shape)}"
        )
    said = torch.log_softmax(logits.double(), dim=-1)
    at = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[:, None]
    return Sample(
        said.gather(1, at)[:, 0].numpy(),
        kl_divergences(expected, logits),
        (expected.argmax(-1) == logits.argmax(-1)).numpy(),
    )


def pooled(samples: Sequence[Sample]) -> Sample:
    """All tokens of several samples, one after the other."""
    return Sample(
        np.concatenate([one.logprob for one in samples]),
        np.concatenate([one.kl for one in samples]),
        np.concatenate([one.same_top for one in samples]),
    )


def standard_error(values: Numbers, per_set: int) -> float:
    """Of the mean of values [n], of which each `per_set` are one draw."""
    means = values.reshape(-1, per_set).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(len(means)))
