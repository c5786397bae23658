"""Reads the JSON of request bodies, so that no body stops the event loop or takes much memory.

What would be long to parse is refused by its structure, which is counted first; the rest is parsed
and validated in a thread. Parsing holds Python's lock, so that the counts bound a pause of all.
"""

from __future__ import annotations

import asyncio
import difflib
import email.message
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from kvpager.server import errors
from kvpager.server.disconnects import ClientGone
from kvpager.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from kvpager.server.service import Service

MOST_DEPTH = 64  # of lists and objects in each other
MOST_NAMES = 100_000  # of fields of objects
MOST_TEXTS = 262_144  # names, texts, lists and objects together
LEAST_VALUES = 262_144  # numbers included; as many as a prompt of token ids may need, if more
SMALL = 1 << 16  # bytes that no budget counts
_SECONDS = 30.0  # that a body may take to come, and one more for each
_BYTES_PER_SECOND = 1 << 17
_WAIT_SECONDS = 10.0  # for the bodies of others
_PIECE = 1 << 18
# What FastAPI calls the parts of a request, and pydantic the alternatives of a type.
_PLACES = ("body", "query", "path", "header", "str", "int", "float", "bool", "list", "dict")
_MOST_ERRORS = 1000
_SHOWN = 100  # characters of a value in an error


@dataclass
class Structure:
    """What a JSON text has, counted without parsing it; for what is no JSON, any numbers.

    Attributes:
        values: at most as many as there are.
        names: fields of objects.
        texts: names, texts, lists and objects.
        depth: of lists and objects in each other.
    """

    values: int = 0
    names: int = 0
    texts: int = 0
    depth: int = 0
    # Of each field of the outermost object: where its name ends, and what there is before it.
    _fields: list[tuple[int, int, int, int]] = field(default_factory=list)
    _deepest: int = 0  # where the depth is first that of the whole

    @classmethod
    def of(cls, body: bytes) -> Structure:
        """Counts in pieces; numpy lets other threads run meanwhile."""
        found = cls()
        inside, escaped, depth, quoted = False, False, 0, 0
        for start in range(0, len(body), _PIECE):
            piece = np.frombuffer(body, np.uint8, min(_PIECE, len(body) - start), start)
            quotes, escaped = _unescaped_quotes(piece, escaped=escaped)
            outside = (np.cumsum(quotes, dtype=np.int32) + inside) % 2 == 0
            inside = bool((int(quotes.sum()) + inside) % 2)
            opening = outside & ((piece == ord("[")) | (piece == ord("{")))
            closing = outside & ((piece == ord("]")) | (piece == ord("}")))
            levels = depth + np.cumsum(opening.astype(np.int32) - closing)
            depth = int(levels[-1])
            if levels.max() > found.depth:
                found.depth = int(levels.max())
                found._deepest = start + int(levels.argmax())
            colons = outside & (piece == ord(":"))
            values = found.values + np.cumsum(opening | (outside & (piece == ord(","))))
            names = found.names + np.cumsum(colons)
            texts = (2 * found.texts + quoted) // 2 + np.cumsum(opening) + np.cumsum(quotes) // 2
            places = np.flatnonzero(colons & (levels == 1))
            found._fields += zip(
                (start + places).tolist(),
                values[places].tolist(),
                names[places].tolist(),
                texts[places].tolist(),
            )
            found.values, found.names = int(values[-1]), int(names[-1])
            found.texts += int(opening.sum())
            quoted += int(quotes.sum())
        found.texts += quoted // 2
        return found

    def check(self, body: bytes, most_values: int) -> None:
        """Raises ApiError for more than a body may have; names the field that has most of it."""
        if self.depth > MOST_DEPTH:
            before = [place for place, *_ in self._fields if place < self._deepest]
            where = _name_before(body, before[-1]) if before else None
            raise _too_complex(where, self.depth, MOST_DEPTH, "levels of lists and objects")
        for kind, (count, most, what) in enumerate(
            (
                (self.values, most_values, "values"),
                (self.names, MOST_NAMES, "names of fields"),
                (self.texts, MOST_TEXTS, "names, texts, lists and objects"),
            ),
            1,
        ):
            if count > most:
                ends = [*(one[kind] for one in self._fields[1:]), count]
                sizes = [end - one[kind] for one, end in zip(self._fields, ends)]
                largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
                where = None
                if largest is not None and sizes[largest] > most // 2:
                    where, count = _name_before(body, self._fields[largest][0]), sizes[largest]
                raise _too_complex(where, count, most, what)


def _name_before(body: bytes, colon: int) -> str | None:
    """The name of a field whose colon is at a place; None if it is none of ours."""
    start = max(0, colon - _SHOWN)
    found = re.search(rb'"(\w+)"\s*$', body[start:colon])
    return found[1].decode() if found else None


def _too_complex(name: str | None, count: int, most: int, what: str) -> ApiError:
    return bad_request(
        f"{name or 'the body'} has {count} {what}; expected at most {most} in all",
        name,
        "body_too_complex",
    )


def _unescaped_quotes(piece: Any, *, escaped: bool) -> tuple[Any, bool]:
    """Where quotes begin or end a text, and whether the byte after the piece is escaped.

    escaped: whether the piece's first byte is.
    """
    quotes = piece == ord('"')
    slashes = piece == ord("\\")
    if not escaped and not slashes.any():
        return quotes, False
    places = np.arange(len(piece))
    # The last byte before each one that is no backslash; a run of an odd length escapes.
    last = np.maximum.accumulate(np.where(slashes, -1, places))
    run = places - last
    run[last == -1] += escaped
    before = np.concatenate(([int(escaped)], run[:-1] * slashes[:-1]))
    return quotes & (before % 2 == 0), bool(slashes[-1] and run[-1] % 2)


@dataclass
class Budget:
    """Bytes of bodies that are being read or parsed. Of the event loop.

    Attributes:
        most: of all together; the body that has waited longest may go beyond, so that one ends.
    """

    most: int
    _held: dict[int, int] = field(default_factory=dict)  # by body, the oldest first
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _next: int = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Callable[[int], Coroutine[Any, Any, None]]]:
        """A body's account: a function that takes more bytes for it. It ends with the block.

        The function raises ApiError 503 where others leave no room for too long.
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
                        raise _busy(self.most) from None
            self._held[number] += count

        try:
            yield take
        finally:
            del self._held[number]
            async with self._changed:
                self._changed.notify_all()


def _busy(most: int) -> ApiError:
    return ApiError(
        503,
        f"bodies of other requests take {most} bytes, the most that may be read at once",
        kind="server_error",
        code="busy",
        headers=errors.retry_after(errors.RETRY_AFTER_SECONDS),
    )


class JsonRoute(APIRoute):
    """A route whose body is read, parsed and validated here, and given to FastAPI as a model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, behind the reading."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        kind: Any = self.body_field.field_info.annotation
        model: TypeAdapter[Any] = TypeAdapter(kind)
        fields = tuple(getattr(kind, "model_fields", ()))

        async def reading(request: Request) -> Response:
            if _has_body(request):
                service: Service = request.app.state.service
                value = await _value(request, service, lambda body: parsed(model, body, fields))
                request = _Read(request, value)
            return await handler(request)

        return reading


class _Read(Request):
    """A request whose body was validated."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self._value


async def _value(request: Request, service: Service, parse: Callable[[bytes], Any]) -> Any:
    most = max(LEAST_VALUES, 2 * (service.most_tokens or 0))

    async with service.bodies.opened() as take:
        body = await _bytes(request, take)
        service.workers.expect(len(body))
        _check_type(request)

        def work() -> Any:
            if body:
                Structure.of(body).check(body, most)
            return parse(body)

        return await service.workers.run(work, request.state.tenant.name)


async def _bytes(request: Request, take: Callable[[int], Coroutine[Any, Any, None]]) -> bytes:
    """The body. Raises what `arriving` raises."""
    body = bytearray()
    async for part in arriving(request):
        if len(body) + len(part) > SMALL:
            await take(len(part) if len(body) > SMALL else len(body) + len(part))
        body += part
    return bytes(body)


async def arriving(request: Request) -> AsyncIterator[bytes]:
    """The parts of a body. Raises ApiError 408 for one that comes too slowly, and ClientGone."""
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
            raise ApiError(
                408,
                f"the body has {size} bytes after {longest:.0f} s; expected all of it by then",
                kind="timeout_error",
                code=errors.TIMEOUT,
                headers={"connection": "close"},
            ) from None
        except ClientDisconnect:
            raise ClientGone from None
        size += len(part)
        yield part


def _has_body(request: Request) -> bool:
    length = request.headers.get("content-length", "0")
    return "transfer-encoding" in request.headers or length.strip() != "0"


def _check_type(request: Request) -> None:
    """Raises ApiError for a body that is said to be no JSON."""
    given = request.headers.get("content-type")
    message = email.message.Message()
    message["content-type"] = given or ""
    subtype = message.get_content_subtype()
    known = message.get_content_maintype() == "application"
    if given is None or not known or not (subtype == "json" or subtype.endswith("+json")):
        shown = "missing" if given is None else repr(given)
        raise bad_request(f"content-type is {shown}; expected 'application/json'")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"content-encoding is {encoding!r}; expected none")


def parsed(model: TypeAdapter[Any], body: bytes, fields: tuple[str, ...] = ()) -> Any:
    """The value of a JSON text. Raises ApiError about the first thing that is wrong.

    fields: the names that the body may have, to propose one for a name that it may not.
    """
    try:
        given = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    try:
        return model.validate_python(given)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:  # each is made an object of Python
            raise bad_request(
                f"the body has {error.error_count()} values of a wrong type or form"
            ) from None
        raise of_validation(error.errors(include_url=False), fields) from None


def of_validation(found: Sequence[Any], fields: tuple[str, ...] = ()) -> ApiError:
    """400 about one of pydantic's errors, of a body that may have these fields.

    It is the first one, or the one about a size: that of a type comes before it where a field
    may be of several.
    """
    first = next((one for one in found if one["type"].endswith("too_long")), found[0])
    name = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, fields, n=1)
        return errors.unsupported(name, f"did you mean {close[0]}?" if close else "")
    given = first.get("input")
    said = name or "the body"
    if isinstance(given, str) and len(given) > _SHOWN:
        said += f" is {given[:_SHOWN]!r}... of {len(given)} characters"
    elif isinstance(given, (int, float, str)):
        said += f" is {given!r}"
    return bad_request(f"{said}: {_lowered(first['msg'])}", name or None)


def _lowered(text: str) -> str:
    """A message of pydantic as the end of a sentence."""
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _path(location: Any) -> str:
    """`messages[0].content` of a place in a body; names of alternatives are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in _PLACES and part.isidentifier() and part[0].islower():
            text += f".{part}" if text else part
    return text
