"""The server's application: endpoints, limits, and errors in OpenAI's shape."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvpager._version import __version__
from kvpager.errors import PagerError
from kvpager.server import errors
from kvpager.server.disconnects import ClientGone
from kvpager.server.errors import ApiError
from kvpager.server.middleware import Admission, Gate, Heads, Limits, RequestIds, error_body
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

# What FastAPI calls the parts of a request, and pydantic the alternatives of a type.
_PLACES = ("body", "query", "path", "header", "str", "int", "float", "bool", "list", "dict")
_METHODS = ("GET", "HEAD", "POST", "DELETE")
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
    app.add_middleware(Limits, service=service)  # what is added last comes first
    app.add_middleware(Admission, service=service)
    if service.settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.allow_origin,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    app.add_middleware(Gate, service=service)
    app.add_middleware(RequestIds)
    app.add_middleware(Heads)
    _handle_errors(app)
    if service.settings.otlp_endpoint is not None:
        trace_http(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        _service(request).metrics.error(error.status)
        return JSONResponse(
            error_body(request.url.path, error), error.status, headers=error.headers
        )

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
