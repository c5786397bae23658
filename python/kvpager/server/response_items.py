"""Items of OpenAI's Responses: an input as messages, and an answer as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpager.scheduling.stream import GeneratedToken
from kvpager.server.answers import Delta, Reader
from kvpager.server.breakpoints import DEFAULT_TTL, Mark, Marks
from kvpager.server.errors import bad_request
from kvpager.server.ids import new_id
from kvpager.server.messages import ROLES
from kvpager.server.production import Piece
from kvpager.server.schema.common import CacheOptions
from kvpager.server.schema.responses import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    Item,
)
from kvpager.server.token_texts import TokenTexts
from kvpager.text.conversation import ASSISTANT

Messages = list[dict[str, Any]]
Events = list[tuple[str, dict[str, Any]]]


def messages_of(given: str | Sequence[Item]) -> Messages:
    """Messages for a chat template. Calls that follow one another are one message's."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: Messages = []
    reasoning = ""  # of the message or call that follows
    for item in given:
        if isinstance(item, InputReasoning):
            reasoning += "".join(part.text for part in item.content or item.summary or ())
            continue
        if isinstance(item, InputMessage):
            messages.append(
                {"role": ROLES.get(item.role, item.role), "content": _text(item.content)}
            )
        elif isinstance(item, InputCallOutput):
            output = _text(item.output)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        else:
            _add_call(messages, item)
        if reasoning and messages[-1]["role"] == ASSISTANT:
            messages[-1].setdefault("reasoning_content", reasoning)
        reasoning = ""
    return messages


def as_items(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The items of an input as they are shown: each with an id, and its content in parts."""
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


def marks_of(given: str | Sequence[Item], options: CacheOptions | None) -> Marks:
    """The breakpoints of an input that is one message each."""
    if isinstance(given, str):
        return Marks()
    default = (options.ttl if options is not None else None) or DEFAULT_TTL
    places = []
    given = [item for item in given if not isinstance(item, InputReasoning)]
    for number, item in enumerate(given):
        content = item.content if isinstance(item, InputMessage) else None
        length = 0
        for part in content if isinstance(content, list) else ():
            length += len(part.text)
            point = part.prompt_cache_breakpoint if isinstance(part, InputText) else None
            if point is not None:
                if any(isinstance(one, InputCall) for one in given[:number]):
                    raise bad_request(
                        f"input[{number}] has a prompt_cache_breakpoint behind a function_call; "
                        "expected breakpoints before them",
                        "input",
                    )
                places.append(Mark(number, length, point.ttl or default))
    return Marks(tuple(places))


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


def _text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content
    return "".join(part.text for part in parts)


class Output:
    """The items of one answer as they grow, with the events that tell of it."""

    def __init__(self, reader: Reader, texts: TokenTexts | None) -> None:
        """texts: of tokens, where log-probabilities are told."""
        self.items: list[dict[str, Any]] = []
        self.reader = reader
        self._texts = texts
        self._logprobs: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows

    def push(self, piece: Piece) -> Events:
        """What a further token tells."""
        token = piece.token
        logprobs = []
        if self._texts is not None and isinstance(token, GeneratedToken):
            logprobs = [self._texts.chosen(token).model_dump()]
        events: Events = []
        for delta in self.reader.push(piece):
            events += self._told(delta, logprobs)
            logprobs = []
        self._logprobs += logprobs  # of a token without text of its own
        return events

    def end(self, *, complete: bool) -> Events:
        """What is told at the end; an answer without any text has one empty message."""
        events: Events = []
        for delta in self.reader.end():
            events += self._told(delta, [])
        if not self.items:
            events += self._begin_message()
        return events + self._close("completed" if complete else "incomplete")

    def _told(self, delta: Delta, logprobs: list[dict[str, Any]]) -> Events:
        values = delta.values
        if "reasoning_content" in values:
            return []
        if "content" in values:
            return self._add_text(values["content"], logprobs)
        (call,) = values["tool_calls"]
        if "id" in call:
            return self._begin_call(call)
        return self._add_arguments(call["function"]["arguments"])

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Events:
        events: Events = []
        if not self._open or self.items[-1]["type"] != "message":
            if not text.strip() and self.items:
                return []  # between calls
            events = self._close("completed") + self._begin_message()
        item = self.items[-1]
        part = item["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs + logprobs, []
        part["logprobs"] += logprobs
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        told = {**place, "delta": text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", told)]

    def _begin_message(self) -> Events:
        item: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        events = self._begin(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return [*events, ("response.content_part.added", {**place, "part": dict(part)})]

    def _begin_call(self, call: dict[str, Any]) -> Events:
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
            "status": "in_progress",
        }
        return self._close("completed") + self._begin(item)

    def _add_arguments(self, text: str) -> Events:
        item = self.items[-1]
        item["arguments"] += text
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return [("response.function_call_arguments.delta", {**place, "delta": text})]

    def _begin(self, item: dict[str, Any]) -> Events:
        self.items.append(item)
        self._open = True
        place = {"output_index": len(self.items) - 1}
        return [("response.output_item.added", {**place, "item": dict(item)})]

    def _close(self, status: str) -> Events:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        index = len(self.items) - 1
        events: Events = []
        if item["type"] == "message":
            (part,) = item["content"]
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            told = {**place, "text": part["text"], "logprobs": part["logprobs"]}
            events = [
                ("response.output_text.done", told),
                ("response.content_part.done", {**place, "part": part}),
            ]
        else:
            place = {"item_id": item["id"], "output_index": index, "name": item["name"]}
            told = {**place, "arguments": item["arguments"]}
            events = [("response.function_call_arguments.done", told)]
        return [*events, ("response.output_item.done", {"output_index": index, "item": item})]
