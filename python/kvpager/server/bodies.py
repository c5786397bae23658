"""Reads request bodies without stopping the event loop: within a budget of bytes and of seconds.

`json_limits` bounds what is parsed; parsing, templates and grammars run in a few threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from kvpager.server import errors
from kvpager.server.errors import ApiError, bad_request, retry_after
from kvpager.server.json_limits import SHOWN, loaded

SMALL = 1 << 16  # bytes of a body that the budget does not count
_SECONDS = 30.0  # time limit of a body, plus one second for each of the next
_BYTES_PER_SECOND = 1 << 17
_WAIT_SECONDS = 10.0  # limit of the wait for other bodies
# FastAPI's names for parts of a request, and pydantic's for alternatives of a type.
_PLACES = ("body", "query", "path", "header", "str", "int", "float", "bool", "list", "dict")
_MOST_ERRORS = 1000
_Result = TypeVar("_Result")
_THREADS = 2  # for requests with long bodies, and as many for all others
_LONG_BYTES = 64 << 10
_is_long: ContextVar[bool] = ContextVar("is_long", default=False)


@dataclass
class BodyBudget:
    """Bytes of bodies that are being read or parsed. Used by the event loop.

    Attributes:
        most: of all bodies; the oldest one may exceed it, so that one always completes.
    """

    most: int
    _held: dict[int, int] = field(default_factory=dict)  # by body, the oldest first
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _next: int = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Callable[[int], Coroutine[Any, Any, None]]]:
        """Yields a function that reserves bytes for one body, until the block ends.

        The function raises ApiError 503 if other bodies leave no room for too long.
        """
        self._next += 1
        number = self._next
        self._held[number] = 0

        async def take(count: int) -> None:
            def room() -> bool:
                return sum(self._held.values()) + count <= self.most or number == min(self._held)

            if not room():
                async with self._changed:
                    try:
                        await asyncio.wait_for(self._changed.wait_for(room), _WAIT_SECONDS)
                    except asyncio.TimeoutError:
                        text = (
                            f"bodies of other requests take {self.most} bytes, the most that may "
                        )
                        text += "be read at once"
                        raise ApiError(503, text, code="busy", headers=retry_after()) from None
            self._held[number] += count

        try:
            yield take
        finally:
            del self._held[number]
            async with self._changed:
                self._changed.notify_all()


async def read_bytes(request: Request, take: Callable[[int], Coroutine[Any, Any, None]]) -> bytes:
    """Returns the body. Raises as `arriving`."""
    body = bytearray()
    async for part in arriving(request):
        if len(body) + len(part) > SMALL:
            await take(len(part) if len(body) > SMALL else len(body) + len(part))
        body += part
    return bytes(body)


async def arriving(request: Request) -> AsyncIterator[bytes]:
    """Yields the parts of a body. Raises ApiError 408 if they are too slow, and ClientGone."""
    size = 0
    begun = asyncio.get_running_loop().time()
    parts = request.stream()
    while True:
        longest = _SECONDS + size / _BYTES_PER_SECOND
        left = begun + longest - asyncio.get_running_loop().time()
        try:
            part = await asyncio.wait_for(anext(parts), max(0.0, left))
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise errors.timed_out(
                f"the body has {size} bytes after {longest:.0f} s; expected all of it by then",
                {"connection": "close"},
            ) from None
        except ClientDisconnect:
            raise ClientGone from None
        size += len(part)
        yield part


def parsed(validate: Callable[[Any], Any], body: bytes, fields: tuple[str, ...] = ()) -> Any:
    """Returns what `validate` makes of a JSON text. Raises ApiError about its first error.

    Args:
        validate: a model's validation, which raises pydantic's errors.
        body: the text.
        fields: the known names, to suggest one for an unknown name.
    """
    try:
        given = loaded(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    try:
        return validate(given)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:  # each is made an object of Python
            raise bad_request(
                f"the body has {error.error_count()} values of a wrong type or form"
            ) from None
        raise of_validation(error.errors(include_url=False), fields) from None


def of_validation(found: Sequence[Any], fields: tuple[str, ...] = ()) -> ApiError:
    """Returns a 400 for one of pydantic's errors, of a body that may have these fields.

    It is the first one, or one about a size: pydantic lists errors of type before it where a field
    has several types.
    """
    first = next((one for one in found if one["type"].endswith("too_long")), found[0])
    name = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, fields, n=1)
        return errors.unsupported(name, f"did you mean {close[0]}?" if close else "")
    given = first.get("input")
    text = name or "the body"
    if isinstance(given, str) and len(given) > SHOWN:
        text += f" is {given[:SHOWN]!r}... of {len(given)} characters"
    elif isinstance(given, (int, float, str)):
        text += f" is {given!r}"
    return bad_request(f"{text}: {_lowered(first['msg'])}", name or None)


def _lowered(text: str) -> str:
    """Returns a message of pydantic as the end of a sentence."""
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _path(location: Any) -> str:
    """Returns a location as `messages[0].content`, without names of alternatives."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in _PLACES and part.isidentifier() and part[0].islower():
            text += f".{part}" if text else part
    return text


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """Returns what `work` returns in a thread. Raises its errors as ApiError."""
    try:
        return await asyncio.to_thread(work)
    except Exception as error:
        raise errors.of(error) from error


class ReadingThreads:
    """Threads that read requests: JSON, templates, tokens, grammars. Used by the event loop.

    They are few, so that they leave Python's lock to others. Requests with long bodies have their
    own threads, one at a time for each tenant, so that no other request waits for them.
    """

    def __init__(self, longest: float) -> None:
        """longest: time limit of a piece of work in seconds; 0: none."""
        self._longest = longest or None
        self._short = concurrent.futures.ThreadPoolExecutor(_THREADS, "kvpager-read")
        self._long = concurrent.futures.ThreadPoolExecutor(_THREADS, "kvpager-read-long")
        self._shares: dict[str, asyncio.Semaphore] = {}

    @staticmethod
    def expect(body_bytes: int) -> None:
        """Sets the body's size for the work of this task and of those it starts."""
        _is_long.set(body_bytes > _LONG_BYTES)

    async def run(
        self,
        work: Callable[[], _Result],
        tenant: str,
        *,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> _Result:
        """Returns what `work` returns in one of the threads.

        Work that takes too long continues, as threads cannot be ended, but nobody waits for it.

        Args:
            work: called in a thread.
            tenant: its share of the threads is used.
            on_dropped: called if `work` never will be, because the caller was cancelled or its time
                ended before a thread was free.

        Raises:
            ApiError: the error of `work`, or 408 if it takes too long.
        """
        is_long = _is_long.get()
        pool = self._long if is_long else self._short
        share = self._shares.setdefault(tenant, asyncio.Semaphore(1)) if is_long else None
        running: concurrent.futures.Future[_Result] | None = None
        taken = False

        async def waiting() -> _Result:
            nonlocal running, taken
            if share is not None:
                await share.acquire()
            taken = True
            running = pool.submit(work)
            return await asyncio.shield(asyncio.wrap_future(running))

        try:
            return await asyncio.wait_for(waiting(), self._longest)
        except asyncio.TimeoutError as error:
            if running is not None and running.done() and not running.cancelled():
                raise errors.of(error) from error  # its own
            raise errors.timed_out(
                f"reading the request took longer than {self._longest} s, which read_timeout allows"
            ) from None
        except Exception as error:
            raise errors.of(error) from error
        finally:
            if running is None or running.cancel():
                on_dropped()
                if taken and share is not None:
                    share.release()
            elif share is not None:
                loop = asyncio.get_running_loop()
                running.add_done_callback(lambda _: _released(loop, share))

    def close(self) -> None:
        """Lets the threads end."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _released(loop: asyncio.AbstractEventLoop, share: asyncio.Semaphore) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(share.release)


class ClientGone(Exception):  # noqa: N818  # nothing went wrong here
    """The client has disconnected."""
