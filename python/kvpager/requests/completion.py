"""The result of one request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.session import Session
from kvpager.speculation.speculation import SpeculationStats
from kvpager.tokens import TokenIds


@dataclass(frozen=True, eq=False)
class Completion:
    """The result of a request of `Engine.run` or of a `Scheduler`.

    Attributes:
        index: number of the prompt, or of the submission, from 0.
        prompt_tokens: tokens of the prompt.
        tokens: the tokens produced, [n] int32.
        logprobs: their log-probabilities, [n] float32; None unless requested.
        finish: "eos", "stop", "length", "cancelled", "closed" (its engine was) or "error".
        seed: of sampling; the same seed gives the same tokens again.
        error: the exception, if finish is "error".
        session: the one given as prompt, or with `keep_session` the one made for the request.
        speculation: counters of this request's speculation.
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
