"""Work that may wait for the disk or take a while, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvpager.server import errors

_Result = TypeVar("_Result")


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """What `work` returns in a thread. Raises ApiError for what it raises."""
    try:
        return await asyncio.to_thread(work)
    except Exception as error:
        raise errors.of(error) from error
