"""Messages of OpenAI's requests for a chat template, and the places up to which they are saved.

A place is the end of a part of a message, set by `prompt_cache_breakpoint` or Anthropic's
`cache_control`. The text up to it is the chat template's text of the messages, up to where a word
inserted there appears. It is saved to the token, also within a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from kvpager._runtime.text.conversation import ASSISTANT
from kvpager._runtime.text.tokenizer import Rendering, Tokenizer
from kvpager._support.tokens import TokenIds
from kvpager.server.errors import bad_request
from kvpager.server.histories import History
from kvpager.server.schema.chat import ChatRequest, Message, TokenizeRequest
from kvpager.server.schema.common import CacheOptions, new_id
from kvpager.server.schema.responses import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    Item,
)

MOST = 4  # breakpoints of one request that are written, as in both APIs
DEFAULT_TTL = "30m"
_WORD = "\u2063kvpager:breakpoint\u2063"
ROLES = {"developer": "system"}  # templates do not know it
Messages = list[dict[str, Any]]
_KNOWN_TO_TEMPLATES = {"name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}


class SavePoint(NamedTuple):
    """A place after `length` characters of the content of message `message`."""

    message: int
    length: int
    ttl: str


class Prefix(NamedTuple):
    """A beginning of a prompt that a breakpoint ends: its tokens, its name in a store, its TTL."""

    ids: TokenIds
    name: str
    ttl: str


def prefixes(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    rendering: Rendering,
    points: Sequence[SavePoint],
    salt: str | None,
) -> list[Prefix]:
    """Returns the prompt up to each of its last breakpoints; the template may omit some."""
    ids = tokenizer.prompt_ids(messages, rendering)
    found = []
    for point in points[-MOST:]:
        marked = [dict(message) for message in messages]
        content = marked[point.message]["content"] or ""
        marked[point.message]["content"] = content[: point.length] + _WORD + content[point.length :]
        text, word, _ = tokenizer.render(marked, rendering).partition(_WORD)
        count = _common(tokenizer.encode_prompt(text), ids) if word and text else 0
        if count:
            found.append(Prefix(ids[:count], _name(ids[:count], salt), point.ttl))
    return found


def _common(first: TokenIds, second: TokenIds) -> int:
    """Number of equal tokens at the beginning of both."""
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if different.size else count


def _name(ids: TokenIds, salt: str | None) -> str:
    digest = blake2b(ids.astype("<i4").tobytes(), digest_size=16, person=b"kvp-breakpoint")
    digest.update((salt or "").encode())
    return "prompt-" + digest.hexdigest()


def as_dicts(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Returns messages as dicts, each content as one text; nobody changes them."""
    known = messages.dicts if isinstance(messages, History) else ()
    found = (*known, *map(_as_dict, messages[len(known) :]))
    if isinstance(messages, History):
        messages.dicts = found
    return found


def save_points(contents: Iterable[Any], options: CacheOptions | None) -> list[SavePoint]:
    """Returns the breakpoints in the contents of messages."""
    default = (options.ttl if options is not None else None) or DEFAULT_TTL
    places = []
    for number, content in enumerate(contents):
        length = 0
        for part in content if isinstance(content, list) else ():
            length += len(part.text)
            point = getattr(part, "prompt_cache_breakpoint", None)
            if point is not None:
                places.append(SavePoint(number, length, point.ttl or default))
    return places


def ending(body: ChatRequest | TokenizeRequest) -> dict[str, bool]:
    """Returns arguments of `Service.rendering` about a prompt's end.

    The answer continues the last message, an assistant's, where the request asks for it.

    Raises:
        ApiError: it asks for two ends, or its last message is an assistant's and nothing is asked.
    """
    continued, prompted = body.continue_final_message, body.add_generation_prompt
    if continued and prompted:
        raise bad_request(
            "add_generation_prompt and continue_final_message are true; expected one of them",
            "continue_final_message",
        )
    is_answer = [one.role for one in body.messages or ()][-1:] == [ASSISTANT]
    wanted = continued if continued is not None else is_answer and prompted is False
    if is_answer and not wanted and prompted is not False:
        raise bad_request(
            "messages ends with a message of the assistant; expected one to answer, or "
            "continue_final_message: true to go on with it",
            "messages",
        )
    return {"continues": wanted, "generation_prompt": prompted is not False}


def _as_dict(message: Message) -> dict[str, Any]:
    values = message.model_dump(include=_KNOWN_TO_TEMPLATES, exclude_none=True)
    values |= {"role": ROLES.get(message.role, message.role), "content": text_of(message.content)}
    for call in values.get("tool_calls", ()):
        call.pop("index", None)
    return {name: value for name, value in values.items() if value != []}


def text_of(content: str | Sequence[Any] | None) -> str:
    """Returns the joined text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content
    return "".join(part.text for part in parts)


def messages_of(given: str | Sequence[Item]) -> Messages:
    """Returns messages for a chat template; consecutive calls become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: Messages = []
    reasoning = ""  # for the message or call that follows
    for item in given:
        if isinstance(item, InputReasoning):
            reasoning += "".join(part.text for part in item.content or item.summary or ())
            continue
        if isinstance(item, InputMessage):
            messages.append(
                {"role": ROLES.get(item.role, item.role), "content": text_of(item.content)}
            )
        elif isinstance(item, InputCallOutput):
            output = text_of(item.output)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        else:
            _add_call(messages, item)
        if reasoning and messages[-1]["role"] == ASSISTANT:
            messages[-1].setdefault("reasoning_content", reasoning)
        reasoning = ""
    return messages


def as_items(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the items of an input for display: each with an id, and content in parts."""
    items = [InputMessage(role="user", content=given)] if isinstance(given, str) else given
    shown = []
    for item in items:
        values = {"status": "completed", **item.model_dump(exclude_none=True, by_alias=True)}
        values.setdefault("id", new_id("item_"))
        if isinstance(values.get("content"), str):
            kind = "output_text" if values.get("role") == "assistant" else "input_text"
            values["content"] = [{"type": kind, "text": values["content"]}]
        shown.append(values)
    return shown


def save_points_of_items(
    given: str | Sequence[Item], options: CacheOptions | None
) -> list[SavePoint]:
    """Returns the breakpoints in an input."""
    if isinstance(given, str):
        return []
    given = [item for item in given if not isinstance(item, InputReasoning)]
    contents = (item.content if isinstance(item, InputMessage) else None for item in given)
    places = save_points(contents, options)
    calls = [number for number, item in enumerate(given) if isinstance(item, InputCall)]
    for place in places:
        if calls and place.message > calls[0]:
            raise bad_request(
                f"input[{place.message}] has a prompt_cache_breakpoint behind a function_call; "
                "expected breakpoints before them",
                "input",
            )
    return places


def _add_call(messages: Messages, item: InputCall) -> None:
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments},
    }
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
        messages[-1]["tool_calls"].append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
