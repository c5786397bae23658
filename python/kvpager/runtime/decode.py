"""Token after token, of one session or of several in common forwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpager.runtime.packing import advance
from kvpager.runtime.stream import GeneratedToken, Stream

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session


def decode(engine: Engine, streams: list[Stream]) -> Iterator[tuple[Session, int | GeneratedToken]]:
    """Yields (session, token) as tokens are produced, sessions in turn. May be abandoned anywhere.

    Nothing is remembered between tokens but what the sessions hold, so a caller may append to a
    session, trim or save it while its stream is suspended.
    """
    waiting = deque(streams)
    while waiting:
        turn = [waiting.popleft() for _ in range(min(len(waiting), engine.rows))]
        advance(engine, turn)
        for stream in turn:
            session = stream.session
            # Not ready: its owner changed it meanwhile, or it needs another forward.
            while stream.live and not session.closed and session.ready:
                yield session, stream.sample()
                if stream.live and not session.closed:
                    session.advance()
            if stream.live:
                waiting.append(stream)
