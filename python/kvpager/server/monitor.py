"""What the page shows, computed once however many look at it. No text of prompts is in it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from kvpager._version import __version__
from kvpager.errors import InvalidArgumentError
from kvpager.server.session_list import listed
from kvpager.server.tenants import Tenant

if TYPE_CHECKING:
    from kvpager.server.service import Service

PERIOD = 1.0
_WINDOW = 60.0  # seconds that latencies are of
_RATE_WINDOW = 5.0  # and rates
_MOST_SHOWN = 200
_TIERS = ("resident", "on_host", "on_disk", "in_snapshot")


class Recent:
    """What happened in the last minute: tokens and latencies. Of the event loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, float]] = deque(maxlen=50_000)

    def note(self, kind: str, value: float) -> None:
        """Something happened now."""
        self._events.append((time.monotonic(), kind, value))

    def rate(self, kind: str) -> float:
        """The sum of a kind's values, per second."""
        since = time.monotonic() - _RATE_WINDOW
        return sum(value for at, one, value in self._events if one == kind and at >= since) / (
            _RATE_WINDOW
        )

    def quantiles(self, kind: str) -> dict[str, float | None]:
        """The median and the 99th percentile of a kind's values; None without any."""
        since = time.monotonic() - _WINDOW
        values = sorted(value for at, one, value in self._events if one == kind and at >= since)
        if not values:
            return {"p50": None, "p99": None}
        last = len(values) - 1
        return {"p50": values[last // 2], "p99": values[min(last, int(0.99 * len(values)))]}


class Monitor:
    """The server's state, once a second while somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._told: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def events(self, tenant: Tenant, session: str | None) -> AsyncIterator[dict[str, Any]]:
        """The state for a tenant, again and again; with the chunks of a conversation."""
        while not self._service.draining:
            state = dict(await self.state(tenant))
            if session is not None:
                state["strip"] = await asyncio.to_thread(self.strip, tenant, session)
            yield state
            await asyncio.sleep(PERIOD)

    async def state(self, tenant: Tenant) -> dict[str, Any]:
        """The state, not older than a second."""
        now = time.monotonic()
        at, task = self._told.get(tenant.name, (0.0, None))
        if task is None or now - at >= PERIOD:
            task = asyncio.ensure_future(self._computed(tenant))
            self._told[tenant.name] = (now, task)
        return await asyncio.shield(task)

    async def _computed(self, tenant: Tenant) -> dict[str, Any]:
        service, recent = self._service, self._service.recent
        kept = service.conversations(tenant)
        gauges, sessions = await asyncio.to_thread(lambda: (service.gauges(), listed(kept)))
        pool = service.engine.config
        return {
            "model": service.model,
            "version": __version__,
            "uptime_s": time.time() - service.started,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "requests": [one.describe() for one in service.exchanges_of(kept)],
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
            "sessions": [one.model_dump() for one in sessions[:_MOST_SHOWN]],
            "sessions_in_all": len(sessions),
        }

    def strip(self, tenant: Tenant, name: str) -> dict[str, Any] | None:
        """Where each chunk of a conversation is; None if it is not in memory."""
        source = self._service.conversations(tenant)
        running = [one for one in self._service.exchanges_of(source) if one.name == name]
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


def _tier(chunk: Any) -> str:
    """The fastest tier that has a chunk: r, h, d or s; - for one that was released."""
    places: Iterable[bool] = (getattr(chunk, tier) for tier in _TIERS)
    return next((letter for letter, here in zip("rhds", places) if here), "-")
