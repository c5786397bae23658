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
        session: the one given as prompt, or with `keep_session` the one made for the request.
    """

    index: int
    error: Exception | None
    session: Session | None
    choice: int = 0
