"""Events of a response that are read later than they came, or again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

Event = tuple[str, dict[str, Any]]  # its name, and what it tells


class Replay:
    """The events of a response that is being computed, from the first one on. Of the event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, event: Event, *, last: bool = False) -> None:
        """Takes a further event, for all readers."""
        self._events.append(event)
        self._ended = last
        self._changed.set()
        self._changed = asyncio.Event()

    async def events(self, after: int = -1) -> AsyncIterator[tuple[int, Event]]:
        """Every event behind the one of this number, with its number, until the last one."""
        number = after + 1
        while True:
            while number < len(self._events):
                yield number, self._events[number]
                number += 1
            if self._ended:
                return
            await self._changed.wait()


async def events_again(
    response: dict[str, Any], after: int = -1
) -> AsyncIterator[tuple[int, Event]]:
    """The events of a response that has ended, each text in one piece.

    It came in more pieces, and so with other numbers. A reader that had more events than there are
    here is told the last one, with the number behind its own.
    """
    events = list(_events_of(response))
    for number, event in enumerate(events):
        if number > after:
            yield number, event
    if after >= len(events) - 1:
        yield after + 1, events[-1]


def _events_of(response: dict[str, Any]) -> Iterator[Event]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None, "incomplete_details": None, "error": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        place = {"item_id": item["id"], "output_index": index}
        added = {**item, **empty, "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": added}
        if item["type"] == "message":
            for number, part in enumerate(item["content"]):
                yield from _text_events({**place, "content_index": number}, part)
        else:
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {**place, "delta": arguments}
            told = {**place, "name": item["name"], "arguments": arguments}
            yield "response.function_call_arguments.done", told
        yield "response.output_item.done", {"output_index": index, "item": item}
    ended = response["status"]
    name = ended if ended in ("completed", "incomplete") else "failed"
    yield f"response.{name}", {"response": response}


def _text_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
    text, logprobs = part["text"], part["logprobs"]
    empty = {**part, "text": "", "logprobs": []}
    yield "response.content_part.added", {**place, "part": empty}
    yield "response.output_text.delta", {**place, "delta": text, "logprobs": logprobs}
    yield "response.output_text.done", {**place, "text": text, "logprobs": logprobs}
    yield "response.content_part.done", {**place, "part": part}
