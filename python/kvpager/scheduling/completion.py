"""What a generation came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpager.sampling import Alternatives
from kvpager.speculation.speculation import SpeculationStats
from kvpager.tokens import TokenIds

FinishReason: TypeAlias = Literal[
    "eos", "stop", "length", "cancelled", "closed", "error", "timeout"
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """What a generation produced, and why it ended.

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
        first_token_s: seconds to its first token, for a request from its submission; None if there
            was none.
        total_s: seconds to its end, likewise.
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
