"""Chooses a token from logits: greedy, or sampled with a number of seed and position alone.

The number is u = Philox(seed, absolute position). It never depends on other sessions of the
forward, on interruptions, or on how many numbers were drawn before.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager._runtime.logits import adjustments
from kvpager._runtime.logits.arguments import as_biases, as_ids, plain
from kvpager._runtime.logits.processors import Logits, Process, Processors, TokenIds
from kvpager._support.arguments import is_integer, is_number, refusal
from kvpager.errors import InvalidArgumentError, NonFiniteError

Alternatives: TypeAlias = tuple[tuple[int, float], ...]  # (token id, log-probability)

_BEYOND_POSITIONS = 1 << 128  # a counter of Philox that is no position

_NUMPY_DTYPES = (torch.float32, torch.float64)
_ALWAYS_SAVED = frozenset({"temperature", "top_k", "top_p", "seed"})
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "start",
)

_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a pure function of logits, tokens, seed and position.

    Applied in this order, which is that of transformers' `generate`: logit_bias,
    repetition_penalty, frequency_penalty, presence_penalty, begin_suppress_tokens, logits
    processors, temperature, top_k, top_p, min_p. Greedy decoding honours all before the
    temperature.

    Attributes:
        temperature: 0 is greedy, ties by lowest id.
        top_k: keeps this many most likely tokens, of equals those of lowest id; 0 is off.
        top_p: keeps the fewest most likely tokens whose probabilities reach it; 1 is off. Source:
            Holtzman et al. 2019, arXiv 1904.09751.
        seed: of all draws, together with the token's position.
        min_p: keeps tokens at least this many times as likely as the most likely one; 0 is off.
            Source: Nguyen et al. 2024, arXiv 2407.01082; after the other filters, as in
            transformers.
        repetition_penalty: divides positive logits and multiplies negative ones of every token that
            occurs in the text, prompt included; 1 is off. Source: CTRL, Keskar et al. 2019, arXiv
            1909.05858.
        presence_penalty: is subtracted from the logits of every token produced so far; 0 is off.
            Source: the OpenAI API, in the form of vLLM. Produced are the tokens from `start` on.
        frequency_penalty: likewise, times the number of its occurrences.
        logit_bias: is added to logits, {token id: bias}; -inf forbids a token. Source: the OpenAI
            API; transformers' `sequence_bias` of single tokens.
        begin_suppress_tokens: token ids that are forbidden at `start`, as transformers does.
        start: position of the first token of the generation. Read by presence_penalty,
            frequency_penalty and begin_suppress_tokens only.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    begin_suppress_tokens: tuple[int, ...] = ()
    start: int = 0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float):
                object.__setattr__(self, name, plain(value))
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise refusal("temperature", self.temperature, "a finite number, 0 (greedy) or more")
        if not is_integer(self.top_k) or self.top_k < 0:
            raise refusal("top_k", self.top_k, "an integer, 0 (off) or more")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise refusal("top_p", self.top_p, "a number above 0, up to 1 (off)")
        if not is_integer(self.seed) or not 0 <= self.seed < 2**64:
            raise refusal("seed", self.seed, "an integer from 0 to 2**64 - 1")
        if not is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise refusal("min_p", self.min_p, "a number from 0 (off) to 1")
        penalty = self.repetition_penalty
        if not is_number(penalty) or not 0 < penalty < math.inf:
            raise refusal("repetition_penalty", penalty, "a finite number above 0; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_number(value) or not -_LARGEST <= value <= _LARGEST:
                raise refusal(name, value, "a finite number; 0 is off")
            object.__setattr__(self, name, float(value))
        if not is_integer(self.start) or self.start < 0:
            raise refusal("start", self.start, "an integer, 0 or more")
        object.__setattr__(self, "logit_bias", as_biases(self.logit_bias))
        object.__setattr__(
            self,
            "begin_suppress_tokens",
            as_ids(self.begin_suppress_tokens, "begin_suppress_tokens"),
        )

    @cached_property
    def counts_produced(self) -> bool:
        """Whether it depends on where the generation began."""
        return bool(self.presence_penalty or self.frequency_penalty or self.begin_suppress_tokens)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether it depends on the tokens before the one to choose."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(penalties) or self.repetition_penalty != 1

    @cached_property
    def adjusts(self) -> bool:
        """Whether it changes logits before the temperature."""
        return self.reads_tokens or bool(self.logit_bias or self.begin_suppress_tokens)

    def choose(
        self,
        logits: torch.Tensor,
        position: int,
        tokens: TokenIds | None = None,
        process: Process | None = None,
    ) -> int:
        """The token at `position`, from the logits [vocab] of the position before.

        Args:
            logits: of the model, any floating dtype; unchanged.
            position: from 0.
            tokens: the text before it, [position] int32; read if `reads_tokens`, and by `process`.
            process: changes adjusted logits [vocab] float64, given (tokens, logits).

        Raises:
            NonFiniteError: a logit is NaN or positive infinity, or every token is forbidden; -inf
                forbids a token and is fine.
        """
        if self.adjusts or process is not None:
            return self._choose_adjusted(logits, position, tokens, process)
        if self.temperature == 0:
            # Widened exactly and looked at once: the first of equals, or the first NaN.
            wide = logits if logits.dtype in _NUMPY_DTYPES else logits.float()
            exact = wide.numpy()
            token = int(exact.argmax())
            _require_finite(float(exact[token]), position)
            return token
        values: Logits = logits.to(torch.float64).numpy()
        _require_finite(float(values.max()), position)
        return self._draw(values, position)

    def adjust(self, logits: torch.Tensor, position: int, tokens: TokenIds | None) -> Logits:
        """Logits [vocab] float64 with bias and penalties. Arguments and errors: as for `choose`."""
        values: Logits = logits.to(torch.float64, copy=True).numpy()
        _require_finite(float(values.max()), position)
        if self.logit_bias:
            adjustments.add(values, *self._biases)
        if self.reads_tokens:
            assert tokens is not None
            if self.repetition_penalty != 1:
                adjustments.penalize_repetition(values, tokens, self.repetition_penalty)
            if self.presence_penalty or self.frequency_penalty:
                produced = tokens[self.start :]
                frequency, presence = self.frequency_penalty, self.presence_penalty
                adjustments.penalize_produced(values, produced, frequency, presence)
        if self.begin_suppress_tokens and position == self.start:
            values[list(self.begin_suppress_tokens)] = -math.inf
        return values

    def candidates(self, values: Logits) -> tuple[npt.NDArray[np.intp], Logits]:
        """Token ids that are kept, by (logit descending, id ascending), and their weights."""
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
        if self.min_p > 0:
            kept = int(np.searchsorted(-weights, -self.min_p, "right"))  # the largest weight is 1
            ids, weights = ids[:kept], weights[:kept]
        return ids, weights

    def _choose_adjusted(
        self,
        logits: torch.Tensor,
        position: int,
        tokens: TokenIds | None,
        process: Process | None,
    ) -> int:
        values = self.adjust(logits, position, tokens)
        if process is not None:
            assert tokens is not None
            values = process(tokens, values)
        largest = int(values.argmax())
        _require_finite(float(values[largest]), position, ", after bias, penalties and processors,")
        return largest if self.temperature == 0 else self._draw(values, position)

    def _draw(self, values: Logits, position: int) -> int:
        order, weights = self.candidates(values)
        cumulative = np.cumsum(weights)
        drawn = int(
            np.searchsorted(cumulative, uniform(self.seed, position) * cumulative[-1], "right")
        )
        return int(order[min(drawn, len(order) - 1)])

    @cached_property
    def _biases(self) -> tuple[npt.NDArray[np.intp], Logits]:
        ids = np.fromiter(self.logit_bias.keys(), np.intp, len(self.logit_bias))
        return ids, np.fromiter(self.logit_bias.values(), np.float64, len(self.logit_bias))

    def to_json(self) -> dict[str, Any]:
        """JSON values for a snapshot; of options that came later, those that are set."""
        values = {
            name: value
            for name, value in asdict(self).items()
            if name in _ALWAYS_SAVED or value != _DEFAULTS[name]
        }
        if "logit_bias" in values:
            values["logit_bias"] = {
                str(token): "-inf" if bias == -math.inf else bias
                for token, bias in self.logit_bias.items()
            }
        if "begin_suppress_tokens" in values:
            values["begin_suppress_tokens"] = list(self.begin_suppress_tokens)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sampling:
        """The inverse of `to_json`; raises InvalidArgumentError for invalid values."""
        biases = values.get("logit_bias")
        if isinstance(biases, Mapping):
            values = {**values, "logit_bias": dict(map(_bias_of_json, biases.items()))}
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidArgumentError(f"sampling is {dict(values)!r}: {error}") from error


_DEFAULTS = asdict(Sampling())


def _bias_of_json(entry: tuple[object, object]) -> tuple[object, object]:
    token, bias = entry
    known = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 19
    return int(str(token)) if known else token, -math.inf if bias == "-inf" else bias


def fresh_seed() -> int:
    """A new random seed: 63 bits of the system's entropy."""
    return secrets.randbits(63)


def seed_after(seed: int) -> int:
    """The default seed (63 bits) of the generation that follows one with `seed`.

    So every turn of a conversation has other random numbers, and its first seed repeats them all.
    """
    follower = np.random.Philox(key=seed, counter=_BEYOND_POSITIONS)
    return int(follower.random_raw()) >> 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, by Philox4x64 (Salmon et al. 2011)."""
    draws = np.random.Philox(key=seed, counter=position)
    return float(int(draws.random_raw()) >> 11) * 2.0**-53


def choose_after(
    text: TokenIds, logits: torch.Tensor, sampling: Sampling, processors: Processors | None
) -> int:
    """The token after a text [n] int32, as `Sampling.choose`, with a caller's processors or not."""
    position = len(text)
    if processors is None:
        return sampling.choose(logits, position, text)
    return processors.choose(text, lambda process: sampling.choose(logits, position, text, process))


def _require_finite(largest: float, position: int, whose: str = "") -> None:
    """Raises NonFiniteError unless `largest`, the largest logit or the first NaN, is finite.

    whose: what changed the logits, for the message.
    """
    if not math.isfinite(largest):
        raise NonFiniteError(
            f"the logits for position {position}{whose} hold NaN or infinity, or forbid every token"
        )


class Distribution:
    """The distribution that logits [vocab] define, in float64 and in one fixed order."""

    def __init__(self, logits: torch.Tensor, temperature: float = 1.0) -> None:
        """`temperature`: divides the logits."""
        self._logits: Logits = logits.to(torch.float64).numpy()
        if temperature != 1:
            self._logits = self._logits / temperature
        self._largest = float(self._logits.max())

    @cached_property
    def _weights(self) -> Logits:
        return np.exp(self._logits - self._largest)

    @cached_property
    def _total(self) -> float:
        return float(self._weights.sum())

    def check(self, position: int) -> None:
        """Raises NonFiniteError unless it is one."""
        _require_finite(self._largest, position)

    def log_probability(self, token: int) -> float:
        """Returns the log-probability of a token."""
        return float(self._logits[token]) - self._largest - math.log(self._total)

    def entropy(self) -> float:
        """Returns the entropy in nats."""
        below = np.maximum(self._logits - self._largest, -_LARGEST)  # a forbidden token adds 0
        return math.log(self._total) - float((self._weights * below).sum()) / self._total

    def top(self, count: int) -> Alternatives:
        """The `count` most likely tokens, as (id, log-probability).

        Log-probabilities are float32, bit for bit those of `log_probability` after rounding; in
        descending order, equal ones by ascending id. Fewer than `count` if the vocabulary is
        smaller.
        """
        exact: Logits = self._logits - self._largest - math.log(self._total)
        rounded = exact.astype(np.float32)
        count = min(count, len(rounded))
        least = np.partition(rounded, -count)[-count]
        ids = np.flatnonzero(rounded >= least)
        ids = ids[np.argsort(-rounded[ids], kind="stable")][:count]
        return tuple(zip(ids.tolist(), rounded[ids].tolist()))


def log_probability(logits: torch.Tensor, token: int, temperature: float = 1.0) -> float:
    """Log-probability of a token; see `Distribution`."""
    return Distribution(logits, temperature).log_probability(token)


def top_log_probabilities(
    logits: torch.Tensor, count: int, temperature: float = 1.0
) -> Alternatives:
    """The most likely tokens; see `Distribution.top`."""
    return Distribution(logits, temperature).top(count)
