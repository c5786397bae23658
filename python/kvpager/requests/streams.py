"""Requests of a scheduler for asyncio: a thread steps it, tasks await what it produces."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Literal, TypeVar

from kvpager._runtime.scheduling.decode import require_text
from kvpager.errors import InvalidArgumentError
from kvpager.requests.request import Request, RequestCompletion, Token
from kvpager.requests.scheduler import Scheduler

_Piece = TypeVar("_Piece")
_log = logging.getLogger(__name__)


class RequestStream(AsyncIterator[_Piece], Generic[_Piece]):
    """The text or tokens of one request, as they are produced; made by `AsyncScheduler`.

    To stop early, call `aclose`, cancel the task or drop the stream: the request is cancelled.
    """

    def __init__(self, submit: Callable[[Any, Any], Request], *, as_text: bool) -> None:
        """submit: queues the request with these `on_token` and `on_finish`."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Queue[Any] = asyncio.Queue()

        def send(piece: object) -> None:  # called in the thread that steps
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.put_nowait, piece)

        def on_token(request: Request, token: Token) -> None:
            piece = request.piece if as_text else token
            if not as_text or piece:
                send(piece)

        # The request does not refer to the stream, so that one that is dropped is cancelled.
        self.request = submit(on_token, lambda _, completion: send(completion))
        self._ready = ready
        self._ended = False
        finalizer = weakref.finalize(self, _cancel, self.request)
        finalizer.atexit = False

    def __aiter__(self) -> RequestStream[_Piece]:
        return self

    async def __anext__(self) -> _Piece:
        """The next piece.

        Raises:
            PagerError: or what else ended the request with `finish_reason` "error".
        """
        if self._ended:
            raise StopAsyncIteration
        try:
            piece = await self._ready.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if not isinstance(piece, RequestCompletion):
            return piece  # type: ignore[no-any-return]
        self._end(piece)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the request if it goes on. May be called twice."""
        self._ended = True
        _cancel(self.request)

    @property
    def completion(self) -> RequestCompletion | None:
        """The result of the request; None until it is finished."""
        return self.request.completion

    async def complete(self) -> RequestCompletion:
        """Waits for the end, also of a request that was cancelled. Any number of tasks may.

        Raises:
            PagerError: or what else ended the request with `finish_reason` "error".
        """
        while True:
            try:
                piece = await self._ready.get()
            except asyncio.CancelledError:
                await self.aclose()
                raise
            if isinstance(piece, RequestCompletion):
                self._end(piece)
                return piece

    def _end(self, completion: RequestCompletion) -> None:
        """Leaves the completion to others that wait for it. Raises its error."""
        self._ended = True
        self._ready.put_nowait(completion)
        if completion.error is not None:
            raise completion.error


def _cancel(request: Request) -> None:
    if request.completion is None:
        request.cancel()


class AsyncScheduler:
    """Runs requests of many asyncio tasks together; made by `Engine.serve`.

    A thread of its own steps a `Scheduler` while there is work. All methods belong to the event
    loop; the sessions of running requests belong to that thread until the requests are finished.

    Example:
        >>> async with engine.serve() as serving:
        ...     async for text in serving.chat(engine.session(), "Hello"):
        ...         print(text, end="", flush=True)
    """

    def __init__(self, scheduler: Scheduler, *, has_text: bool) -> None:
        """has_text: whether the engine has a tokenizer, so that streams give text."""
        self._scheduler = scheduler
        self._has_text = has_text
        self._thread = threading.Thread(
            target=_step_while_open, args=(scheduler,), name="kvpager-serve", daemon=True
        )
        self._thread.start()
        finalizer = weakref.finalize(self, scheduler.close)
        finalizer.atexit = False

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that its thread steps; any thread may submit to it."""
        return self._scheduler

    def stream(
        self,
        prompt: Any,
        max_new_tokens: Any = None,
        *,
        stream: Literal[True, "tokens"] | None = None,
        **options: Any,
    ) -> RequestStream[Any]:
        """Submits a prompt; arguments and errors as for `Scheduler.submit`.

        Args:
            prompt: text, token ids, or a session to continue.
            max_new_tokens: as for `Session.generate`.
            stream: True for text, "tokens" for ids or `GeneratedToken`; by default text if the
                engine has a tokenizer.
            **options: of `Scheduler.submit`.
        """
        return self._stream(
            stream,
            lambda on_token, on_finish: self._scheduler.submit(
                prompt, max_new_tokens, on_token=on_token, on_finish=on_finish, **options
            ),
        )

    def chat(
        self,
        session: Any,
        messages: Any,
        max_new_tokens: Any = None,
        *,
        stream: Literal[True, "tokens"] | None = None,
        **options: Any,
    ) -> RequestStream[Any]:
        """Submits a turn of a session's conversation; as `Scheduler.chat`.

        Args:
            session: nothing else may use it until the stream has ended.
            messages: as for `Session.chat`.
            max_new_tokens: likewise.
            stream: as for `stream`.
            **options: of `Scheduler.chat`.
        """
        return self._stream(
            stream,
            lambda on_token, on_finish: self._scheduler.chat(
                session, messages, max_new_tokens, on_token=on_token, on_finish=on_finish, **options
            ),
        )

    async def aclose(self) -> None:
        """Cancels unfinished requests and ends the thread. May be called twice."""
        self._scheduler.close()
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> AsyncScheduler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _stream(self, stream: object, submit: Callable[[Any, Any], Request]) -> RequestStream[Any]:
        if stream not in (None, True, "tokens"):
            raise InvalidArgumentError(f'stream is {stream!r}; expected True (text) or "tokens"')
        if stream is True:
            require_text(has_text=self._has_text)
        as_text = self._has_text if stream is None else stream is True
        return RequestStream(submit, as_text=as_text)


def _step_while_open(scheduler: Scheduler) -> None:
    """Steps while there are requests, until the scheduler is closed."""
    while True:
        with scheduler.changed:
            scheduler.changed.wait_for(lambda: scheduler.closed or not scheduler.idle)
        if scheduler.closed:
            return
        try:
            scheduler.step_if_open()
        except BaseException as error:  # those that wait get the error; later requests try again
            _log.warning("a step of the scheduler failed: %s", error)
            scheduler.fail(error)
