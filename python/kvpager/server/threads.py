"""Work that may wait for the disk or take a while, away from the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from kvpager.server import errors

_Result = TypeVar("_Result")
_THREADS = 2  # for requests with long bodies, and as many for all others
_LONG_BYTES = 64 << 10
_is_long: ContextVar[bool] = ContextVar("is_long", default=False)


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """What `work` returns in a thread. Raises ApiError for what it raises."""
    try:
        return await asyncio.to_thread(work)
    except Exception as error:
        raise errors.of(error) from error


class Workers:
    """Threads that read requests: JSON, templates, tokens, grammars. Of the event loop.

    They are few, so that they leave Python's lock to others. Requests with long bodies have threads
    of their own, of which a tenant has one at a time, so that no other request waits for them.
    """

    def __init__(self, longest: float) -> None:
        """longest: seconds that a piece of work may take; 0: any number."""
        self._longest = longest or None
        self._short = concurrent.futures.ThreadPoolExecutor(_THREADS, "kvpager-read")
        self._long = concurrent.futures.ThreadPoolExecutor(_THREADS, "kvpager-read-long")
        self._shares: dict[str, asyncio.Semaphore] = {}

    @staticmethod
    def expect(body_bytes: int) -> None:
        """Says how long the body is of the request that this task, and those it starts, are for."""
        _is_long.set(body_bytes > _LONG_BYTES)

    async def run(
        self,
        work: Callable[[], _Result],
        tenant: str,
        *,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> _Result:
        """Returns what `work` returns in one of the threads.

        A piece of work that takes too long goes on, as threads cannot be ended, but nobody waits
        for it any more.

        Args:
            work: is called in a thread.
            tenant: whose share of the threads it takes.
            on_dropped: called if it will never be called, because the caller was cancelled or time
                was over before a thread was free.

        Raises:
            ApiError: for what it raises, or 408 if it takes too long.
        """
        is_long = _is_long.get()
        pool = self._long if is_long else self._short
        share = self._shares.setdefault(tenant, asyncio.Semaphore(1)) if is_long else None
        running: concurrent.futures.Future[_Result] | None = None
        taken = False

        async def waiting() -> _Result:
            nonlocal running, taken
            if share is not None:
                await share.acquire()
            taken = True
            running = pool.submit(work)
            return await asyncio.shield(asyncio.wrap_future(running))

        try:
            return await asyncio.wait_for(waiting(), self._longest)
        except asyncio.TimeoutError as error:
            if running is not None and running.done() and not running.cancelled():
                raise errors.of(error) from error  # its own
            raise errors.ApiError(
                408,
                f"reading the request took longer than {self._longest} s, which read_timeout "
                "allows",
                kind="timeout_error",
                code=errors.TIMEOUT,
                headers={"x-should-retry": "false"},
            ) from None
        except Exception as error:
            raise errors.of(error) from error
        finally:
            if running is None or running.cancel():
                on_dropped()
                if taken and share is not None:
                    share.release()
            elif share is not None:
                loop = asyncio.get_running_loop()
                running.add_done_callback(lambda _: _released(loop, share))

    def close(self) -> None:
        """Lets the threads end."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _released(loop: asyncio.AbstractEventLoop, share: asyncio.Semaphore) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(share.release)
