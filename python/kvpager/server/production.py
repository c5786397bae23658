"""One HTTP request's answers, as the engine's thread produces them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from kvpager.requests.completion import RequestCompletion
from kvpager.requests.request import Request, Token
from kvpager.scheduling.stream import GeneratedToken


class Piece(NamedTuple):
    """What one token brought.

    Attributes:
        choice: whose it is, from 0.
        text: that it completed; may be empty.
        token: with its log-probability where that was asked for.
    """

    choice: int
    text: str
    token: Token

    @property
    def token_id(self) -> int:
        """The token's id."""
        return self.token.id if isinstance(self.token, GeneratedToken) else self.token


class Ended(NamedTuple):
    """The end of one choice; one that could not be submitted has no completion."""

    choice: int
    completion: RequestCompletion | None


OnToken = Callable[[Request, Token], object]
OnFinish = Callable[[Request, RequestCompletion], object]
Submit = Callable[[OnToken, OnFinish], Request]


class Production:
    """The choices of one request, and what comes of them in the order in which it comes.

    Made in the event loop, and read there; `submit` and `drop` may be called in other threads.

    Attributes:
        cancelled: whether `cancel` was called.
    """

    def __init__(self, choices: int, on_token: Callable[[int, float], object]) -> None:
        """on_token: called with each piece's choice and the time of its token, of perf_counter."""
        self._on_token = on_token
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[Piece | Ended] = asyncio.Queue()
        self._requests: list[Request] = []
        self._running = choices
        self._idle = asyncio.Event()
        self.cancelled = False
        self._completions: list[RequestCompletion | None] = [None] * choices

    def submit(self, choice: int, submit: Submit) -> None:
        """Queues one choice; `submit` is given its callbacks. Raises what `submit` raises."""

        def on_token(request: Request, token: Token) -> None:
            self._tell(Piece(choice, request.piece, token))

        def on_finish(request: Request, completion: RequestCompletion) -> None:
            self._tell(Ended(choice, completion))

        self._requests.append(submit(on_token, on_finish))
        if self.cancelled:
            self.cancel()

    def drop(self, *choices: int) -> None:
        """Ends choices that could not be submitted."""
        for choice in choices:
            self._tell(Ended(choice, None))

    def reopen(self) -> None:
        """Call before a choice that has ended is submitted again."""
        self._running += 1
        self._idle.clear()

    def cancel(self) -> None:
        """Ends what still runs. May be called at any time, from any thread."""
        self.cancelled = True
        for request in list(self._requests):
            if request.completion is None:
                request.cancel()

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """Pieces and ends, until every choice has ended."""
        while self._running or not self._ready.empty():
            yield await self._ready.get()

    async def ended(self) -> None:
        """Waits until every choice has ended: their sessions are the engine's until then."""
        if self._running:
            await self._idle.wait()

    @property
    def state(self) -> str:
        """Of the first choice; see `Request.state`."""
        return self._requests[0].state if self._requests else "waiting"

    @property
    def prompt_tokens(self) -> int:
        """Of the first choice; 0 before it is submitted."""
        return self._requests[0].prompt_tokens if self._requests else 0

    @property
    def cached_tokens(self) -> int:
        """Of the first choice, as of now."""
        return self._requests[-1].cached_tokens if self._requests else 0

    def completions(self) -> Sequence[RequestCompletion]:
        """Every choice's. REQUIRES: all have ended."""
        return [one for one in self._completions if one is not None]

    def _tell(self, event: Piece | Ended) -> None:  # of the thread that steps, mostly
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived, event, time.perf_counter())

    def _arrived(self, event: Piece | Ended, at: float) -> None:
        if isinstance(event, Piece):
            self._on_token(event.choice, at)
        else:
            self._completions[event.choice] = event.completion
            self._running -= 1
            if not self._running:
                self._idle.set()
        self._ready.put_nowait(event)
