"""Chooses a token from logits: greedy, or sampled with a number of seed and position alone.

The number is u = Philox(seed, absolute position). It never depends on other sessions of the
forward, on interruptions, or on how many numbers were drawn before.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpager.errors import InvalidArgumentError, NonFiniteError

Logits = npt.NDArray[np.float64]

_BEYOND_POSITIONS = 1 << 128  # a counter of Philox that is no position

_NUMPY_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 is greedy, ties by lowest id. top_k: 0 is off. top_p: 1 is off; otherwise the
    fewest most likely tokens whose probabilities reach it. seed: of all draws, together with the
    token's position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _refusal("temperature", self.temperature, "a finite number, 0 (greedy) or more")
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise _refusal("top_k", self.top_k, "an integer, 0 (off) or more")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _refusal("top_p", self.top_p, "a number above 0, up to 1 (off)")
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**64:
            raise _refusal("seed", self.seed, "an integer from 0 to 2**64 - 1")

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at `position`, from the logits [vocab] of the position before.

        Raises:
            NonFiniteError: a logit is NaN or positive infinity; -inf forbids a token and is fine.
        """
        if self.temperature == 0:
            # Widened exactly and looked at once: the first of equals, or the first NaN.
            wide = logits if logits.dtype in _NUMPY_DTYPES else logits.float()
            exact = wide.numpy()
            token = int(exact.argmax())
            _require_finite(float(exact[token]), position)
            return token
        values: Logits = logits.to(torch.float64).numpy()
        _require_finite(float(values.max()), position)
        order, weights = self._candidates(values)
        cumulative = np.cumsum(weights)
        drawn = int(
            np.searchsorted(cumulative, uniform(self.seed, position) * cumulative[-1], "right")
        )
        return int(order[min(drawn, len(order) - 1)])

    def _candidates(self, values: Logits) -> tuple[npt.NDArray[np.intp], Logits]:
        """Token ids by (probability descending, id ascending), and their weights."""
        ids = np.arange(len(values))
        if 0 < self.top_k < len(values):
            least = np.partition(values, -self.top_k)[-self.top_k]
            ids = np.flatnonzero(values >= least)
        ids = ids[np.argsort(-values[ids], kind="stable")]
        if self.top_k:
            ids = ids[: self.top_k]
        with np.errstate(over="ignore"):  # a small temperature: -inf, whose weight is 0
            weights = np.exp((values[ids] - values[ids[0]]) / self.temperature)
        if self.top_p < 1:
            cumulative = np.cumsum(weights)
            kept = int(np.searchsorted(cumulative, self.top_p * cumulative[-1], "left")) + 1
            ids, weights = ids[:kept], weights[:kept]
        return ids, weights

    def to_json(self) -> dict[str, float | int]:
        """JSON values for a snapshot."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sampling:
        """The inverse of `to_json`; raises InvalidArgumentError for invalid values."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidArgumentError(f"sampling is {dict(values)!r}: {error}") from error


def check_logits(logits: torch.Tensor, position: int) -> None:
    """Raises NonFiniteError unless logits [vocab] define a distribution."""
    _require_finite(float(logits.max()), position)  # a NaN is the largest of all


def fresh_seed() -> int:
    """A new random seed: 63 bits of the system's entropy."""
    return secrets.randbits(63)


def seed_after(seed: int) -> int:
    """The default seed (63 bits) of the generation that follows one with `seed`.

    So every turn of a conversation has other random numbers, and its first seed repeats them all.
    """
    follower = np.random.Philox(key=seed, counter=_BEYOND_POSITIONS)
    return int(follower.random_raw()) >> 1


def _require_finite(largest: float, position: int) -> None:
    if not math.isfinite(largest):
        raise NonFiniteError(
            f"the logits for position {position} hold NaN or infinity, or forbid every token"
        )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, by Philox4x64 (Salmon et al. 2011)."""
    draws = np.random.Philox(key=seed, counter=position)
    return float(int(draws.random_raw()) >> 11) * 2.0**-53


def log_probability(logits: torch.Tensor, token: int) -> float:
    """Log-probability of a token under logits [vocab], in float64 and in one fixed order."""
    values: Logits = logits.to(torch.float64).numpy()
    top = float(values.max())
    return float(values[token]) - top - math.log(float(np.exp(values - top).sum()))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refusal(field: str, value: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} is {value!r}; expected {expected}")
