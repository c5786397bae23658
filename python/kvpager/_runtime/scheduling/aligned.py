"""Forwards of a model with recurrent layers: one sequence at a time, chunk by chunk.

An exact forward is one whole chunk of one sequence from the exact state before it, without padding
and without other sequences: so the bits of a sealed chunk depend on its tokens alone. Rows of a
tail and decoded rows are run as they come, from the state before them; they are dropped before
their chunk would be sealed, and computed again as a whole chunk.

Models whose recurrent layers take one token at a time have forwards of one row: then every row is
exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.recurrent.cursor import StateCursor
from kvpager._runtime.scheduling.chunks import next_chunk
from kvpager._runtime.scheduling.feed import Feed, runnable
from kvpager._runtime.scheduling.recompute import run
from kvpager._runtime.scheduling.stream import Stream
from kvpager._runtime.scheduling.trim import PrimaryCache
from kvpager._runtime.text.transcript import Transcript
from kvpager.errors import InvalidArgumentError


def advance(core: EngineCore, streams: Iterable[Stream] = (), feeds: Iterable[Feed] = ()) -> None:
    """Like packing.advance: a forward for each stream that needs one, and a chunk of one prompt.

    The prompt that was served least comes first. After an error, the streams before it have
    advanced.
    """
    for stream in streams:
        transcript = stream.transcript
        core.check_open(transcript)
        if not transcript.ready:
            _advance_stream(core, transcript)
    waiting = runnable(feeds, core.facts.layout.chunk_tokens)
    if waiting:
        _advance_feed(
            core, min(waiting, key=lambda feed: (feed.account.served, feed.served)), prompt=True
        )


def read_logits(core: EngineCore, transcript: Transcript) -> torch.Tensor:
    """Logits after the session's last committed token, with the bits of a cold run."""
    while True:
        _return_to_state(core, transcript)
        if transcript.uncomputed.size:
            _advance_feed(core, Feed(transcript, transcript.tokens[: transcript.next_position]))
        elif transcript.provisional:
            _drop_tail(core, transcript)
        elif (known := transcript.known_logits) is not None:
            return known
        else:
            state = _states(transcript).at(transcript.committed)
            assert state is not None
            transcript.keep_logits(core.runner.logits_after(state))


def _advance_stream(core: EngineCore, transcript: Transcript) -> None:
    """Commits the pending token, or uncomputed tokens before it."""
    _return_to_state(core, transcript)
    pending = transcript.pending
    if transcript.must_recompute:
        if not transcript.uncomputed.size:
            _drop_tail(core, transcript)
        _advance_feed(core, Feed(transcript, transcript.tokens))
        return
    start = transcript.committed
    state = _states(transcript).at(start)
    assert state is not None
    if pending is None:
        if not start:
            raise InvalidArgumentError("generate: the session is empty; call prefill(ids) first")
        transcript.keep_logits(core.runner.logits_after(state))
        return
    batch = Batch(1, exact=core.rows == 1)
    batch.before = state
    batch.wanted.append(batch.commit_one(transcript.sequence, start, pending))
    if not batch.exact:
        transcript.mark_provisional()
    _run(core, transcript, batch)


def _advance_feed(core: EngineCore, feed: Feed, *, prompt: bool = False) -> None:
    """Computes the next chunk of a prompt, or its tail."""
    feed.adopt(core)
    transcript = feed.transcript
    _return_to_state(core, transcript)
    if not feed.left:
        return
    if core.config.exact is not False:
        _drop_tail(core, transcript)
        _return_to_state(core, transcript)
    start = feed.done
    state = _states(transcript).at(start)
    assert state is not None
    batch = next_chunk(core, transcript.sequence, feed.ids, start, state)
    ends = start + batch.used == len(feed.ids)
    if ends:
        batch.wanted.append(batch.used - 1)
    feed.start()
    _run(core, transcript, batch, ends=ends and prompt)
    feed.served += batch.used
    feed.account.served += batch.used
    transcript.count_computed(start, batch.used)


def _run(core: EngineCore, transcript: Transcript, batch: Batch, *, ends: bool = False) -> None:
    """ends: whether a prompt ends here, so that its last whole chunk gets a checkpoint."""
    logits = run(core, batch)
    assert batch.after is not None
    states = _states(transcript)
    states.advance(batch.after)
    if ends:
        states.keep_base()
    if batch.wanted:
        transcript.keep_logits(logits[0])


def _states(transcript: Transcript) -> StateCursor:
    assert transcript.states is not None
    return transcript.states


def _return_to_state(core: EngineCore, transcript: Transcript) -> None:
    """Drops the K/V after the last position with a state; their tokens become uncomputed.

    K/V without a state occur after a restore, after shared chunks were adopted, and when a state
    could not be read.
    """
    states = _states(transcript)
    before = transcript.committed
    while states.at(transcript.committed) is None:
        PrimaryCache(transcript).rewind(states.nearest(transcript.committed))
    core.checkpoints.note_recomputed(before - transcript.committed)


def _drop_tail(core: EngineCore, transcript: Transcript) -> None:
    """Goes back to the last chunk boundary, if forwards have more than one row.

    A forward of fewer rows computed the tail; the whole chunk needs one of all its rows.
    """
    size = core.facts.layout.chunk_tokens
    if core.rows > 1 and transcript.committed % size:
        PrimaryCache(transcript).rewind(transcript.committed // size * size)
