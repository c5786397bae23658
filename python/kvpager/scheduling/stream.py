"""The checked arguments of a generation, and one session's part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.sampling import Sampling, log_probability
from kvpager.scheduling.options import MODEL_EOS, EndTokens, with_defaults
from kvpager.speculation.speculation import Speculation, resolve_speculation
from kvpager.text.reservations import Reservation
from kvpager.text.transcript import Transcript
from kvpager.tokens import as_token_ids


class GeneratedToken(NamedTuple):
    """A token, and its log-probability (natural) under the model's raw logits.

    Sampling options have no influence on it. It is a float32, bit for bit that of `Engine.score`.
    """

    id: int
    logprob: float


@dataclass(frozen=True)
class Generation:
    """The checked arguments of `Session.generate`, `Engine.run` and their like."""

    max_new_tokens: int
    sampling: Sampling  # its seed is 0: each stream has its own seed
    eos: frozenset[int]
    stop: tuple[tuple[int, ...], ...]
    speculation: Callable[[], Speculation] | None
    logprobs: bool

    @classmethod
    def checked(
        cls,
        core: EngineCore,
        max_new_tokens: int,
        options: Mapping[str, Any],
        *,
        logprobs: bool = False,
    ) -> Generation:
        """Raises InvalidArgumentError for a bad value or an unknown option."""
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InvalidArgumentError(
                f"max_new_tokens is {max_new_tokens!r}; expected an integer, 1 or more"
            )
        if not isinstance(logprobs, bool):
            raise InvalidArgumentError(f"logprobs is {logprobs!r}; expected True or False")
        chosen = with_defaults(options, "seed", "logprobs")
        return cls(
            max_new_tokens=max_new_tokens,
            sampling=Sampling(chosen["temperature"], chosen["top_k"], chosen["top_p"]),
            eos=_end_tokens(core, chosen["eos"]),
            stop=tuple(
                tuple(as_token_ids(list(part), core.vocab_size, f"stop[{i}]").tolist())
                for i, part in enumerate(chosen["stop"])
            ),
            speculation=resolve_speculation(
                chosen["speculate"],
                vocab_size=core.vocab_size,
                exact=core.config.exact,
                draft_cost=None if core.drafter is None else core.drafter.guess_cost,
            ),
            logprobs=logprobs,
        )

    def sampling_with(self, seed: int) -> Sampling:
        """The sampling options with a stream's own seed. Raises InvalidArgumentError."""
        return replace(self.sampling, seed=seed)

    def stream(self, transcript: Transcript, seed: int) -> Stream:
        """One session's part, before its first token."""
        return Stream(
            transcript=transcript,
            sampling=self.sampling_with(seed),
            remaining=self.max_new_tokens,
            eos=self.eos,
            stop=self.stop,
            speculation=self.speculation() if self.speculation is not None else None,
            logprobs=self.logprobs,
        )


@dataclass
class Stream:
    """One session's generation: the tokens it may still produce, and what ends it earlier."""

    transcript: Transcript
    sampling: Sampling
    remaining: int
    eos: frozenset[int]
    stop: tuple[tuple[int, ...], ...]
    speculation: Speculation | None
    logprobs: bool
    produced: list[int] = field(default_factory=list)
    room: Reservation | None = None  # for all tokens it may produce

    def reserve(self) -> None:
        """Reserves room for the rest of its budget, until `leave`. Raises CapacityError."""
        self.room = self.transcript.reserve(self.transcript.length + self.remaining)

    def leave(self) -> None:
        """Releases its reserved room; tokens it produced stay. May be called twice."""
        room, self.room = self.room, None
        if room is not None:
            room.release()

    @property
    def finish(self) -> str | None:
        """Why it has ended: "eos", "stop" or "length"; None while it goes on."""
        if self.produced:
            if self.produced[-1] in self.eos:
                return "eos"
            for stop in self.stop:
                if tuple(self.produced[-len(stop) :]) == stop:
                    return "stop"
        return None if self.remaining > 0 else "length"

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.finish is None

    def sample(self) -> int | GeneratedToken:
        """Samples the next token, which becomes the session's pending one."""
        logits = self.transcript.known_logits if self.logprobs else None
        token = self.transcript.sample(self.sampling)
        self.produced.append(token)
        self.remaining -= 1
        if not self.logprobs:
            return token
        assert logits is not None
        return GeneratedToken(token, float(np.float32(log_probability(logits, token))))


def seeds_of(seed: int | Iterable[int] | None, defaults: list[int]) -> list[int]:
    """One seed per stream: `defaults` if `seed` is None, `seed` for all, or those it lists."""
    if seed is None:
        return defaults
    if isinstance(seed, int):
        return [seed] * len(defaults)
    seeds = list(seed)
    if len(seeds) != len(defaults):
        raise InvalidArgumentError(
            f"seed has {len(seeds)} values; expected {len(defaults)}, one each"
        )
    return seeds


def _end_tokens(core: EngineCore, eos: EndTokens) -> frozenset[int]:
    if eos is None:
        return frozenset()
    if isinstance(eos, str):
        if eos != MODEL_EOS:
            raise InvalidArgumentError(f'eos is {eos!r}; expected token ids, None or "{MODEL_EOS}"')
        return _models_end_tokens(core.model)
    ids = [eos] if isinstance(eos, int) else list(eos)
    return frozenset(as_token_ids(ids, core.vocab_size, "eos").tolist())


def _models_end_tokens(model: Any) -> frozenset[int]:
    for holder in (getattr(model, "generation_config", None), model.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
