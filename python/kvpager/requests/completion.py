"""What became of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.session import Session
from kvpager.speculation.speculation import SpeculationStats
from kvpager.tokens import TokenIds


@dataclass(frozen=True, eq=False)
class Completion:
    """The end of a request of `Engine.run` or of a `Scheduler`.

    Attributes:
        index: number of the prompt, or of the submission, from 0.
        prompt_tokens: tokens of the prompt.
        tokens: what was produced, [n] int32.
        logprobs: their log-probabilities, [n] float32, where they were asked for.
        finish: "eos", "stop", "length", "cancelled", "closed" (its engine was) or "error".
        seed: of the draws: given again, it gives the same tokens.
        error: why, where finish is "error".
        session: the one given as prompt, or the one made for it where that was to be kept.
        speculation: what speculation was worth to this request.
        first_token_s: seconds from its submission to its first token; None if there was none.
        total_s: seconds from its submission to its end.
    """

    index: int
    prompt_tokens: int
    tokens: TokenIds
    logprobs: npt.NDArray[np.float32] | None
    finish: str
    seed: int
    error: Exception | None
    session: Session | None
    speculation: SpeculationStats
    first_token_s: float | None
    total_s: float
