"""The checked arguments of a generation, and one session's part of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.logits.processors import (
    Logits,
    LogitsProcessor,
    Process,
    Processors,
    as_processors,
)
from kvpager._runtime.scheduling.completion import FinishReason
from kvpager._runtime.scheduling.options import (
    MODEL_EOS,
    EndTokens,
    Stops,
    alternatives_of,
    as_temperature,
    sampling_of,
    with_defaults,
)
from kvpager._runtime.text.answer import AnswerText
from kvpager._runtime.text.tokenizer import Detokenizer, Tokenizer, text_of
from kvpager._runtime.text.transcript import Reservation, Transcript
from kvpager._support.arguments import Integer, as_flag, as_integer, is_integer, listed
from kvpager._support.tokens import TokenIds, as_token_ids
from kvpager.errors import InvalidArgumentError
from kvpager.grammar import Constraint, Grammar, compiler_of
from kvpager.sampling import Alternatives, Distribution, Sampling
from kvpager.speculation.speculation import Speculation, SpeculationStats, resolve_speculation

_CONTEXT = 8  # tokens before a text that its first characters may depend on


class GeneratedToken(NamedTuple):
    """A token, and its log-probability (natural) under the model's raw logits.

    Sampling options have no influence on it. It is a float32, bit for bit that of `Engine.score`.
    `top` has the most likely tokens as (id, logprob), as many as `top_logprobs` asked for: by
    descending log-probability, equal ones by ascending id.
    """

    id: int
    logprob: float
    top: Alternatives = ()


@dataclass(frozen=True)
class Generation:
    """The checked arguments of `Session.generate`, `Engine.run` and their like."""

    max_new_tokens: int
    sampling: Sampling  # its seed and start are 0: each stream has its own
    eos: frozenset[int]
    stop: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    speculation: Callable[[], Speculation] | None = None
    logprobs: bool = False
    tokenizer: Tokenizer | None = None
    top_logprobs: int = 0
    logprob_temperature: float = 1.0
    processors: tuple[LogitsProcessor, ...] = ()
    grammar: Callable[[int], Constraint] | None = None  # from the first token's position
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop: bool = False

    @classmethod
    def checked(
        cls,
        core: EngineCore,
        max_new_tokens: Integer | None,
        options: Mapping[str, Any],
        *,
        logprobs: bool = False,
        otherwise: int | None = None,
    ) -> Generation:
        """Raises InvalidArgumentError for a bad value or an unknown option.

        otherwise: the number of tokens if neither the call nor a generation_config gives one.
        """
        as_flag(logprobs, "logprobs")
        chosen = with_defaults(options, core.model, "seed", "logprobs", "stream")
        if max_new_tokens is None:
            max_new_tokens = chosen["max_new_tokens"] or otherwise
        if max_new_tokens is None:
            raise InvalidArgumentError(
                "max_new_tokens is None, and no generation_config gives it; expected an integer, "
                "1 or more"
            )
        ids, strings = _stops(core, chosen["stop"])
        eos = _end_tokens(core, chosen["eos"])
        return cls(
            max_new_tokens=as_integer(max_new_tokens, "max_new_tokens", 1),
            sampling=sampling_of(chosen, core.facts.vocab_size),
            eos=eos,
            stop=ids,
            stop_strings=strings,
            speculation=resolve_speculation(
                chosen["speculate"],
                vocab_size=core.facts.vocab_size,
                exact=core.config.exact,
                draft_cost=None if core.drafter is None else core.drafter.guess_cost,
            ),
            logprobs=logprobs,
            tokenizer=core.tokenizer,
            top_logprobs=alternatives_of(chosen, logprobs),
            logprob_temperature=as_temperature(
                chosen["logprob_temperature"], "logprob_temperature"
            ),
            processors=as_processors(chosen["logits_processor"]),
            grammar=_constraints(core, chosen["grammar"], eos),
            min_new_tokens=as_integer(chosen["min_new_tokens"], "min_new_tokens", 0),
            skip_special_tokens=as_flag(chosen["skip_special_tokens"], "skip_special_tokens"),
            include_stop=as_flag(chosen["include_stop"], "include_stop"),
        )

    def sampling_with(self, seed: int, start: int = 0) -> Sampling:
        """The sampling options with a stream's own seed and start. Raises InvalidArgumentError."""
        return replace(self.sampling, seed=seed, start=start)

    def check_seed(self, seed: Integer | None) -> None:
        """Raises InvalidArgumentError unless `seed` is None or one of sampling."""
        if seed is not None:
            self.sampling_with(as_integer(seed, "seed", 0))

    def stream(
        self, transcript: Transcript, seed: int, before: TokenIds, *, as_text: bool = False
    ) -> Stream:
        """One session's part, before its first token.

        before: the text before it. as_text: whether each token's text is wanted as it comes.
        """
        answer = None
        wanted = as_text or self.stop_strings or not self.skip_special_tokens
        if self.tokenizer is not None and wanted:
            answer = self.answer(before)
        start = transcript.start_for(self.sampling, before)
        constraint = None if self.grammar is None else self.grammar(len(before))
        processors = None
        if self.processors or constraint is not None or self.min_new_tokens:
            constrain = self._without_ends(len(before), constraint)
            processors = Processors(self.processors, constrain)
        return Stream(
            transcript=transcript,
            sampling=self.sampling_with(seed, start),
            generation=self,
            speculation=self.speculation() if self.speculation is not None else None,
            before=before[-_CONTEXT:].copy(),
            prompt_tokens=len(before),
            answer=answer,
            processors=processors,
            constraint=constraint,
        )

    def answer(self, before: TokenIds) -> AnswerText:
        """The text of a stream, before its first token. REQUIRES: there is a tokenizer."""
        assert self.tokenizer is not None
        special = not self.skip_special_tokens
        pieces = Detokenizer(self.tokenizer, before, special_tokens=special)
        return AnswerText(pieces, self.stop_strings, include_stop=self.include_stop)

    def push(self, answer: AnswerText, token: int, count: int) -> str:
        """The text that is certain with a token behind `count` others of its stream."""
        if token in self.eos and not self.include_stop:
            return ""
        return answer.push(token, may_stop=count + 1 > self.min_new_tokens)

    def _without_ends(self, start: int, constraint: Constraint | None) -> Process | None:
        """Forbids what ends a text while that, from `start` on, has too few tokens."""
        if not self.min_new_tokens:
            return constraint
        ends = [*self.eos, *(stop[0] for stop in self.stop if len(stop) == 1)]

        def constrain(tokens: TokenIds, values: Logits) -> Logits:
            if constraint is not None:
                values = constraint(tokens, values)
            if len(tokens) - start >= self.min_new_tokens:
                return values
            going_on = values.copy()
            going_on[ends] = -math.inf
            return going_on if going_on.max() > -math.inf else values

        return constrain


@dataclass
class Stream:
    """One session's generation: the tokens it may still produce, and what ends it earlier.

    Attributes:
        sampling: the generation's, with the stream's own seed and start.
        before: the last tokens before the first one.
        produced: tokens so far. A token that was sampled is part of the transcript; it is produced
            once its log-probability and text are known.
        piece: the text that the last token completed, if text is wanted as it comes.
    """

    transcript: Transcript
    sampling: Sampling
    generation: Generation
    speculation: Speculation | None = None
    before: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    prompt_tokens: int = 0
    answer: AnswerText | None = None
    processors: Processors | None = None
    constraint: Constraint | None = None
    produced: list[int] = field(default_factory=list)
    produced_logprobs: list[float] = field(default_factory=list)
    produced_top: list[Alternatives] = field(default_factory=list)
    piece: str = ""
    begun: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # when it came
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
    def remaining(self) -> int:
        """Tokens it may still produce."""
        return self.generation.max_new_tokens - len(self.produced)

    @property
    def finish(self) -> FinishReason | None:
        """Why it has ended: "eos", "stop" or "length"; None while it goes on."""
        if self.stopped_by is not None:
            return "stop"
        if self.produced:
            if self.produced[-1] in self.generation.eos:
                return "eos"
            if self.constraint is not None and self.constraint.ended(self.produced):
                return "stop"
        return None if self.remaining > 0 else "length"

    @property
    def stopped_by(self) -> str | tuple[int, ...] | None:
        """Which of the strings or sequences of tokens in `stop` has ended it."""
        if self.answer is not None and self.answer.stopped_by is not None:
            return self.answer.stopped_by
        least = self.generation.min_new_tokens
        if len(self.produced) <= least and least:
            return None
        if not self.produced or self.produced[-1] in self.generation.eos:
            return None
        ends = (stop for stop in self.generation.stop if tuple(self.produced[-len(stop) :]) == stop)
        return next(ends, None)

    @property
    def reads_tokens(self) -> bool:
        """Whether its choices depend on the tokens before them, and not on logits alone."""
        return self.sampling.reads_tokens or self.processors is not None

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.finish is None

    def sample(self) -> int | GeneratedToken:
        """Samples the next token, which becomes the session's pending one."""
        return self._take(self.transcript.sample(self.sampling, self.processors))

    def sampled_before(self) -> int | GeneratedToken | None:
        """The token that an interrupted `sample` has left pending; None if it left none.

        REQUIRES: nothing but `sample` has changed the transcript since the stream began.
        """
        pending, count = self.transcript.pending, len(self.produced)
        if pending is None or self.transcript.length != self.prompt_tokens + count + 1:
            return None
        del self.produced_logprobs[count:], self.produced_top[count:]
        if self.answer is not None:
            self.answer = self.generation.answer(self.before)
            for place, token in enumerate(self.produced):
                self.generation.push(self.answer, token, place)
        return self._take(pending)

    def token(self, index: int) -> int | GeneratedToken:
        """A token that it has produced, as `sample` returned it."""
        token = self.produced[index]
        if not self.generation.logprobs:
            return token
        top = self.produced_top[index] if self.generation.top_logprobs else ()
        return GeneratedToken(token, self.produced_logprobs[index], top)

    def begin_with(self, tokens: Sequence[int | GeneratedToken]) -> None:
        """Takes over the tokens that an earlier stream of the same arguments produced.

        REQUIRES: it has produced none. They have log-probabilities if it has.
        """
        for token in tokens:
            if isinstance(token, GeneratedToken):
                self.produced_logprobs.append(token.logprob)
                if self.generation.top_logprobs:
                    self.produced_top.append(token.top)
            self._add(token.id if isinstance(token, GeneratedToken) else token)

    def _take(self, token: int) -> int | GeneratedToken:
        """Adds a sampled token to those produced, with its log-probability and text."""
        made: int | GeneratedToken = token
        if self.generation.logprobs:
            count = self.generation.top_logprobs
            logits = self.transcript.known_logits
            assert logits is not None
            distribution = Distribution(logits, self.generation.logprob_temperature)
            logprob = float(np.float32(distribution.log_probability(token)))
            top = distribution.top(count) if count else ()
            self.produced_logprobs.append(logprob)
            if count:
                self.produced_top.append(top)
            made = GeneratedToken(token, logprob, top)
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self._add(token)
        return made

    def _add(self, token: int) -> None:
        """Adds a token and its text to those produced."""
        piece = ""
        if self.answer is not None:
            piece = self.generation.push(self.answer, token, count=len(self.produced))
        self.piece = piece
        self.produced.append(token)
        if self.answer is not None and self.finish is not None:
            self.piece = piece + self.answer.finish()

    def result(self) -> dict[str, Any]:
        """The fields of a `Completion` that it knows, as of now."""
        generation, text = self.generation, None
        if self.answer is not None:
            if self.finish is not None:
                self.answer.finish()  # again, if an interrupt came before it
            text = self.answer.text
        elif generation.tokenizer is not None:
            text = text_of(self.produced, self.before, generation.tokenizer)
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": np.array(self.produced, dtype=np.int32),
            "text": text,
            "logprobs": (
                np.array(self.produced_logprobs, dtype=np.float32) if generation.logprobs else None
            ),
            "top_logprobs": list(self.produced_top) if generation.top_logprobs else None,
            "stopped_by": self.stopped_by,
            "seed": self.sampling.seed,
            "speculation": (
                SpeculationStats() if self.speculation is None else self.speculation.stats
            ),
            "first_token_s": None if self.first_token is None else self.first_token - self.begun,
            "total_s": time.perf_counter() - self.begun,
        }


def seeds_of(seed: Integer | Iterable[Integer] | None, defaults: list[int]) -> list[int]:
    """One seed per stream: `defaults` if `seed` is None, `seed` for all, or those it lists."""
    if seed is None:
        return defaults
    if is_integer(seed):
        return [as_integer(seed, "seed", 0)] * len(defaults)
    seeds = [as_integer(each, "seed", 0) for each in listed(seed, "seed", "integers")]
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
    ids = [eos] if is_integer(eos) else listed(eos, "eos", "token ids")
    return frozenset(as_token_ids(ids, core.facts.vocab_size, "eos").tolist())


def _constraints(
    core: EngineCore, grammar: object, eos: frozenset[int]
) -> Callable[[int], Constraint] | None:
    """Makes the constraints of a grammar. Raises InvalidArgumentError."""
    if grammar is None:
        return None
    if not isinstance(grammar, Grammar):
        raise InvalidArgumentError(
            f"grammar is {grammar!r}; expected a kvpager.grammar.Grammar, such as "
            "Grammar.json_schema(schema)"
        )
    if core.tokenizer is None:
        raise InvalidArgumentError(
            "grammar is given, but the engine has no tokenizer; give Engine(model, tokenizer=...)"
        )
    compiler = compiler_of(core.tokenizer, core.facts.vocab_size, eos)
    compiler.check(grammar)
    return partial(compiler.constraint, grammar)


def _stops(core: EngineCore, stop: Stops) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Sequences of token ids, and strings, of which each ends a generation."""
    ids: list[tuple[int, ...]] = []
    strings: list[str] = []
    parts = [stop] if isinstance(stop, str) else listed(stop, "stop", "texts and token ids")
    for i, part in enumerate(parts):
        if not isinstance(part, str):
            ids.append(tuple(as_token_ids(part, core.facts.vocab_size, f"stop[{i}]").tolist()))
        elif not part:
            raise InvalidArgumentError(f"stop[{i}] is empty; expected text or token ids")
        elif core.tokenizer is None:
            raise InvalidArgumentError(
                f"stop[{i}] is {part!r}, but the engine has no tokenizer; give Engine(model, "
                "tokenizer=...), or token ids"
            )
        else:
            strings.append(part)
    return tuple(ids), tuple(strings)


def _models_end_tokens(model: Any) -> frozenset[int]:
    for holder in (getattr(model, "generation_config", None), model.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
