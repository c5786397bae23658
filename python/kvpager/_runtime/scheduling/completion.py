"""The result of a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpager._support.notebook import card
from kvpager._support.tokens import TokenIds
from kvpager._support.words import counted, duration
from kvpager.sampling import Alternatives
from kvpager.speculation.speculation import SpeculationStats

FinishReason: TypeAlias = Literal[
    "eos", "stop", "length", "cancelled", "closed", "error", "timeout"
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """The result of a generation: its tokens, and why it ended.

    Attributes:
        prompt_tokens: tokens of the text before it.
        tokens: the tokens produced, [n] int32; the last may be one that ended it.
        text: their text, up to a stop string and without special tokens; None if the engine has no
            tokenizer.
        logprobs: their log-probabilities, [n] float32; None unless requested.
        top_logprobs: for each the most likely tokens as (id, log-probability), by descending
            log-probability, equal ones by ascending id; None unless requested.
        finish_reason: "eos" (the model ended it), "stop" (one of `stop`), "length"
            (`max_new_tokens`), "cancelled" (also: its iterator was closed); of requests also
            "closed" (their engine was), "timeout" (after `timeout_s`) and "error".
        stopped_by: which of `stop` ended it, a string or token ids; None if none did.
        seed: of sampling; the same seed gives the same tokens again.
        speculation: counters of its speculation.
        first_token_s: seconds from the call to its first token: with `chat` the prefill is part of
            them, before `generate` it was a call of its own; for a request, from its submission.
            None if there was no token.
        total_s: seconds from the same moment to its end.
    """

    prompt_tokens: int
    tokens: TokenIds
    text: str | None
    logprobs: npt.NDArray[np.float32] | None
    top_logprobs: list[Alternatives] | None
    finish_reason: FinishReason
    seed: int
    speculation: SpeculationStats
    first_token_s: float | None
    total_s: float
    stopped_by: str | tuple[int, ...] | None = None

    def __str__(self) -> str:
        return repr(self) if self.text is None else self.text

    def _repr_html_(self) -> str:
        """The text and its figures, for notebooks."""
        count, figures = len(self.tokens), [counted(len(self.tokens), "token")]
        figures.append(f"{counted(self.prompt_tokens, 'token')} before them")
        if self.first_token_s is not None:
            figures.append(f"first token after {duration(self.first_token_s)}")
            if count > 1 and self.total_s > self.first_token_s:
                rate = (count - 1) / (self.total_s - self.first_token_s)
                figures.append(f"{rate:.1f} tokens/s after it")
        facts = [("text", self.text)] if self.text is not None else []
        facts.append(("ended by", self.finish_reason))
        return card("Completion", [*facts, ("figures", ", ".join(figures))])
