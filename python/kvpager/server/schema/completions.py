"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvpager.server.schema.common import Answer, Sampled, TokenId, Usage
from kvpager.server.schema.neutral import only

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(Sampled):
    """The body of a completion."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[str | None, only("")] = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, only(0)] = None


class CompletionLogprobs(Answer):
    """Log-probabilities of tokens, as lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    """The answer of a completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    session_id: str | None = None
