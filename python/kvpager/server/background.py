"""Responses that do not end with their connection, those of a process that died included."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from kvpager.server import errors

if TYPE_CHECKING:
    from kvpager.server.response_turn import ResponseTurn

Event = tuple[str, dict[str, Any]]  # name and values
STOPPED = {"reason": "server_stopped"}
_BUSY = (429, 503)
_THREADS = 2
_Result = TypeVar("_Result")


class EventLog:
    """The events of a running response, from the first one on. Used by the event loop.

    Attributes:
        ended: whether it has the last one.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.ended = False
        self._closed = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event, *, last: bool = False) -> None:
        """Appends an event for all readers."""
        self._events.append(event)
        self.ended = last
        self._notify()

    def close(self) -> None:
        """Ends its readers, also where the last event is missing."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def events(self, after: int = -1) -> AsyncIterator[tuple[int, Event]]:
        """Yields every event after number `after`, with its number, until it is closed."""
        number = after + 1
        while True:
            while number < len(self._events):
                yield number, self._events[number]
                number += 1
            if self.ended or self._closed:
                return
            await self._changed.wait()


class JournalThreads:
    """Threads that wait for the disk, so that no others do."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "kvpager-journals")

    async def run(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Returns what `work` returns."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        """Waits for no work."""
        self._pool.shutdown(wait=False)


class BackgroundResponses:
    """Responses that run here or are followed here, and those that failed. For the event loop.

    Attributes:
        stopping: whether the server is ending.
        threads: for journals.
    """

    MOST_FAILED = 1024

    def __init__(self) -> None:
        self.stopping = False
        self.threads = JournalThreads()
        self._turns: dict[tuple[str, str], tuple[ResponseTurn, asyncio.Task[None]]] = {}
        self._failed: dict[tuple[str, str], ResponseTurn] = {}  # those without a journal
        self._opening: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    def start(self, tenant: str, turn: ResponseTurn) -> None:
        """Computes a response that has begun, or follows one that is recorded."""
        key = (tenant, turn.response.id)
        self._turns[key] = (turn, asyncio.ensure_future(self._run(key, turn)))

    def get(self, tenant: str, response_id: str) -> ResponseTurn | None:
        """A response that runs, is followed or failed."""
        running = self._turns.get((tenant, response_id))
        return running[0] if running is not None else self._failed.get((tenant, response_id))

    def opening(self, tenant: str, response_id: str) -> asyncio.Lock:
        """Held by a request that looks for a response, so that no two start it."""
        return self._opening.setdefault((tenant, response_id), asyncio.Lock())

    def forget(self, tenant: str, response_id: str) -> bool:
        """Forgets a response that failed; returns whether there was one."""
        return self._failed.pop((tenant, response_id), None) is not None

    def stop_following(self) -> None:
        """Ends the reading of other processes' journals."""
        for turn, task in self._turns.values():
            if not turn.begun:
                task.cancel()

    async def ended(self) -> None:
        """Waits for the responses that run."""
        self.stop_following()
        if self._turns:
            await asyncio.wait([task for _, task in self._turns.values()])

    async def cancel(
        self, tenant: str, response_id: str, *, keep: bool = False
    ) -> ResponseTurn | None:
        """Ends a response that runs, wherever it does; None if none of that id is known here.

        keep: whether what this process has produced of it is its answer.
        """
        running = self._turns.get((tenant, response_id))
        if running is None:
            return None
        turn, task = running
        if keep and turn.begun:
            turn.stop()
        else:
            await turn.cancel()
        await asyncio.wait({task})
        return turn

    async def _run(self, key: tuple[str, str], turn: ResponseTurn) -> None:
        try:
            await turn.whole()
        except Exception as error:
            await self._end(key, turn, errors.of(error))
        finally:
            await turn.release()
            self._turns.pop(key, None)
            if turn.log is not None:
                turn.log.close()

    async def _end(self, key: tuple[str, str], turn: ResponseTurn, error: errors.ApiError) -> None:
        """Records a failure, unless another process can go on."""
        busy = turn.recorded is not None and error.status in _BUSY and error.code != "cancelled"
        if turn.goes_on_elsewhere or busy:
            await turn.leave_journal(deleted=False)
            return
        turn.fail(error, stopped=self.stopping)
        if await turn.record_end():
            return
        self._failed[key] = turn
        while len(self._failed) > self.MOST_FAILED:
            del self._failed[next(iter(self._failed))]
