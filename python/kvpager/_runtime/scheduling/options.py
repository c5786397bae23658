"""The options of a generation, defined once for every function that takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, TypedDict

from kvpager._runtime.logits.arguments import Number
from kvpager._runtime.logits.processors import LogitsProcessor
from kvpager._runtime.scheduling.generation_config import AUTO, ConfigLike, options_of
from kvpager._runtime.text.template_input import ControlTokensAs
from kvpager._support.arguments import Integer, as_integer, check_names, is_finite, listed, refusal
from kvpager._support.tokens import TokenIdsLike, as_token_ids
from kvpager.errors import InvalidArgumentError
from kvpager.grammar import Grammar
from kvpager.progress import Progress
from kvpager.sampling import Sampling
from kvpager.speculation.speculation import Speculate

MODEL_EOS: Final = "model"
MOST_ALTERNATIVES = 20  # as in the OpenAI API

EndTokens: TypeAlias = Integer | Iterable[Integer] | Literal["model"] | None
Stops: TypeAlias = str | Iterable[str | TokenIdsLike]


class GenerationOptions(TypedDict, total=False):
    """Options of `Session.generate`, `Engine.generate_many`, `Engine.run` and `Scheduler.submit`.

    Attributes:
        temperature: 0 for greedy decoding, which is the default where the model's
            generation_config does not sample.
        top_k: choose among this many most likely tokens; 0, the default, for all.
        top_p: choose among the most likely tokens that together reach this probability; by default
            1, all.
        eos: token ids that end generation once produced; by default the model's; None for none.
        stop: what ends generation once this call has produced it: a string, or a list of strings
            and of sequences of token ids. Strings need the engine's tokenizer. The tokens are part
            of the session; `Completion.text` and streamed text end before the string.
        min_p: choose among the tokens at least this many times as likely as the most likely one;
            0, the default, for all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of every token
            that occurs in the text, prompt included; by default 1, off.
        presence_penalty: subtracted from the logits of tokens that this generation has produced; by
            default 0. A generation that goes on with an interrupted one counts its tokens too.
        frequency_penalty: subtracted from the same logits, once for each occurrence; by default 0.
        logit_bias: {token id: number to add to its logit}; -inf forbids it.
        suppress_tokens: token ids that are never produced.
        begin_suppress_tokens: token ids that are not produced first.
        top_logprobs: how many of the most likely tokens `GeneratedToken.top` lists, 0 (default) to
            20; needs logprobs=True.
        logprob_temperature: divides the logits that log-probabilities are of, as trainers do that
            divide by the temperature; by default 1, the model's own. Changes no token.
        logits_processor: callables (input_ids [1, n] int64, scores [1, vocab] float32) -> scores,
            as transformers has them, on the CPU; called once per token of each text, after bias and
            penalties and before the temperature. They are not saved with a session, and the text is
            a function of tokens and seed only as far as they are.
        grammar: a `kvpager.grammar.Grammar` that the text this call produces has to follow. It ends
            with an end token, or with "stop" where `eos` is None.
        min_new_tokens: how many tokens are produced before an end token, a string or a single token
            of `stop` can end the text; by default 0. A grammar that allows nothing else ends it.
        skip_special_tokens: whether `Completion.text` and streamed text leave out special tokens;
            by default True. The end token is in neither, unless `include_stop` is set.
        include_stop: whether they have the string of `stop` that ended the text; by default False.
        generation_config: "auto" (default): the model's own where it samples (do_sample), else
            none; "model": the model's own; a transformers GenerationConfig; or None. See
            docs/sampling.md. Options given by name come before what it says. A field that would
            change the text in a way that is not honoured is refused.
        speculate: "draft" (the engine's draft model), "prompt-lookup", or a callable that returns a
            fresh `kvpager.speculation.Proposer`. Guesses are verified in the same forwards. Tokens,
            the session's state after each of them and every bit stay the same; only the time
            changes. `Session.speculation` reports the gain. Needs `exact="all"`.
    """

    temperature: Number
    top_k: SupportsIndex
    top_p: Number
    eos: EndTokens
    stop: Stops
    min_p: Number
    repetition_penalty: Number
    presence_penalty: Number
    frequency_penalty: Number
    logit_bias: Mapping[int, float] | None
    suppress_tokens: Iterable[int] | None
    begin_suppress_tokens: Iterable[int] | None
    top_logprobs: SupportsIndex
    logprob_temperature: Number
    logits_processor: Iterable[LogitsProcessor] | None
    grammar: Grammar | None
    min_new_tokens: SupportsIndex
    skip_special_tokens: bool
    include_stop: bool
    generation_config: ConfigLike
    speculate: Speculate


class SeededOptions(GenerationOptions, total=False):
    """Options of `Session.generate`, which explains the further ones; but `stream`, `logprobs`."""

    seed: Integer | None


class GenerateOptions(SeededOptions, total=False):
    """All options of `Session.generate` but `stream`."""

    logprobs: bool


class ChatOptions(GenerateOptions, total=False):
    """All options of `Session.chat`, which explains the further ones, but `stream`."""

    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    control_tokens: ControlTokensAs
    continue_final_message: bool
    turn: Integer | None
    progress: Progress


class ChosenOptions(GenerationOptions):
    """Options of which each has a value, and what a generation_config says of the length."""

    max_new_tokens: int | None


DEFAULTS: GenerationOptions = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "eos": MODEL_EOS,
    "stop": (),
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "top_logprobs": 0,
    "logprob_temperature": 1.0,
    "logits_processor": None,
    "grammar": None,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "include_stop": False,
    "generation_config": AUTO,
    "speculate": None,
}


def repeatable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, to be read twice: what can be iterated over once is a list."""
    read = {
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in options.items()
    }
    stop = read.get("stop", ())
    if not isinstance(stop, str) and isinstance(stop, Iterable):
        read["stop"] = [list(part) if isinstance(part, Iterator) else part for part in stop]
    return read


def with_defaults(options: Mapping[str, Any], model: Any, *others: str) -> ChosenOptions:
    """Fills in the options not given: those of a generation_config, then defaults.

    model: of transformers, whose own config completes a given one. others: further names the
    function takes. Raises InvalidArgumentError for an unknown option, and for a config that is
    refused.
    """
    unknown = sorted(options.keys() - DEFAULTS.keys())
    check_names("generate", unknown[:1], [*DEFAULTS, *others])
    configured = options_of(options.get("generation_config", AUTO), model)
    chosen: Any = {"max_new_tokens": None, **DEFAULTS, **configured, **options}
    return chosen  # type: ignore[no-any-return]


def sampling_of(chosen: GenerationOptions, vocab_size: int) -> Sampling:
    """How these options, with defaults, choose tokens. Raises InvalidArgumentError."""
    values: Any = chosen  # which Sampling checks
    sampling = Sampling(
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        logit_bias={} if values["logit_bias"] is None else values["logit_bias"],
        begin_suppress_tokens=_ids(
            chosen["begin_suppress_tokens"], vocab_size, "begin_suppress_tokens"
        ),
    )
    forbidden = dict.fromkeys(
        _ids(chosen["suppress_tokens"], vocab_size, "suppress_tokens"), -math.inf
    )
    outside = [token for token in sampling.logit_bias if token >= vocab_size]
    if outside:
        raise InvalidArgumentError(
            f"logit_bias has token id {outside[0]}; expected ids from 0 to {vocab_size - 1}"
        )
    if not forbidden:
        return sampling
    return replace(sampling, logit_bias={**sampling.logit_bias, **forbidden})


def alternatives_of(chosen: GenerationOptions, logprobs: bool) -> int:
    """`top_logprobs`. Raises InvalidArgumentError."""
    count = as_integer(chosen["top_logprobs"], "top_logprobs", 0, MOST_ALTERNATIVES)
    if count and not logprobs:
        raise refusal("top_logprobs", count, "0, or logprobs=True with it")
    return count


def as_temperature(value: object, name: str) -> float:
    """What divides the logits that log-probabilities are of. Raises InvalidArgumentError."""
    if not (is_finite(value) and value > 0):
        raise refusal(name, value, "a number above 0")
    return float(value)


def _ids(given: Iterable[int] | None, vocab_size: int, name: str) -> tuple[int, ...]:
    ids = [] if given is None else listed(given, name, "token ids")
    return tuple(as_token_ids(ids, vocab_size, name).tolist()) if ids else ()
