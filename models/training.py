"""What the trainings of the tiny models share: curriculum, rate, optimiser, position jumps."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from kvpager.cli.needles import Ids

LENGTHS = (96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of a training sequence
COLDEST_SOFTMAX = 0.5  # attention logits are scaled by a random factor from here to 1
ADVANCE_ACCURACY = 0.93  # smoothed token accuracy at which the curriculum takes the next length
ADVANCE_STEPS = 30
JUMP_SHARE = 0.7  # of sequences get position jumps, up to JUMPS of at most LONGEST_JUMP tokens
JUMPS = 3
LONGEST_JUMP = 60_000
SMOOTHING = 0.95  # of the averages that are reported and steer the curriculum


class Average:
    """An exponential moving average that starts at its first value."""

    def __init__(self) -> None:
        self.value = math.nan

    def add(self, value: float) -> None:
        first = math.isnan(self.value)
        self.value = value if first else SMOOTHING * self.value + (1 - SMOOTHING) * value


class Curriculum:
    """The longest sequence so far: it lengthens while the token accuracy is high."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.longest = LENGTHS[0]
        self._advanced = 0

    def begin(self) -> None:
        """A stage begins: its steps are counted from 1 again."""
        self._advanced = 0

    def advance(self, step: int, accuracy: float, limit: int) -> None:
        """After step `step`: takes the next length up to `limit` if `accuracy` allows it."""
        longer = [length for length in LENGTHS if self.longest < length <= limit]
        if longer and step - self._advanced > ADVANCE_STEPS and accuracy > ADVANCE_ACCURACY:
            self.longest, self._advanced = longer[0], step

    def draw(self) -> int:
        """Mostly among the last four lengths, otherwise the longest."""
        reached = [length for length in LENGTHS if length <= self.longest]
        return int(self.rng.choice(reached[-4:])) if self.rng.random() < 0.6 else reached[-1]

    @property
    def has_begun(self) -> bool:
        """Whether the first length is done: first the plain task, then what makes it reach far."""
        return self.longest > LENGTHS[0]


def rate_factor(step: int, steps: int) -> float:
    """Learning-rate factor of step 1..steps: 100 steps up, flat to the middle, cosine to 0.02."""
    done = step / steps
    late = 1.0 if done < 0.5 else 0.5 * (1 + math.cos(math.pi * (2 * done - 1)))
    return min(1.0, step / 100) * max(0.02, late)


def adam(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves vectors alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def jump(rng: np.random.Generator, positions: Ids, starts: Ids) -> None:
    """Moves what begins at some of `starts`, with all that follows, up to 60K positions further.

    positions: [T] of one sequence, changed in place. starts: indices into it.
    """
    if rng.random() >= JUMP_SHARE:
        return
    for start in rng.choice(starts, size=min(JUMPS, len(starts)), replace=False):
        positions[start:] += int(math.exp(rng.uniform(0, math.log(LONGEST_JUMP))))
