"""A client that goes away while its request is computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

_Result = TypeVar("_Result")


class ClientGone(Exception):  # noqa: N818  # nothing went wrong here
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """What `work` returns. Raises ClientGone if the client goes away, and cancels the work."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
