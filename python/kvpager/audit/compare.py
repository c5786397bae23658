"""Compares two answers to one text, and tells rounding from corruption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from kvpager.audit.answers import Answer, Token

Result: TypeAlias = Literal["exact", "not exact", "corrupt", "unknown"]

EXACT: Result = "exact"
NOT_EXACT: Result = "not exact"
CORRUPT: Result = "corrupt"
UNKNOWN: Result = "unknown"
CHANGED = "the model has changed"  # why a cold answer after a restart is "not exact"

_RUN = 8  # times the same token at the end of an answer, which the reference has not
_HALF = math.log(2)  # a greedy answer ends where the end is likelier than any token
_SHARED = 4  # tokens of another prompt's answer are no accident


@dataclass(frozen=True)
class Comparison:
    """One answer compared with the reference for the same text.

    Positions count from the first token of the reference's answer. Log-probabilities are compared
    up to the first token that differs, included: until there both answers follow the same text.

    Attributes:
        prompt: number of the prompt, from 0.
        result: "exact": equal tokens and log-probabilities; "not exact": a difference that
            rounding explains; "corrupt": one it does not; "unknown": could not be compared.
        why: for all but "exact".
        tokens: number of positions compared.
        first_token: position of the first other token; None if there is none.
        largest: of the differences between log-probabilities, in nats; at least that, where a
            token is among the most likely of one answer only.
        from_token: position of the first difference that counts for `result`; None if none does.
        cached_tokens: of the prompt, as the server reports them; None if it does not.
        prompt_tokens: likewise.
    """

    prompt: int
    result: Result
    why: str = ""
    tokens: int = 0
    first_token: int | None = None
    largest: float = 0.0
    from_token: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return dict(vars(self))


def compare(
    prompt: int,
    answer: Answer,
    references: Sequence[Answer],
    limit: float,
    *,
    skip: int = 0,
) -> Comparison:
    """Compares an answer with `references[prompt]`.

    Args:
        prompt: number of the prompt.
        answer: to its text, followed by the first `skip` tokens of the reference's answer.
        references: cold answers to every prompt.
        limit: the largest difference of log-probabilities that rounding explains, in nats.
        skip: tokens of the reference that were part of the question.

    An answer that came without log-probabilities, which the reference has, is compared by token
    ids, or by characters where there are none; positions count these then.
    """
    scored = answer.scored and references[prompt].scored
    lost = references[prompt].scored and not answer.scored
    if lost:
        if answer.ids is None or references[prompt].ids is None:  # by characters
            answer = replace(answer, ids=None)
            skip = len("".join(token.text for token in references[prompt].tokens[:skip]))
            references = [replace(reference, ids=None) for reference in references]
        references = [reference.unscored() for reference in references]
        answer = answer.unscored()
    expected = references[prompt].tokens[skip:]
    pairs = list(zip(answer.tokens, expected))
    other = next((i for i, (ours, theirs) in enumerate(pairs) if ours.text != theirs.text), None)
    if other is None and len(answer.tokens) != len(expected):
        other = len(pairs)  # one answer ended where the other goes on
    compared = pairs if other is None else pairs[: other + 1]
    apart = [distance(ours, theirs) for ours, theirs in compared] if scored else []
    if scored and other == len(pairs):
        longer = max(answer.tokens, expected, key=len)
        apart.append(max(0.0, (longer[other].logprob or 0.0) + _HALF))
    largest = max(apart, default=0.0)

    def found(result: Result, why: str = "", start: int | None = None) -> Comparison:
        return Comparison(
            prompt,
            result,
            why,
            tokens=len(compared),
            first_token=None if other is None else other + skip,
            largest=largest,
            from_token=None if start is None else start + skip,
            cached_tokens=answer.cached_tokens,
            prompt_tokens=answer.prompt_tokens,
        )

    if scored:
        bad = next((i for i, token in enumerate(answer.tokens) if token.logprob is None), None)
        if bad is not None:
            return found(CORRUPT, "a log-probability is not a number", bad)
    if other is None and largest == 0 and not lost:
        return found(EXACT)
    whose = _whose(answer, references, prompt, skip) if other is not None else None
    repeats = other is not None and _repeats(answer.tokens) and not _repeats(expected)
    kind = "one token over and over" if repeats else ""
    if whose is not None:
        kind = f"this is the answer to prompt {whose}"
    if scored and largest > limit:
        far = next(i for i, value in enumerate(apart) if value > limit)
        kind = kind or "beyond rounding"
        why = f"{kind}: {largest:.3g} nats apart, rounding explains {limit:.2g}"
        return found(CORRUPT, why, far)
    if kind and not scored:
        return found(CORRUPT, kind, other)
    if lost and other is not None:
        return found(CORRUPT, "another text, whose log-probabilities cannot be written", other)
    if lost:
        return found(UNKNOWN, "the same text, but log-probabilities are refused")
    start = other if not apart else next((i for i, value in enumerate(apart) if value > 0), other)
    if not scored:
        return found(UNKNOWN, "another text, and no log-probabilities to judge it by", start)
    return found(NOT_EXACT, "rounding", start)


def distance(ours: Token, theirs: Token) -> float:
    """The largest difference between log-probabilities of two tokens at one position, in nats.

    A token that only one of them lists is less likely for the other than all that it lists.
    """
    both = ours.top.keys() & theirs.top
    apart = max((abs(ours.top[token] - theirs.top[token]) for token in both), default=0.0)
    for one, another in ((ours.top, theirs.top), (theirs.top, ours.top)):
        least = min(another.values(), default=0.0)
        missing = (value - least for token, value in one.items() if token not in another)
        apart = max(apart, *missing, 0.0)
    return apart


def _whose(answer: Answer, references: Sequence[Answer], prompt: int, skip: int) -> int | None:
    """The other prompt whose answer this is, if it is one's."""
    texts = [token.text for token in answer.tokens]
    own = [token.text for token in references[prompt].tokens[skip:]]
    for number, reference in enumerate(references):
        theirs = [token.text for token in reference.tokens[skip:]]
        shared = min(len(texts), len(theirs))
        if number == prompt or shared < _SHARED or texts[:shared] != theirs[:shared]:
            continue
        if own[:_SHARED] != theirs[:_SHARED]:
            return number
    return None


def _repeats(tokens: Sequence[Token]) -> bool:
    last = [token.text for token in tokens[-_RUN:]]
    return len(last) == _RUN and len(set(last)) == 1
