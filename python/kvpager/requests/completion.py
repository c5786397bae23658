"""The result of one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.scheduling.completion import Completion
from kvpager.session import Session


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestCompletion(Completion):
    """The result of a request of `Engine.run` or of a `Scheduler`.

    Attributes:
        index: number of the prompt, or of the submission, from 0.
        choice: which of the `n` completions of its prompt, from 0.
        error: the exception, if `finish_reason` is "error".
        cached_tokens: prompt tokens that were not computed for this request: shared with other
            texts, from a store, or held by the given session.
        computed_tokens: prompt tokens that were, each counted once, also if they were computed
            again. The two add up to `prompt_tokens` unless it ended before its prompt was computed.
        queue_s: seconds from its submission to its first admission; to its end if there was none.
        session: the one given as prompt, or with `keep_session` the one made for the request.
    """

    index: int
    error: Exception | None
    session: Session | None
    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    choice: int = 0
