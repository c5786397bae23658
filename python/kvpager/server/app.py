"""The server's application: endpoints, limits, and errors in OpenAI's shape."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvpager._version import __version__
from kvpager.errors import PagerError
from kvpager.server import errors
from kvpager.server.bodies import of_validation
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
        return await told(request, of_validation(error.errors()))

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


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
