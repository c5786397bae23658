"""Turns of a conversation: messages in, and the prompt of an answer prefilled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.execution.core import EngineCore
from kvpager.scheduling.stream import Generation
from kvpager.text.conversation import Conversation, OpenAnswer, checked_messages
from kvpager.text.tokenizer import Message, Tokenizer
from kvpager.text.transcript import Transcript
from kvpager.tokens import Integer, TokenIds, as_integer

MOST_NEW_TOKENS = 1024  # of an answer, where the caller names no number


def settled(core: EngineCore, transcript: Transcript) -> Conversation:
    """The conversation with its last answer as a message, as far as it was produced."""
    return transcript.conversation.settled(transcript.tokens, core.tokenizer)


def require_tokenizer(core: EngineCore, what: str) -> Tokenizer:
    """Raises InvalidArgumentError if the engine has none. `what`: needs it."""
    if core.tokenizer is None:
        raise InvalidArgumentError(
            f"{what}: the engine has no tokenizer; give Engine(model, tokenizer=...)"
        )
    return core.tokenizer


def begin_turn(
    core: EngineCore,
    transcript: Transcript,
    messages: str | Sequence[Message],
    max_new_tokens: Integer | None,
    *,
    template: Mapping[str, Any],
    options: Mapping[str, Any],
    seed: Integer | None,
    logprobs: bool,
    update: Callable[[TokenIds], object],
) -> tuple[int, Conversation]:
    """Makes the transcript hold the prompt for the next answer.

    Returns how many tokens the answer may have, and the conversation once it is begun.

    Args:
        core: with a tokenizer.
        transcript: of the conversation.
        messages: as for `Session.chat`.
        max_new_tokens: likewise.
        template: further arguments of the chat template.
        options: of the generation, to be checked before anything changes.
        seed: likewise.
        logprobs: likewise.
        update: makes the transcript hold the whole prompt.
    """
    tokenizer = require_tokenizer(core, "chat")
    most = MOST_NEW_TOKENS
    if max_new_tokens is not None:
        most = as_integer(max_new_tokens, "max_new_tokens", 1)
    generation = Generation.checked(core, most, options, logprobs=logprobs)
    generation.check_seed(seed)
    before = settled(core, transcript)
    if isinstance(messages, str):
        whole = [*before.messages, {"role": "user", "content": messages}]
    else:
        whole = checked_messages(messages)
    turn = before.turn(whole, tokenizer, template)
    length, limit = len(turn.ids), core.positions.most
    if max_new_tokens is None and limit is not None:
        most = max(1, min(most, limit - length))
    core.positions.check(length + most, "the conversation with max_new_tokens")
    with transcript.reserve(max(length + most, transcript.length)):
        update(turn.ids)
    answer = OpenAnswer(length, generation.stop_strings)
    return most, Conversation(turn.messages, turn.stretches, answer)
