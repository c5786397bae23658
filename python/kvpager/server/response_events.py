"""Events of a response of OpenAI's API: while its items grow, and again later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvpager._runtime.scheduling.stream import GeneratedToken
from kvpager.requests.request import RequestCompletion
from kvpager.server.answers import CUT, Parts, Reader
from kvpager.server.background import Event
from kvpager.server.schema.chat import ToolCall
from kvpager.server.schema.common import MakeId, new_id
from kvpager.server.token_texts import TokenTexts
from kvpager.server.turn import TokenPiece

Events = list[Event]
_WITHOUT_OUTPUT = ("failed", "cancelled")


class ItemEvents(Parts[Event]):
    """The items of a response as they grow.

    Attributes:
        logprobs: of the tokens of the next piece of text.
        pieces: for each item, of each of its pieces the characters and the log-probabilities.
    """

    text_type = "message"

    def __init__(self, make_id: MakeId) -> None:
        super().__init__()
        self._make_id = make_id
        self.logprobs: list[dict[str, Any]] = []
        self.pieces: list[list[list[int]]] = []

    def empty_text(self) -> dict[str, Any]:
        """A message with one empty part."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {
            "id": self._make_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [part],
        }

    def _empty_call(self, call: ToolCall) -> dict[str, Any]:
        return {
            "id": self._make_id("fc_"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": "",
            "status": "in_progress",
        }

    def _begun(self, item: dict[str, Any]) -> Events:
        index = len(self.items) - 1
        self.pieces.append([])
        if item["type"] != "message":
            return [("response.output_item.added", {"output_index": index, "item": dict(item)})]
        added = {"output_index": index, "item": {**item, "content": []}}
        part = {**self._place(), "part": dict(item["content"][0], logprobs=[])}
        return [("response.output_item.added", added), ("response.content_part.added", part)]

    def extend(self, text: str) -> Events:
        """Extends a message, or the arguments of a call."""
        item = self.items[-1]
        values = {**self._place(), "delta": text}
        self.pieces[-1].append([len(text), len(self.logprobs)])
        if item["type"] != "message":
            item["arguments"] += text
            return [("response.function_call_arguments.delta", values)]
        logprobs, self.logprobs = self.logprobs, []
        (part,) = item["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        return [("response.output_text.delta", {**values, "logprobs": logprobs})]

    def _closed(self, item: dict[str, Any], status: str) -> Events:
        place = self._place()
        item["status"] = status
        done = ("response.output_item.done", {"output_index": place["output_index"], "item": item})
        if item["type"] != "message":
            values = {**place, "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", values), done]
        (part,) = item["content"]
        values = {**place, "text": part["text"], "logprobs": part["logprobs"]}
        whole = {**place, "part": part}
        return [("response.output_text.done", values), ("response.content_part.done", whole), done]

    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if item["type"] == "message" else place


class Output(ItemEvents):
    """The items of one answer as they grow."""

    def __init__(
        self, reader: Callable[[MakeId], Reader], make_id: MakeId, texts: TokenTexts | None
    ) -> None:
        """texts: of tokens, if log-probabilities are shown; otherwise None."""
        super().__init__(make_id)
        self.reader = reader(make_id)
        self._texts = texts

    def push(self, piece: TokenPiece) -> Events:
        """Returns the events of one more token."""
        if self._texts is not None and isinstance(piece.token, GeneratedToken):
            self.logprobs.append(self._texts.chosen(piece.token).model_dump())
        deltas = self.reader.push(piece)
        events = self.add(deltas)
        if deltas:  # tokens of calls and of reasoning have none
            self.logprobs = []
        return events

    def end(self, completion: RequestCompletion | None) -> Events:
        """Returns the last events; an answer without any text has one empty message.

        completion: of the answer; None: the server ended it.
        """
        events = self.add(self.reader.end(completion))
        if not self.items:
            events += self.begin(self.empty_text())
        complete = completion is not None and completion.finish_reason not in CUT
        return events + self.close("completed" if complete else "incomplete")


async def events_again(
    response: dict[str, Any], pieces: Sequence[Sequence[Sequence[int]]], after: int = -1
) -> AsyncIterator[tuple[int, Event]]:
    """Yields the numbered events of a response that has ended, as they came.

    The output of one that failed is not kept: a reader that had events of it gets the last one,
    with the number after its own.

    pieces: of each item, see `ItemEvents`.
    """
    events = _events_of(response, pieces)
    for number, one in enumerate(events):
        if number > after:
            yield number, one
    if after >= len(events) - 1 and response["status"] in _WITHOUT_OUTPUT:
        yield after + 1, events[-1]


def _events_of(response: dict[str, Any], pieces: Sequence[Sequence[Sequence[int]]]) -> Events:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None, "incomplete_details": None, "error": None}
    events: Events = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    items = ItemEvents(new_id)
    for item, lengths in zip(response["output"], pieces, strict=True):
        text, logprobs = item.get("arguments"), []
        if item["type"] == "message":
            (part,) = item["content"]
            text, logprobs = part["text"], part["logprobs"]
            empty = {**part, "text": "", "logprobs": []}
            events += items.begin({**item, "content": [empty], "status": "in_progress"})
        else:
            events += items.begin({**item, "arguments": "", "status": "in_progress"})
        for length, count in lengths:
            items.logprobs, logprobs = logprobs[:count], logprobs[count:]
            events += items.extend(text[:length])
            text = text[length:]
        events += items.close(item["status"])
    status = response["status"]
    name = status if status in ("completed", "incomplete") else "failed"
    return [*events, (f"response.{name}", {"response": response})]
