"""The server's application: its endpoints, and the checks before a body is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpager import __version__
from kvpager.errors import PagerError
from kvpager.server import errors
from kvpager.server.bodies import ClientGone, of_validation
from kvpager.server.errors import ApiError
from kvpager.server.routes import (
    about,
    chat,
    completions,
    messages,
    page,
    responses,
    sessions,
)
from kvpager.server.routes.caller import admitted, service_of
from kvpager.server.schema.common import ErrorAnswer, new_id
from kvpager.server.service import Service
from kvpager.server.strangers import READING, Strangers
from kvpager.server.tracing import trace_http

_TOO_LARGE = 413
_REQUEST_ID = b"x-request-id"
_MOST_ID = 200  # bytes
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_GONE = 499  # nginx's status for a client that disconnected


def _answer(service: Service, path: str, error: ApiError) -> Response:
    """Counts an error; returns it in the shape of the API that the path belongs to."""
    service.metrics.error(error.status)
    anthropic = path.startswith("/v1/messages")
    body = messages.anthropic_error(error) if anthropic else error.body()
    return JSONResponse(body, error.status, headers=error.headers)


class Entrance:
    """The first look at a request.

    Every answer has an `X-Request-Id`, the request's own or a new one; HEAD is answered as GET
    without its body, and never begins a stream; and foreign web pages are refused.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.settings
        self._app = app
        self._service = service
        self._strangers = Strangers(settings.host, settings.allowed_hosts, settings.allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with an error."""
        if scope["type"] == "websocket":  # there is none
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_REQUEST_ID, b"")
        name = given if 0 < len(given) <= _MOST_ID else new_id("req_").encode()
        is_head, answered, read = scope["method"] == "HEAD", asyncio.Event(), False

        async def received() -> Message:
            nonlocal read
            if is_head and read:
                await answered.wait()
                return {"type": "http.disconnect"}
            read = True
            return await receive()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, name)]
                await send(message)
                if is_head:
                    await send({"type": "http.response.body", "body": b""})
                    answered.set()
            elif not is_head:
                await send(message)

        if is_head:
            scope = {**scope, "method": "GET", "state": {**scope.get("state", {}), "head": True}}
        error = self._strangers.refusal(scope)
        if error is None:
            await self._app(scope, received, named)
        else:
            await _answer(self._service, scope["path"], error)(scope, received, named)


class Bounds:
    """Admits a request with a body, and limits that body, before it is read.

    Admission selects the tenant, and counts the request.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            most, setting = self._admit(scope, Headers(scope=scope))
        except ApiError as error:
            await _answer(self._service, scope["path"], error)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(_TOO_LARGE, _text(read, most, setting))
            return message

        await self._app(scope, counted, send)

    def _admit(self, scope: Scope, headers: Headers) -> tuple[int, str]:
        """Returns the largest body in bytes, and the setting that limits it. Raises ApiError.

        An imported snapshot is written to the disk and never held whole.
        """
        most, setting = self._service.settings.max_request_bytes, "max_request_bytes"
        if scope["method"] not in READING:
            keys = headers.get("authorization"), headers.get("x-api-key")
            tenant = admitted(self._service, *keys)
            scope.setdefault("state", {})["tenant"] = tenant
            if sessions.is_import(scope["path"]):
                most, setting = self._service.settings.store_budget_of(tenant), "store_budget"
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise ApiError(_TOO_LARGE, _text(int(declared), most, setting))
        return most, setting


def _text(size: int, most: int, setting: str) -> str:
    return f"the body has {size} bytes or more; expected at most {most} ({setting})"


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
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    if service.settings.page:
        app.state.monitor = page.Monitor(service)
        app.include_router(page.router)
    for module in (about, chat, completions, messages, responses, sessions):
        app.include_router(module.router)
    app.include_router(sessions.slots_router)
    app.add_middleware(Bounds, service=service)  # the last one added runs first
    if service.settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.allow_origin,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    app.add_middleware(Entrance, service=service)
    for kind in (
        ApiError,
        RequestValidationError,
        HTTPException,
        ClientGone,
        PagerError,
        Exception,
    ):
        app.add_exception_handler(kind, _failed)
    if service.settings.otlp_endpoint is not None:
        trace_http(app)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=_GONE)
    if isinstance(error, HTTPException):
        known = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif isinstance(error, RequestValidationError):
        known = of_validation(error.errors())
    else:
        known = errors.of(error)
    return _answer(service_of(request), request.url.path, known)
