"""Turns of a conversation: messages in, and the prompt of an answer prefilled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.stream import Generation
from kvpager._runtime.scheduling.trim import trim_to_common
from kvpager._runtime.text.conversation import ASSISTANT, Conversation, LastAnswer, checked_messages
from kvpager._runtime.text.template_input import CONTROL_TOKENS, ControlTokensAs
from kvpager._runtime.text.tokenizer import Message, Rendering, Tokenizer
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import Integer, as_flag, listed, refusal
from kvpager._support.tokens import TokenIds
from kvpager.errors import ContextLengthError, InvalidArgumentError

MOST_NEW_TOKENS = 1024  # of an answer, where the caller names no number


def settled(core: EngineCore, transcript: Transcript) -> Conversation:
    """The conversation with its last answer as a message, as far as it was produced."""
    conversation = transcript.conversation
    if not conversation.is_open:  # as before nearly every prefill: the tokens need no copy
        return conversation
    return conversation.settled(transcript.tokens, core.tokenizer)


def require_tokenizer(core: EngineCore, what: str) -> Tokenizer:
    """Raises InvalidArgumentError if the engine has none. `what`: needs it."""
    if core.tokenizer is None:
        raise InvalidArgumentError(
            f"{what}: the engine has no tokenizer; give Engine(model, tokenizer=...)"
        )
    return core.tokenizer


@dataclass(frozen=True)
class PlannedTurn:
    """A checked turn of a conversation, before anything has changed.

    Attributes:
        ids: the whole prompt.
        generation: of the answer.
        conversation: once the answer is begun.
    """

    ids: TokenIds
    generation: Generation
    conversation: Conversation


def plan_turn(
    core: EngineCore,
    transcript: Transcript,
    messages: str | Sequence[Message],
    max_new_tokens: Integer | None,
    *,
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    seed: Integer | None,
    logprobs: bool,
    default_new_tokens: int = MOST_NEW_TOKENS,
    control_tokens: ControlTokensAs = "text",
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    most_tokens: int | None = None,
) -> PlannedTurn:
    """Checks a turn and renders its prompt; arguments and errors as for `Session.chat`.

    default_new_tokens: most tokens of the answer where `max_new_tokens` is None.
    add_generation_prompt: whether the template begins an answer.
    most_tokens: see `Scheduler.chat`.
    """
    core.check_open(transcript)
    tokenizer = require_tokenizer(core, "chat")
    generation = Generation.checked(
        core, max_new_tokens, options, logprobs=logprobs, otherwise=default_new_tokens
    )
    generation.check_seed(seed)
    before = settled(core, transcript)
    if isinstance(messages, str):
        whole = [*before.messages, {"role": "user", "content": messages}]
    else:
        whole = checked_messages(messages, before.messages)
    template = _variables(chat_template_kwargs)
    if tools is not None:
        template["tools"] = _tools(tools)
    if control_tokens not in CONTROL_TOKENS:
        raise refusal("control_tokens", control_tokens, '"text" or "tokens"')
    as_flag(continue_final_message, "continue_final_message")
    begun = _check_last(whole, continue_final_message, add_generation_prompt)
    rendering = Rendering(template, control_tokens, continue_final_message, add_generation_prompt)
    turn = before.turn(whole, tokenizer, rendering)
    length, limit = len(turn.ids), core.positions.most
    if most_tokens is not None:
        generation = replace(
            generation, max_new_tokens=within(length, generation.max_new_tokens, most_tokens)
        )
    elif max_new_tokens is None and limit is not None:
        left = max(1, min(generation.max_new_tokens, limit - length))
        generation = replace(generation, max_new_tokens=left)
    core.positions.check(length + generation.max_new_tokens, "the conversation with max_new_tokens")
    answer = LastAnswer(length, generation.stop_strings, continues=begun)
    conversation = Conversation(turn.messages, turn.stretches, answer, turn.shown)
    return PlannedTurn(turn.ids, generation, conversation)


def check_keeps(core: EngineCore, transcript: Transcript, turn: PlannedTurn) -> None:
    """Raises InvalidArgumentError for a turn that would drop text which no message has.

    Such text is from `prefill`, `append` or `generate`. A turn whose prompt begins with the whole
    text drops nothing.
    """
    text, ends, held = transcript.tokens, 0, settled(core, transcript)
    if held.untaken:
        return
    for stretch in held.stretches:
        if not np.array_equal(text[ends : ends + len(stretch.ids)], stretch.ids):
            return  # the text was cut or replaced since
        ends += len(stretch.ids)
    if ends < len(text) and not np.array_equal(turn.ids[: len(text)], text):
        raise InvalidArgumentError(
            f"chat: {len(text) - ends} tokens from {ends} on are in no message, and the chat "
            f"template's text would replace them; give them as a message, such as a system "
            f"message with the document, or trim({ends}) first"
        )


def renders_as_written(
    core: EngineCore,
    transcript: Transcript,
    messages: Sequence[Message],
    rendering: Rendering,
) -> bool:
    """Whether the template's text of `messages` begins with all that the transcript has."""
    tokenizer = require_tokenizer(core, "chat")
    held = settled(core, transcript)
    try:
        shown = tokenizer.shown(messages, rendering, held.shown)
        text = tokenizer.render(messages, rendering, shown)
    except InvalidArgumentError:
        return False
    return text.startswith("".join(stretch.text for stretch in held.stretches))


def keep_messages(
    core: EngineCore, transcript: Transcript, count: int, rendering: Rendering
) -> int:
    """Keeps the first `count` messages of a conversation and their text; returns its tokens.

    The text is cut behind its last answer, and where one prompt has all of it, behind its last
    token. 0: none is left, as where the template begins it otherwise now, without its turns' tools.

    REQUIRES: there are so many, and a tokenizer.
    """
    held = settled(core, transcript)
    if count == len(held.messages):
        return transcript.length
    ids, conversation = np.zeros(0, np.int32), Conversation()
    if count:
        turn = held.turn(held.messages[:count], require_tokenizer(core, "messages"), rendering)
        whole = tuple(one for one, old in zip(turn.stretches, held.stretches) if one is old)
        ids = np.concatenate([one.ids for one in whole]) if whole else turn.ids
        conversation = Conversation(turn.messages, whole, shown=turn.shown, untaken=not whole)
    kept = trim_to_common(core, transcript, ids)
    transcript.conversation = conversation
    return kept


def _check_last(messages: Sequence[Message], continues: bool, prompted: bool) -> int:
    """The characters of the last message if the answer goes on with it, else 0.

    Raises:
        InvalidArgumentError: the last message does not fit these options.
    """
    last = messages[-1] if messages else {}
    is_answer = last.get("role") == ASSISTANT
    place = f"messages[{len(messages) - 1}]"
    if not continues:
        if is_answer and prompted:
            raise InvalidArgumentError(
                f"{place} is the assistant's, and the last; expected a message to answer, or "
                "continue_final_message to go on with it"
            )
        return 0
    content = last.get("content")
    if not is_answer or last.get("tool_calls") or not isinstance(content, str) or not content:
        raise InvalidArgumentError(
            f"continue_final_message is set, but {place} is {dict(last)!r}; expected an "
            "assistant's message with text, and without tool_calls"
        )
    return len(content)


def within(prompt_tokens: int, max_new_tokens: int, most_tokens: int) -> int:
    """`max_new_tokens`, cut to what a prompt leaves. Raises ContextLengthError if that is none."""
    if prompt_tokens >= most_tokens:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens; expected less than {most_tokens}, the most of "
            "a prompt and its answer",
            prompt_tokens=prompt_tokens,
            limit=most_tokens,
        )
    return min(max_new_tokens, most_tokens - prompt_tokens)


def _variables(given: object) -> dict[str, Any]:
    """A copy of `chat_template_kwargs`. Raises InvalidArgumentError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise refusal("chat_template_kwargs", given, "a dictionary {the variable's name: value}")
    return dict(given)


def _tools(given: Any) -> list[Any]:
    """A list of `tools`. Raises InvalidArgumentError."""
    expected = "a list of tools, each a function or a dictionary with its JSON schema"
    tools = listed(given, "tools", expected)
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) and not callable(tool):
            raise refusal(
                f"tools[{number}]", tool, "a function, or a dictionary with a JSON schema"
            )
    return tools
