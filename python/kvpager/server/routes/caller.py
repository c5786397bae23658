"""The caller of a request, and the JSON body that it sends."""

from __future__ import annotations

import email.message
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from kvpager.server.bodies import parsed, read_bytes
from kvpager.server.conversations import Conversations
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.json_limits import LEAST_VALUES, check_structure
from kvpager.server.service import Service
from kvpager.server.tenants import Tenant

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        service: the server's.
        tenant: of the request's key.
    """

    service: Service
    tenant: Tenant

    @property
    def conversations(self) -> Conversations:
        """The tenant's conversations."""
        return self.service.conversations(self.tenant)

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work`, which reads the request, in the tenant's share of the threads."""
        return await self.service.workers.run(work, self.tenant.name)


def service_of(request: Request) -> Service:
    """Returns the server's service."""
    service: Service = request.app.state.service
    return service


def admitted(service: Service, authorization: str | None, x_api_key: str | None) -> Tenant:
    """Counts a request for the tenant of its headers. Raises ApiError 401, 429 or 503."""
    service.check_open()
    tenant = tenant_of(service, authorization, x_api_key)
    service.tenants.count(tenant)
    return tenant


def tenant_of(service: Service, authorization: str | None, x_api_key: str | None) -> Tenant:
    """Returns the tenant of these headers. Raises ApiError 401."""
    key = x_api_key
    if authorization is not None:
        scheme, _, given = authorization.partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else None
    return service.tenants.of(key)


def caller_of(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    authorization: Annotated[str | None, Header()] = None,
    x_api_key: Annotated[str | None, Header()] = None,
) -> Caller:
    """Returns the sender. Raises ApiError 401, 429 or 503."""
    tenant = getattr(request.state, "tenant", None)  # of a request with a body
    if tenant is None:
        tenant = admitted(service, authorization, x_api_key)
    return Caller(service, tenant)


TheService = Annotated[Service, Depends(service_of)]


TheCaller = Annotated[Caller, Depends(caller_of)]


class JsonRoute(APIRoute):
    """A route that reads, parses and validates the body itself, and passes a model to FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns FastAPI's handler, after the reading."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        kind: Any = self.body_field.field_info.annotation
        model: TypeAdapter[Any] = TypeAdapter(kind)
        fields = tuple(getattr(kind, "model_fields", ()))

        async def reading(request: Request) -> Response:
            if _has_body(request):
                histories, owner = service_of(request).histories, request.state.tenant.name

                def validate(given: Any) -> Any:
                    return histories.validated(model, owner, given)

                value = await _value(request, lambda body: parsed(validate, body, fields))
                request = _Read(request, value)
            return await handler(request)

        return reading


class _Read(Request):
    """A request with a validated body."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self._value


async def _value(request: Request, parse: Callable[[bytes], Any]) -> Any:
    service = service_of(request)
    most = max(LEAST_VALUES, 2 * (service.most_tokens or 0))

    async with service.bodies.opened() as take:
        body = await read_bytes(request, take)
        service.workers.expect(len(body))
        _check_type(request)

        def work() -> Any:
            if body:
                check_structure(body, most)
            return parse(body)

        return await service.workers.run(work, request.state.tenant.name)


def _has_body(request: Request) -> bool:
    length = request.headers.get("content-length", "0")
    return "transfer-encoding" in request.headers or length.strip() != "0"


def _check_type(request: Request) -> None:
    """Raises ApiError unless the headers declare JSON."""
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
