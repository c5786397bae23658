"""Messages of a request as a chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpager.server.breakpoints import DEFAULT_TTL, Mark, Marks
from kvpager.server.errors import bad_request
from kvpager.server.schema.chat import Message, TextPart
from kvpager.server.schema.common import CacheOptions

ASSISTANT = "assistant"
ROLES = {"developer": "system"}  # which templates do not know


def as_dicts(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Each message, its content as one text."""
    return tuple(_as_dict(message) for message in messages)


def marks_of(messages: Sequence[Message], options: CacheOptions | None) -> Marks:
    """The breakpoints in messages."""
    default = (options.ttl if options is not None else None) or DEFAULT_TTL
    places = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        length = 0
        for part in message.content:
            length += len(part.text)
            point = part.prompt_cache_breakpoint
            if point is not None:
                places.append(Mark(number, length, point.ttl or default))
    return Marks(tuple(places))


def continues_last(
    messages: Sequence[Message], *, continued: bool | None, prompted: bool | None
) -> bool:
    """Whether the answer goes on with the last message, an assistant's.

    Args:
        messages: of the request.
        continued: its `continue_final_message`.
        prompted: its `add_generation_prompt`.

    Raises:
        ApiError: both are true, or the last message is an assistant's and neither says that it goes
            on.
    """
    if continued and prompted:
        raise bad_request(
            "add_generation_prompt and continue_final_message are true; expected one of them",
            "continue_final_message",
        )
    is_answer = messages[-1].role == ASSISTANT
    wanted = continued if continued is not None else is_answer and prompted is False
    if is_answer and not wanted and prompted is not False:
        raise bad_request(
            "messages ends with a message of the assistant; expected one to answer, or "
            "continue_final_message: true to go on with it",
            "messages",
        )
    return wanted


def _as_dict(message: Message) -> dict[str, Any]:
    values: dict[str, Any] = {
        "role": ROLES.get(message.role, message.role),
        "content": text_of(message.content),
    }
    for name in ("reasoning_content", "reasoning"):
        if (reasoning := getattr(message, name)) is not None:
            values[name] = reasoning
    if message.name is not None:
        values["name"] = message.name
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return values


def text_of(content: str | list[TextPart] | None) -> str:
    """The text of a content, its parts after each other."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
