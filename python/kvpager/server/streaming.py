"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.background import BackgroundTask

from kvpager.server.errors import ApiError
from kvpager.server.exchange import Exchange
from kvpager.server.schema.common import StreamOptions

PING_SECONDS = 15
_PADDED = 64  # bytes: events are padded to about a multiple of so many
# Python's `splitlines` ends a line at these too, and clients split events with it (httpx, litellm);
# the other characters that it knows are control characters, which JSON escapes anyway.
_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}


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


def head_usage(
    so_far: Callable[[], dict[str, int]], options: StreamOptions | None
) -> dict[str, Any]:
    """What every chunk of a stream says of usage, as these options ask for it."""
    if options is None or not options.include_usage:
        return {}
    return {"usage": so_far() if options.continuous_usage_stats else None}


def asks_to_pad(options: StreamOptions | None) -> bool:
    """Whether these options ask for padded pieces of text."""
    return options is not None and bool(options.include_obfuscation)


def done() -> ServerSentEvent:
    """The last event of a stream of chunks."""
    return ServerSentEvent(data="[DONE]", sep="\n")


def stream(
    exchanges: Sequence[Exchange],
    events: AsyncIterator[ServerSentEvent],
    on_error: Callable[[ApiError], ServerSentEvent],
    headers: Mapping[str, str] | None = None,
) -> EventSourceResponse:
    """The answer of a stream. A client that goes away frees everything.

    on_error: the event that tells of a failure; the stream ends with it.
    """

    async def guarded() -> AsyncIterator[ServerSentEvent]:
        try:
            async for one in events:
                yield one
        except ApiError as error:
            exchanges[0].failed(error)
            yield on_error(error)
        finally:
            await release()

    async def release() -> None:
        for exchange in exchanges:
            await exchange.release()

    return EventSourceResponse(
        guarded(),
        ping=PING_SECONDS,
        sep="\n",
        headers={"x-accel-buffering": "no", **(headers or {})},
        background=BackgroundTask(release),  # also where nothing was ever read
    )
