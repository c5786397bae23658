"""Token after token, of one session or of several in common forwards."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpager.runtime.packing import advance
from kvpager.runtime.stream import GeneratedToken, Stream

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session

_Token = TypeVar("_Token")
_Step = tuple["Session", int | GeneratedToken]


class TokenIterator(Iterator[_Token], Generic[_Token]):
    """Tokens as they are produced. May be abandoned anywhere, before the first one too.

    Room that was held for the texts is given back when the iterator ends, fails, is closed, or is
    held by nobody any more; for each of several texts as soon as that one ends.
    """

    def __init__(
        self, engine: Engine, streams: list[Stream], pick: Callable[[_Step], _Token]
    ) -> None:
        """`pick`: what to hand out of (session, token)."""
        self._steps = _decode(engine, streams)
        self._pick = pick
        self._finalizer = weakref.finalize(self, _end, streams)
        self._finalizer.atexit = False

    def __next__(self) -> _Token:
        try:
            return self._pick(next(self._steps))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it. Twice is harmless."""
        try:
            self._steps.close()
        finally:
            self._finalizer()


def _end(streams: list[Stream]) -> None:
    for stream in streams:
        stream.leave()


def _decode(engine: Engine, streams: list[Stream]) -> Generator[_Step, None, None]:
    """Yields (session, token) as tokens are produced, sessions in turn.

    Nothing is remembered between tokens but what the sessions hold, so a caller may append to a
    session, trim or save it while its stream is suspended.
    """
    waiting = deque(streams)
    while waiting:
        turn = [waiting.popleft() for _ in range(min(len(waiting), engine.rows))]
        advance(engine, turn)
        for stream in turn:
            session, finish = stream.session, None
            # Not ready: its owner changed it meanwhile, or it needs another forward.
            while not session.closed and session.ready:
                token = stream.sample()
                finish = stream.finish
                if finish is not None:
                    stream.leave()
                yield session, token
                if finish is not None or session.closed or not session.advance():
                    break
            if finish is None:
                waiting.append(stream)
