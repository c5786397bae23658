"""Responses that are computed while nobody waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from kvpager.server import errors
from kvpager.server.errors import ApiError
from kvpager.server.replay import Replay

if TYPE_CHECKING:
    from kvpager.server.exchange import Exchange


class Turn(Protocol):
    """A response that comes into being."""

    response: Any
    replay: Replay | None
    input_items: list[dict[str, Any]]

    async def whole(self, exchange: Any) -> None:
        """Computes all of it."""
        ...

    def fail(self, error: ApiError) -> None:
        """Notes what it failed of."""
        ...


class BackgroundResponses:
    """Those that run, and those that failed, which no snapshot remembers. Of the event loop."""

    MOST_FAILED = 1024

    def __init__(self) -> None:
        self._turns: dict[tuple[str, str], tuple[Turn, asyncio.Task[None], Exchange]] = {}
        self._failed: dict[tuple[str, str], Turn] = {}

    def start(self, tenant: str, turn: Turn, exchange: Exchange) -> None:
        """Goes on with a response whose request has begun."""
        key = (tenant, turn.response.id)
        task = asyncio.ensure_future(self._run(key, turn, exchange))
        self._turns[key] = (turn, task, exchange)

    def get(self, tenant: str, response_id: str) -> Turn | None:
        """One that runs or failed."""
        running = self._turns.get((tenant, response_id))
        return running[0] if running is not None else self._failed.get((tenant, response_id))

    def forget(self, tenant: str, response_id: str) -> bool:
        """Forgets one that failed or was cancelled; whether there was one."""
        return self._failed.pop((tenant, response_id), None) is not None

    async def cancel(self, tenant: str, response_id: str) -> Turn | None:
        """Ends one that runs; None if none of that id does."""
        running = self._turns.get((tenant, response_id))
        if running is None:
            return None
        turn, task, exchange = running
        await exchange.release()
        await asyncio.wait({task})
        return turn

    async def _run(self, key: tuple[str, str], turn: Turn, exchange: Exchange) -> None:
        try:
            await turn.whole(exchange)
        except Exception as error:
            turn.fail(errors.of(error))
            self._failed[key] = turn
            while len(self._failed) > self.MOST_FAILED:
                del self._failed[next(iter(self._failed))]
        finally:
            await exchange.release()
            self._turns.pop(key, None)
