"""Responses that are computed while nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

from kvpager.server import errors
from kvpager.server.accepted import Accepted
from kvpager.server.errors import ApiError
from kvpager.server.replay import Replay

if TYPE_CHECKING:
    from kvpager.server.exchange import Exchange


_log = logging.getLogger(__name__)


class Turn(Protocol):
    """A response that comes into being."""

    response: Any
    replay: Replay | None
    input_items: list[dict[str, Any]]

    async def whole(self, exchange: Any) -> None:
        """Computes all of it."""
        ...

    def fail(self, error: ApiError, *, stopped: bool = False) -> None:
        """Notes what it failed of. stopped: by the end of the server, so that it is incomplete."""
        ...


class BackgroundResponses:
    """Those that run, and those that failed, which no snapshot remembers. Of the event loop.

    Attributes:
        stopping: whether the server ends.
    """

    MOST_FAILED = 1024

    def __init__(self, accepted: Accepted) -> None:
        """accepted: where they are recorded."""
        self.stopping = False
        self._accepted = accepted
        self._turns: dict[tuple[str, str], tuple[Turn, asyncio.Task[None], Exchange]] = {}
        self._failed: dict[tuple[str, str], Turn] = {}

    async def start(self, tenant: str, turn: Turn, exchange: Exchange) -> None:
        """Goes on with a response whose request has begun, and records that it was accepted."""
        key = (tenant, turn.response.id)
        await self._record(key, turn)
        task = asyncio.ensure_future(self._run(key, turn, exchange))
        self._turns[key] = (turn, task, exchange)

    def get(self, tenant: str, response_id: str) -> Turn | None:
        """One that runs or failed."""
        running = self._turns.get((tenant, response_id))
        return running[0] if running is not None else self._failed.get((tenant, response_id))

    def forget(self, tenant: str, response_id: str) -> bool:
        """Forgets one that failed or was cut off; whether there was one."""
        recorded = self._accepted.remove(tenant, response_id)
        return self._failed.pop((tenant, response_id), None) is not None or recorded

    async def recorded(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """The response and the input items of one that a server has accepted before."""
        return await asyncio.to_thread(self._accepted.read, tenant, response_id)

    async def ended(self) -> None:
        """Waits for those that run."""
        if self._turns:
            await asyncio.wait([task for _, task, _ in self._turns.values()])

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
            turn.fail(errors.of(error), stopped=self.stopping)
            self._failed[key] = turn
            await self._record(key, turn)
            while len(self._failed) > self.MOST_FAILED:
                del self._failed[next(iter(self._failed))]
        else:
            await asyncio.to_thread(self._accepted.remove, *key)  # its snapshot has it
        finally:
            await exchange.release()
            self._turns.pop(key, None)

    async def _record(self, key: tuple[str, str], turn: Turn) -> None:
        response, items = turn.response.model_dump(), turn.input_items
        try:
            await asyncio.to_thread(self._accepted.write, key[0], response, items)
        except OSError as error:
            _log.warning("response %s could not be recorded: %s", key[1], error)
