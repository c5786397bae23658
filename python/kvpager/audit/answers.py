"""Answers of a completion, with what log-probabilities and token ids they have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpager.audit.client import HttpError

_LOWEST = -9000.0  # vLLM writes -9999 for minus infinity
_LARGEST_COUNT = 2**53  # of tokens


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        text: its text, or what stands for it.
        logprob: natural logarithm; None where it is null, not a number or minus infinity.
        top: log-probabilities of the most likely tokens, and of this one, by their texts.
    """

    text: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        text: all of it.
        tokens: with log-probabilities; without these, what the server lets see of tokens: their
            ids, or else characters.
        scored: whether there are log-probabilities.
        ids: of `tokens`; None where the server does not return them.
        prompt_ids: likewise of the prompt.
        prompt_tokens: of the prompt; None where the server does not count them.
        cached_tokens: those of them whose K/V were reused; None where it is not reported.
    """

    text: str
    tokens: tuple[Token, ...]
    scored: bool
    ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    cached_tokens: int | None

    def unscored(self) -> Answer:
        """The same answer as a server without log-probabilities would have given it."""
        return replace(self, tokens=_unscored(self.text, self.ids), scored=False)


def read_answer(events: Sequence[Any]) -> Answer:
    """The answer in the objects of one completion. Raises HttpError if they are something else."""
    try:
        return _read(events)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise HttpError(
            f"the answer is not a completion: {type(error).__name__} {error}"
        ) from error


def _read(events: Sequence[Any]) -> Answer:
    text, tokens, ids = "", list[Token](), list[int]()
    usage: Mapping[str, Any] = {}
    prompt_ids, scored = None, False
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"][:1]:
            text += choice["text"]
            ids += choice.get("token_ids") or ()
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            if choice.get("logprobs"):
                scored = True
                tokens += _tokens(choice["logprobs"])
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text=text,
        tokens=tuple(tokens) if scored else _unscored(text, ids),
        scored=scored,
        ids=tuple(ids) if ids and len(ids) == (len(tokens) or len(ids)) else None,
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= _LARGEST_COUNT else None


def _unscored(text: str, ids: Sequence[int] | None) -> tuple[Token, ...]:
    return tuple(Token(str(part), None, {}) for part in (ids or text))


def _tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    """Of OpenAI's completions, or of chats, whose form llama.cpp uses for both."""
    if logprobs.get("content") is not None:
        return [
            _token(
                entry["token"],
                entry["logprob"],
                {top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()},
            )
            for entry in logprobs["content"]
        ]
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return [
        _token(text, logprob, top or {})
        for text, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops)
    ]


def _token(text: str, logprob: float | None, top: Mapping[str, float | None]) -> Token:
    if not isinstance(text, str):
        raise TypeError(f"token {text!r}")
    values = {name: value for name in top if (value := _number(top[name])) is not None}
    chosen = _number(logprob)
    return Token(text, chosen, values if chosen is None else values | {text: chosen})


def _number(value: Any) -> float | None:
    """A log-probability; None for all that is none."""
    if isinstance(value, (int, float)) and math.isfinite(value) and value > _LOWEST:
        return float(value)
    return None
