"""Who sends a request, and the service it is sent to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Request

from kvpager.server.conversations import Conversations
from kvpager.server.service import Service
from kvpager.server.tenants import Tenant

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Caller:
    """A request's sender.

    Attributes:
        service: of the server.
        tenant: whose key was given.
    """

    service: Service
    tenant: Tenant

    @property
    def conversations(self) -> Conversations:
        """The tenant's."""
        return self.service.conversations(self.tenant)

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, which reads the request, in the tenant's share of the threads."""
        return await self.service.workers.run(work, self.tenant.name)


def service_of(request: Request) -> Service:
    """The server's service."""
    service: Service = request.app.state.service
    return service


def admitted(service: Service, authorization: str | None, x_api_key: str | None) -> Tenant:
    """The tenant of these headers, whose request is counted. Raises ApiError 401, 429 or 503."""
    service.check_open()
    tenant = tenant_of(service, authorization, x_api_key)
    service.tenants.count(tenant)
    return tenant


def tenant_of(service: Service, authorization: str | None, x_api_key: str | None) -> Tenant:
    """The tenant of these headers. Raises ApiError 401."""
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
    """The sender. Raises ApiError 401, 429 or 503."""
    tenant = getattr(request.state, "tenant", None)  # of a request with a body
    if tenant is None:
        tenant = admitted(service, authorization, x_api_key)
    return Caller(service, tenant)


TheService = Annotated[Service, Depends(service_of)]
TheCaller = Annotated[Caller, Depends(caller_of)]
