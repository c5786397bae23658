"""Proposals copied from the text itself: the tokens after an earlier occurrence of its last ones.

Prompt lookup decoding (Saxena 2023). It keeps no index, which would have to follow appends, trims
and rejections: a few vector comparisons find the place, mostly in 10 us in 8K tokens and 70 us in
128K.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError

_MOST = 1024  # longest n-gram; a longer one predicts no better


class PromptLookup:
    """Proposes the continuation of the longest n-gram that ends the text and occurs in it before.

    Takes the most recent earlier occurrence. A continuation that reaches the end of the text starts
    over, so that even a short period is continued.

    A pure function of the tokens. Memory: two bytes per token during a call, none between calls.

    Example:
        >>> session.generate(256, speculate=lambda: PromptLookup(max_ngram=8, min_ngram=2))
    """

    def __init__(self, max_ngram: int = 16, min_ngram: int = 3) -> None:
        """Longer n-grams than `max_ngram` count as equally good; shorter than `min_ngram`, as none.

        Raises:
            InvalidArgumentError: not integers with 1 <= min_ngram <= max_ngram <= 1024.
        """
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if type(value) is not int or not 1 <= value <= _MOST:
                raise InvalidArgumentError(
                    f"PromptLookup.{name} is {value!r}; expected an integer from 1 to {_MOST}"
                )
        if min_ngram > max_ngram:
            raise InvalidArgumentError(
                f"PromptLookup.min_ngram is {min_ngram}; expected at most max_ngram, {max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, tokens: TokenIds, count: int) -> list[int]:
        """`count` token ids that may follow `tokens` [n] int32; [] if no n-gram occurs before."""
        start = self._continuation(tokens)
        if start is None:
            return []
        proposed: list[int] = np.resize(tokens[start:], count).tolist()  # starts over at the end
        return proposed

    def _continuation(self, tokens: TokenIds) -> int | None:
        """The index of the token after the earlier n-gram; None without one."""
        longest = min(self.max_ngram, len(tokens) - 1)
        if longest < self.min_ngram:
            return None
        ngram = 1
        agree = tokens[:-1] == tokens[-1]  # indexed by the start of an n-gram
        while ngram < longest and (ngram < self.min_ngram or _is_dense(agree)):
            longer = agree[1:] & (tokens[: -ngram - 1] == tokens[-ngram - 1])
            if ngram >= self.min_ngram and not longer.any():
                return len(agree) - 1 - int(agree[::-1].argmax()) + ngram
            agree, ngram = longer, ngram + 1
        starts = np.flatnonzero(agree)
        while starts.size and ngram < longest:
            before = starts[starts > 0] - 1
            before = before[tokens[before] == tokens[-ngram - 1]]
            if not before.size:
                break
            starts, ngram = before, ngram + 1
        return int(starts[-1]) + ngram if starts.size else None


def _is_dense(places: npt.NDArray[np.bool_]) -> bool:
    """Whether comparing all places is faster than listing the equal ones."""
    return int(np.count_nonzero(places)) * 16 > len(places)
