"""The server's application: endpoints, limits, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpager._version import __version__
from kvpager.errors import PagerError
from kvpager.server import errors
from kvpager.server.disconnects import ClientGone
from kvpager.server.errors import ApiError
from kvpager.server.ids import new_id
from kvpager.server.routes import (
    about,
    chat,
    completions,
    messages,
    page,
    responses,
    sessions,
    slots,
)
from kvpager.server.schema.common import Error
from kvpager.server.service import Service
from kvpager.server.tracing import trace_http

_TOO_LARGE = 413
_REQUEST_ID = b"x-request-id"
# What FastAPI calls the parts of a request, and pydantic the alternatives of a type.
_PLACES = ("body", "query", "path", "header", "str", "int", "float", "bool", "list", "dict")
_GONE = 499  # as nginx counts clients that went away


def make_app(service: Service) -> FastAPI:
    """The application. It owns the service, and closes it when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.drain()
            await service.close()

    app = FastAPI(
        title="kvpager",
        version=__version__,
        description="An OpenAI-compatible server whose conversations survive.",
        lifespan=lifespan,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
        docs_url=None,  # it loads its program from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    if service.settings.page:
        app.include_router(page.router)
    for module in (about, chat, completions, messages, responses, sessions, slots):
        app.include_router(module.router)
    app.add_middleware(_Limits, most=service.settings.max_request_bytes)
    app.add_middleware(_RequestIds)
    app.add_middleware(_Heads)
    _handle_errors(app)
    if service.settings.otlp_endpoint is not None:
        trace_http(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        _service(request).metrics.error(error.status)
        return JSONResponse(_body(request.url.path, error), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        known = _fields_of(request)
        given = request.headers.get("content-type")
        return await told(request, of_validation(error, given, known))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        known = ApiError(error.status_code, str(error.detail), kind=kind, headers=error.headers)
        return await told(request, known)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=_GONE)

    @app.exception_handler(PagerError)
    async def refused(request: Request, error: PagerError) -> Response:
        return await told(request, errors.of(error))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return await told(request, errors.of(error))


def _fields_of(request: Request) -> tuple[str, ...]:
    """The fields that the body of a request may have."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return tuple(getattr(model, "model_fields", ()))


def of_validation(
    error: RequestValidationError, content_type: str | None, known: tuple[str, ...] = ()
) -> ApiError:
    """400 about the first field that was refused, of a body of this type with `known` fields."""
    first = error.errors()[0]
    if tuple(first["loc"]) == ("body",) and isinstance(first.get("input"), (bytes, str)):
        given = "missing" if content_type is None else repr(content_type)
        return errors.bad_request(f"content-type is {given}; expected 'application/json'")
    name = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, known, n=1)
        return errors.unsupported(name, f"did you mean {close[0]}?" if close else "")
    if first["type"] == "json_invalid":
        return errors.bad_request(f"the body is no JSON: {first['ctx']['error']}")
    given = first.get("input")
    found = f"{name} is {given!r}" if isinstance(given, (int, float, str)) else name or "the body"
    return errors.bad_request(f"{found}: {_lowered(first['msg'])}", name or None)


def _body(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the shape of the API that the path is of."""
    anthropic = path.startswith("/v1/messages")
    return messages.anthropic_error(error) if anthropic else error.body()


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


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


class _Limits:
    """Refuses bodies that are too large, before they are read whole."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._most:
            await self._refuse(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(_TOO_LARGE, self._text)
            return message

        await self._app(scope, counted, send)

    @property
    def _text(self) -> str:
        return f"the body has more than {self._most} bytes, the most that max_request_bytes allows"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(_TOO_LARGE, self._text)
        await JSONResponse(_body(scope["path"], error), error.status)(scope, receive, send)


class _Heads:
    """Answers HEAD as GET without its body, which for a stream never begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered, read = asyncio.Event(), False

        async def received() -> Message:
            nonlocal read
            if not read:
                read = True
                return await receive()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        await self._app({**scope, "method": "GET"}, received, headed)


class _RequestIds:
    """Gives every answer an `X-Request-Id`: the request's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_REQUEST_ID)
        name = given if given is not None else new_id("req_").encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, name)]
            await send(message)

        await self._app(scope, receive, named)
