"""Token after token: one row per running session in each forward of M rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpager.runtime.batch import Batch
from kvpager.runtime.repair import run
from kvpager.runtime.sampling import Sampling

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session


@dataclass
class Stream:
    """One session's generation: what is left of its budget and when it ends before."""

    session: Session
    sampling: Sampling
    remaining: int
    eos: frozenset[int]
    stop: tuple[tuple[int, ...], ...]
    produced: list[int] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether another token is to come."""
        if self.remaining <= 0:
            return False
        if self.produced and self.produced[-1] in self.eos:
            return False
        return not any(tuple(self.produced[-len(stop) :]) == stop for stop in self.stop)

    def sample(self) -> int:
        """The next token; from here on it is the session's pending one."""
        token = self.session.sample(self.sampling)
        self.produced.append(token)
        self.remaining -= 1
        return token


def decode(engine: Engine, streams: list[Stream]) -> Iterator[tuple[Session, int]]:
    """Yields (session, token) as tokens are produced, sessions in turn. May be abandoned anywhere.

    Nothing is remembered between tokens but what the sessions hold, so a caller may append to a
    session, trim or save it while its stream is suspended.
    """
    while live := [stream for stream in streams if stream.live]:
        for start in range(0, len(live), engine.rows):
            turn = live[start : start + engine.rows]
            _advance(engine, [stream.session for stream in turn])
            for stream in turn:
                if stream.session.ready:  # else its owner changed it meanwhile: the next turn
                    yield stream.session, stream.sample()


def read_logits(engine: Engine, session: Session) -> torch.Tensor:
    """Logits after the last committed token, by a row that reads; what is pending stays so."""
    batch = Batch(engine.rows)
    _add_reader(batch, session)
    return session.keep_logits(run(engine, batch)[0])


def _advance(engine: Engine, sessions: list[Session]) -> None:
    """In one forward: commits pending tokens, learns the logits after each session's last."""
    batch = Batch(engine.rows)
    advanced = []
    for session in sessions:
        engine.check_session(session)
        if session.ready:
            continue
        if session.pending is None:
            _add_reader(batch, session)
        else:
            token = np.array([session.pending], dtype=np.int32)
            batch.wanted += batch.commit(session.sequence, session.committed, token)
        advanced.append(session)
    if advanced:
        for session, logits in zip(advanced, run(engine, batch)):
            session.keep_logits(logits)


def _add_reader(batch: Batch, session: Session) -> None:
    last = session.committed - 1
    batch.wanted += batch.read(session.sequence, last, session.token_at(last))
