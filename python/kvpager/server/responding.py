"""Responses: whole as JSON, or as server-sent events in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.background import BackgroundTask

from kvpager.server.bodies import ClientGone
from kvpager.server.errors import ApiError
from kvpager.server.schema.common import StreamOptions

PING_SECONDS = 15
_PADDED = 64  # bytes: events are padded to about a multiple of so many
# Python's `splitlines` ends a line at these too, and clients split events with it (httpx, litellm);
# the other characters that it knows are control characters, which JSON escapes anyway.
_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}
_Result = TypeVar("_Result")


class Responding(ABC):
    """A request that a route has checked; see `respond`.

    Attributes:
        headers: of the response.
    """

    headers: dict[str, str]

    @abstractmethod
    async def begin(self) -> None:
        """Queues it. Raises ApiError; nothing is left then."""

    @abstractmethod
    async def whole(self) -> BaseModel:
        """Returns the whole answer, once its conversation is kept."""

    @abstractmethod
    def stream(self) -> AsyncIterator[ServerSentEvent]:
        """Yields the answer's events, the last ones once its conversation is kept."""

    @abstractmethod
    async def release(self) -> None:
        """Cancels and frees everything. May be repeated."""

    def failure(self, error: ApiError) -> ServerSentEvent | None:
        """The last event of a stream that fails; None: it ends without one."""
        return event(error.body())


async def respond(
    request: Request, turn: Responding, *, streamed: bool | None, on_error: Callable[[int], object]
) -> Response:
    """Runs a request. A client that goes away frees everything.

    on_error: called with the status of an error that ends a stream, whose own status is 200.
    """
    if streamed:
        await turn.begin()
        return event_stream(turn.stream(), turn.headers, turn, on_error)

    async def whole() -> BaseModel:
        await turn.begin()
        return await turn.whole()

    try:
        return json_response(await unless_gone(request, whole()), turn.headers)
    finally:
        await turn.release()


def event_stream(
    events: AsyncIterator[ServerSentEvent],
    headers: Mapping[str, str] | None = None,
    turn: Responding | None = None,
    on_error: Callable[[int], object] = lambda _: None,
) -> EventSourceResponse:
    """A response of events; an error of `turn`, which they come from, is the last of them."""

    async def guarded() -> AsyncIterator[ServerSentEvent]:
        try:
            async for one in events:
                yield one
        except ApiError as error:
            if turn is None:
                raise
            on_error(error.status)
            last = turn.failure(error)
            if last is not None:
                yield last
        finally:
            if turn is not None:
                await turn.release()

    return EventSourceResponse(
        guarded(),
        ping=PING_SECONDS,
        sep="\n",
        headers={"x-accel-buffering": "no", **(headers or {})},
        background=None if turn is None else BackgroundTask(turn.release),  # if nothing was read
    )


def event(
    values: Mapping[str, Any], name: str | None = None, *, padded: bool = False
) -> ServerSentEvent:
    """One event of JSON; without a name it is a bare `data:` line.

    padded: whether its length is hidden, as OpenAI does with a field `obfuscation`.
    """
    if padded:
        length = len(json.dumps(values))
        values = {**values, "obfuscation": secrets.token_hex(_PADDED)[: -length % _PADDED or 1]}
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return ServerSentEvent(data=text, event=name, sep="\n")


@dataclass
class Chunks:
    """The chunks of a stream, in the form of OpenAI's completions.

    Attributes:
        head: fields of every chunk.
        options: of the request.
        usage_so_far: returns the tokens until now.
    """

    head: Mapping[str, Any]
    options: StreamOptions | None
    usage_so_far: Callable[[], dict[str, int]]

    def of(self, choice: Mapping[str, Any], *, is_text: bool) -> ServerSentEvent:
        """A chunk of a choice. is_text: whether it has a piece of text."""
        asked, so_far = self.options or StreamOptions(), {}
        if asked.include_usage:
            so_far["usage"] = self.usage_so_far() if asked.continuous_usage_stats else None
        padded = is_text and bool(asked.include_obfuscation)
        return event({**self.head, **so_far, "choices": [choice]}, padded=padded)

    def last(self, usage: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
        """Yields what follows the last choice."""
        if self.options is not None and self.options.include_usage:
            yield event({**self.head, "choices": [], "usage": usage})
        yield ServerSentEvent(data="[DONE]", sep="\n")


def json_response(answer: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON, with null where a field has no value."""
    return Response(
        answer.model_dump_json(), media_type="application/json", headers=dict(headers or {})
    )


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """Returns what `work` returns. Cancels it and raises ClientGone if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
