"""`GET /`: the page and its events, computed once for all readers, without texts of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvpager import __version__
from kvpager.errors import InvalidArgumentError
from kvpager.server.conversations import Conversations, listed
from kvpager.server.errors import not_found
from kvpager.server.responding import PING_SECONDS, event
from kvpager.server.routes.caller import TheCaller
from kvpager.server.service import Service
from kvpager.server.tenants import Tenant
from kvpager.server.turn import ServedTurn

router = APIRouter(include_in_schema=False)
_PAGE = Path(__file__).resolve().parent.parent / "page"
_PARTS = {path.relative_to(_PAGE).as_posix() for path in _PAGE.rglob("*.[cj]s*")}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
PERIOD = 1.0
_MOST_SHOWN = 200
_TIERS = ("resident", "on_host", "on_disk", "in_snapshot")


@router.get("/")
def page() -> FileResponse:
    """Returns the page, which loads nothing from elsewhere."""
    return FileResponse(_PAGE / "index.html", headers=_HEADERS)


@router.get("/page/{name:path}")
def part(name: str) -> FileResponse:
    """Returns the page's style, or a script."""
    if name not in _PARTS:
        raise not_found("part of the page", name, "name")
    return FileResponse(_PAGE / name, headers={"x-content-type-options": "nosniff"})


@router.get("/monitor/events")
async def events(
    request: Request, caller: TheCaller, session: Annotated[str | None, Query()] = None
) -> EventSourceResponse:
    """Streams the server's state once a second."""
    monitor: Monitor = request.app.state.monitor

    async def states() -> AsyncIterator[ServerSentEvent]:
        async for state in monitor.events(caller.tenant, session):
            yield event(state, "state")

    return EventSourceResponse(states(), ping=PING_SECONDS, sep="\n")


class Monitor:
    """The server's state, computed once a second while the page is open."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._computing: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def events(self, tenant: Tenant, session: str | None) -> AsyncIterator[dict[str, Any]]:
        """Yields a tenant's state every second, with the chunks of a conversation."""
        while not self._service.draining:
            state = dict(await self.state(tenant))
            if session is not None:
                state["strip"] = await asyncio.to_thread(self.strip, tenant, session)
            yield state
            await asyncio.sleep(PERIOD)

    async def state(self, tenant: Tenant) -> dict[str, Any]:
        """Returns the state, at most a second old."""
        now = time.monotonic()
        at, task = self._computing.get(tenant.name, (0.0, None))
        if task is None or now - at >= PERIOD:
            task = asyncio.ensure_future(self._computed(tenant))
            self._computing[tenant.name] = (now, task)
        return await asyncio.shield(task)

    async def _computed(self, tenant: Tenant) -> dict[str, Any]:
        service, recent = self._service, self._service.metrics.recent
        kept = service.conversations(tenant)
        gauges, sessions, count = await asyncio.to_thread(
            lambda: (service.gauges(), listed(kept, _MOST_SHOWN), kept.count())
        )
        pool = service.engine.config
        return {
            "model": service.model,
            "version": __version__,
            "uptime_s": time.time() - service.started,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "requests": [one.describe() for one in turns_of(kept)],
            "prompt_tokens_per_s": recent.rate("prompt"),
            "generated_tokens_per_s": recent.rate("token"),
            "first_token_s": recent.quantiles("first"),
            "between_tokens_s": recent.quantiles("between"),
            "pool": {
                "blocks": pool.pool_blocks,
                "used": round(gauges.usage * pool.pool_blocks),
                "chunk_tokens": pool.chunk_tokens,
            },
            "tiers": dict(gauges.tiers),
            "sessions": [one.model_dump() for one in sessions],
            "sessions_in_all": count,
        }

    def strip(self, tenant: Tenant, name: str) -> dict[str, Any] | None:
        """Returns the tier of each chunk of a conversation; None if it is not in memory."""
        source = self._service.conversations(tenant)
        running = [one for one in turns_of(source) if one.name == name]
        found = running[0].session if running else None
        if found is None:
            kept = source.kept(name)
            found = kept.session if kept is not None else None
        if found is None:
            return None
        try:
            chunks, tokens = found.sequence.ledger(), found.length
        except InvalidArgumentError:
            if found.closed:  # just now, in another thread
                return None
            raise
        return {
            "id": name,
            "tokens": tokens,
            "chunks": "".join(_tier(chunk) for chunk in chunks),
            "recalled": [chunk.chunk for chunk in chunks if chunk.recalled],
            "pinned": [chunk.chunk for chunk in chunks if chunk.pins],
            "damaged": [chunk.chunk for chunk in chunks if chunk.damaged],
        }


def turns_of(source: Conversations) -> list[ServedTurn]:
    """Returns a tenant's running turns."""
    return [one for one in source.under_way() if isinstance(one, ServedTurn)]


def _tier(chunk: Any) -> str:
    """Returns a chunk's fastest tier: r, h, d or s; - if it was released."""
    places: Iterable[bool] = (getattr(chunk, tier) for tier in _TIERS)
    return next((letter for letter, here in zip("rhds", places) if here), "-")
