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
        cached_tokens: tokens of the prompt whose K/V were there: held by the session, shared, or
            restored.
        computed_tokens: tokens of the prompt whose K/V were computed for it, damaged ones that were
            computed again included. Together with `cached_tokens` all that were prefilled.
        queue_s: seconds from its submission until it was first admitted; None if it never was.
        error: the exception, if `finish_reason` is "error".
        session: the one given as prompt, or with `keep_session` the one made for the request.
    """

    index: int
    error: Exception | None
    session: Session | None
    choice: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float | None = None
