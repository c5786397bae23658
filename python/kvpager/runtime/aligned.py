"""Forwards of a model with recurrent layers: one sequence at a time, chunk by chunk.

An exact forward is one whole chunk of one sequence from the exact state before it, with no padding
and nobody beside it: so what is sealed is a function of tokens alone, whoever computed it and when.
The rows of a tail, and decoded ones, are run as they come, from the state before them; they are
dropped before a chunk would be sealed, and computed again as a whole chunk.

Models whose layers go on from a state by single tokens only have forwards of one row: then every
row is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from kvpager.errors import InvalidArgumentError
from kvpager.runtime.batch import Batch
from kvpager.runtime.chunks import next_chunk
from kvpager.runtime.feed import Feed, runnable
from kvpager.runtime.primary import PrimaryCache
from kvpager.runtime.recurrent import StateCursor
from kvpager.runtime.repair import run

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session
    from kvpager.runtime.stream import Stream


def advance(engine: Engine, streams: Iterable[Stream] = (), feeds: Iterable[Feed] = ()) -> None:
    """As packing.advance: a forward for each stream that needs one, and a chunk of one prompt.

    The prompt that was served least comes first. An error leaves those before it further on.
    """
    for stream in streams:
        session = stream.session
        engine.check_session(session)
        if not session.ready:
            _advance_stream(engine, session)
    waiting = runnable(feeds, engine.layout.chunk_tokens)
    if waiting:
        _advance_feed(engine, min(waiting, key=lambda feed: feed.served), prompt=True)


def read_logits(engine: Engine, session: Session) -> torch.Tensor:
    """Logits after the session's last token that is not pending, as a cold run has them."""
    while True:
        _return_to_state(engine, session)
        if session.owed.size:
            _advance_feed(engine, Feed(session, session.tokens[: session.cursor.told]))
        elif session.cursor.provisional:
            _drop_tail(engine, session)
        elif (known := session.known_logits) is not None:
            return known
        else:
            state = _states(session).at(session.committed)
            assert state is not None
            session.keep_logits(engine.runner.logits_after(state))


def _advance_stream(engine: Engine, session: Session) -> None:
    """Commits the pending token, or what has to be there before it."""
    _return_to_state(engine, session)
    pending = session.pending
    if session.must_settle:
        if not session.owed.size:
            _drop_tail(engine, session)
        _advance_feed(engine, Feed(session, session.tokens))
        return
    start = session.committed
    state = _states(session).at(start)
    assert state is not None
    if pending is None:
        if not start:
            raise InvalidArgumentError("generate: the session is empty; call prefill(ids) first")
        session.keep_logits(engine.runner.logits_after(state))
        return
    batch = Batch(1, exact=engine.rows == 1)
    batch.before = state
    batch.wanted.append(batch.commit_one(session.sequence, start, pending))
    if not batch.exact:
        session.note_provisional()
    _run(engine, session, batch)


def _advance_feed(engine: Engine, feed: Feed, *, prompt: bool = False) -> None:
    """The next chunk of a prompt, or its tail."""
    feed.adopt(engine)
    session = feed.session
    _return_to_state(engine, session)
    if not feed.left:
        return
    if engine.config.exact is not False:
        _drop_tail(engine, session)
        _return_to_state(engine, session)
    start = feed.done
    state = _states(session).at(start)
    assert state is not None
    batch = next_chunk(engine, session.sequence, feed.ids, start, state)
    ends = start + batch.used == len(feed.ids)
    if ends:
        batch.wanted.append(batch.used - 1)
    feed.start()
    _run(engine, session, batch, ends=ends and prompt)
    feed.served += batch.used
    session.note_computed(start, batch.used)


def _run(engine: Engine, session: Session, batch: Batch, *, ends: bool = False) -> None:
    """ends: a prompt does, so that the last whole chunk before its end is worth a checkpoint."""
    logits = run(engine, batch)
    assert batch.after is not None
    states = _states(session)
    states.advance(batch.after)
    if ends:
        states.keep_base()
    if batch.wanted:
        session.keep_logits(logits[0])


def _states(session: Session) -> StateCursor:
    assert session.states is not None
    return session.states


def _return_to_state(engine: Engine, session: Session) -> None:
    """Gives up the K/V after the last position at which a state is held; they are owed.

    There are such after a restore, when chunks of others were adopted, and where a state could not
    be read.
    """
    states = _states(session)
    before = session.committed
    while states.at(session.committed) is None:
        PrimaryCache(session).rewind(states.nearest(session.committed))
    engine.checkpoints.note_recomputed(before - session.committed)


def _drop_tail(engine: Engine, session: Session) -> None:
    """Goes back to the last chunk boundary, if forwards have more than one row.

    A tail was computed by a forward of as many rows as it has, and its chunk has to be by another.
    """
    size = engine.layout.chunk_tokens
    if engine.rows > 1 and session.committed % size:
        PrimaryCache(session).rewind(session.committed // size * size)
