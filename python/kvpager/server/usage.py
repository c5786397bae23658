"""Counts of tokens, exactly those that were and were not computed."""

from __future__ import annotations

from collections.abc import Sequence

from kvpager.requests.completion import RequestCompletion
from kvpager.server.schema.common import PromptDetails, Usage


def usage_of(prompts: Sequence[Sequence[RequestCompletion]]) -> Usage:
    """Of the choices of each prompt. A prompt counts once, as its first choice had it."""
    first = [choices[0] for choices in prompts]
    prompt = sum(one.prompt_tokens for one in first)
    generated = sum(len(one.tokens) for choices in prompts for one in choices)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(
            cached_tokens=sum(one.cached_tokens for one in first),
            cache_write_tokens=sum(one.computed_tokens for one in first),
        ),
    )
