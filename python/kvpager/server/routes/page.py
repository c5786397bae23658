"""`GET /`: the page, and the events that it shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvpager.server.errors import not_found
from kvpager.server.routes.caller import TheCaller
from kvpager.server.streaming import PING_SECONDS, event

router = APIRouter(include_in_schema=False)
_PAGE = Path(__file__).resolve().parent.parent / "page"
_PARTS = ("page.css", "page.js")
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/")
def page() -> FileResponse:
    """The page; it loads nothing from elsewhere."""
    return FileResponse(_PAGE / "index.html", headers={"content-security-policy": _POLICY})


@router.get("/page/{name}")
def part(name: str) -> FileResponse:
    """Its style and its program."""
    if name not in _PARTS:
        raise not_found("part of the page", name, "name")
    return FileResponse(_PAGE / name)


@router.get("/monitor/events")
async def events(
    caller: TheCaller, session: Annotated[str | None, Query()] = None
) -> EventSourceResponse:
    """The server's state once a second."""
    monitor = caller.service.monitor

    async def told() -> AsyncIterator[ServerSentEvent]:
        async for state in monitor.events(caller.tenant, session):
            yield event(state, "state")

    return EventSourceResponse(told(), ping=PING_SECONDS, sep="\n")
