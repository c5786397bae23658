"""What happens to a request before its body is read: its id, who may send it, and how much."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpager.server.errors import ApiError
from kvpager.server.ids import new_id
from kvpager.server.routes import messages, sessions
from kvpager.server.routes.caller import admitted
from kvpager.server.service import Service
from kvpager.server.strangers import READING, Strangers

_TOO_LARGE = 413
_REQUEST_ID = b"x-request-id"
_MOST_ID = 200  # bytes


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """An error in the shape of the API that the path is of."""
    anthropic = path.startswith("/v1/messages")
    return messages.anthropic_error(error) if anthropic else error.body()


async def _refuse(
    service: Service, error: ApiError, scope: Scope, receive: Receive, send: Send
) -> None:
    service.metrics.error(error.status)
    answer = JSONResponse(error_body(scope["path"], error), error.status, headers=error.headers)
    await answer(scope, receive, send)


class RequestIds:
    """Gives every answer an `X-Request-Id`: the request's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(_REQUEST_ID, b"")
        name = given if 0 < len(given) <= _MOST_ID else new_id("req_").encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, name)]
            await send(message)

        await self._app(scope, receive, named)


class Heads:
    """Answers HEAD as GET without its body, which for a stream never begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, as GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["head"] = True
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


class Gate:
    """Refuses requests of foreign pages. Nothing of their bodies is read."""

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
        error = self._strangers.refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(self._service, error, scope, receive, send)


class Admission:
    """Finds the tenant of a request that has a body, and counts it, before its body is read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with an error."""
        if scope["type"] == "http" and scope["method"] not in READING:
            headers = Headers(scope=scope)
            try:
                tenant = admitted(
                    self._service, headers.get("authorization"), headers.get("x-api-key")
                )
            except ApiError as error:
                await _refuse(self._service, error, scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


class Limits:
    """Refuses bodies that are too large, before they are read whole."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most, setting = self._limit_of(scope)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            error = ApiError(_TOO_LARGE, _text(int(declared), most, setting))
            await _refuse(self._service, error, scope, receive, send)
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

    def _limit_of(self, scope: Scope) -> tuple[int, str]:
        """The most bytes of a request's body, and the setting that says so.

        An imported snapshot is written to the disk and never held whole.
        """
        settings, tenant = self._service.settings, scope.get("state", {}).get("tenant")
        if tenant is not None and sessions.is_import(scope["path"]):
            return settings.store_budget_of(tenant), "store_budget"
        return settings.max_request_bytes, "max_request_bytes"


def _text(size: int, most: int, setting: str) -> str:
    return f"the body has {size} bytes or more; expected at most {most}, which is {setting}"
