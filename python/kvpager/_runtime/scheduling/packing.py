"""Packs the rows of one forward: decode rows first, then prompts, then speculation.

The only place that puts rows of several sessions together. A row's bits do not depend on the other
rows, so the order only matters for speed and fairness: a token that a caller waits for goes before
the next piece of a prompt, and guesses take the rows that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvpager import pager
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import Ask, EngineCore
from kvpager._runtime.scheduling import aligned
from kvpager._runtime.scheduling.feed import Feed, runnable, share_rows
from kvpager._runtime.scheduling.recompute import run
from kvpager._runtime.scheduling.stream import Stream
from kvpager._runtime.text.transcript import Accepted, Transcript
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError, NonFiniteError
from kvpager.sampling import choose_after
from kvpager.speculation.speculation import Proposed, Speculation


def advance(
    core: EngineCore,
    streams: Iterable[Stream] = (),
    feeds: Iterable[Feed] = (),
    *,
    room: int | None = None,
) -> None:
    """Runs one forward, which makes its streams ready and advances its prompts.

    Streams that need no forward are left alone; if nothing needs one, none runs. With
    `exact="reuse"` decode rows have a forward of their own, which comes first.

    Args:
        core: the model and its pager.
        streams: of different texts; at most `core.rows` of them need a row.
        feeds: unfinished, admitted prompts of other texts.
        room: most rows for prompts; None: all that decode leaves.

    Raises:
        PagerError: from the pager, a proposer or a closed session. No session has changed.
    """
    if core.facts.recurrence is not None:
        aligned.advance(core, streams, feeds)
        return
    provisional = core.config.exact == "reuse"
    decode = Packing(core, exact=not provisional and core.config.exact is not False)
    exact = Packing(core, exact=True) if provisional else decode
    again = []
    for stream in streams:
        transcript = stream.transcript
        core.check_open(transcript)
        if transcript.advance() or transcript.ready:
            continue
        transcript.drop_accepted()
        if transcript.must_recompute:
            transcript.drop_inexact()
            again.append(Feed(transcript, transcript.tokens))
        else:
            decode.decode(transcript, stream)
    if exact is not decode and decode.used:
        decode.run()
    exact.feed(again, None)
    exact.feed(runnable(feeds, core.facts.layout.chunk_tokens), room)
    if core.config.exact == "all":
        exact.speculate()
    if exact.used:
        exact.run()


def read_logits(core: EngineCore, transcript: Transcript) -> torch.Tensor:
    """Logits after the session's last committed token; a pending token stays pending."""
    if core.facts.recurrence is not None:
        return aligned.read_logits(core, transcript)
    transcript.drop_inexact()
    while (known := transcript.known_logits) is None:
        packing = Packing(core, exact=core.config.exact is not False)
        uncomputed = transcript.uncomputed
        if uncomputed.size:
            packing.feed(
                [Feed(transcript, transcript.tokens[: transcript.committed + len(uncomputed)])],
                None,
            )
        else:
            packing.read(transcript)
        if packing.used:  # shared chunks may have provided all uncomputed tokens
            packing.run()
    return known


@dataclass
class _Share:
    """One session's rows of a forward that need logits: the first row, then guesses."""

    transcript: Transcript
    row: int
    stream: Stream | None = None
    position: int = 0  # of the first row
    guess: list[int] = field(default_factory=list)  # tokens of further rows
    guess_rows: range = range(0)
    text: TokenIds | None = None  # with the pending token, if sampling the guesses reads it
    accepted: int = 0


class Packing:
    """The rows of one forward, and the purpose of each."""

    def __init__(self, core: EngineCore, *, exact: bool) -> None:
        self._core = core
        self._batch = Batch(core.rows, exact=exact)
        self._shares: list[_Share] = []
        self._committed: dict[Transcript, int] = {}
        self._fed: list[tuple[Feed, int]] = []

    @property
    def used(self) -> int:
        """Number of rows taken."""
        return self._batch.used

    def decode(self, transcript: Transcript, stream: Stream | None = None) -> None:
        """Adds a row that commits the pending token; if none is, a row for the last logits."""
        pending = transcript.pending
        if pending is None:
            self.read(transcript)
            return
        position = transcript.committed
        row = self._batch.commit_one(transcript.sequence, position, pending)
        self._committed[transcript] = 1
        self._shares.append(_Share(transcript, row, stream, position))

    def read(self, transcript: Transcript) -> None:
        """Adds a row that reads the logits after the session's last committed token."""
        last = transcript.committed - 1
        if last < 0:  # its owner has cut it in the meantime
            raise InvalidArgumentError("generate: the session is empty; call prefill(ids) first")
        row = self._batch.read(transcript.sequence, last, transcript.token_at(last))
        self._shares.append(_Share(transcript, row))

    def feed(self, feeds: Sequence[Feed], room: int | None) -> None:
        """Adds the next rows of prompts, shared fairly; keeps logits of each prompt's last row."""
        if not feeds:
            return
        for feed in feeds:
            feed.adopt(self._core)
        room = self._batch.room if room is None else min(room, self._batch.room)
        for feed, count in share_rows(feeds, room, self._core.facts.layout.chunk_tokens):
            transcript, start = feed.transcript, feed.done
            rows = self._batch.commit(transcript.sequence, start, feed.ids[start : start + count])
            self._committed[transcript] = count
            self._fed.append((feed, count))
            if start + count == len(feed.ids):
                self._shares.append(_Share(transcript, rows[-1]))

    def speculate(self) -> None:
        """Adds guesses of the tokens after each pending one, while there is room.

        Guesses stay inside the chunk of the pending token and never fill it: so a guess takes no
        block, seals nothing, and can be dropped at any time.
        """
        guessing = [
            (share, share.stream, share.stream.speculation)
            for share in self._shares
            if share.stream is not None and share.stream.speculation is not None
        ]
        guessing.sort(key=lambda one: one[2].stats.proposed)
        drafted = []
        for share, stream, speculation in guessing:
            if not isinstance(speculation, Proposed):
                drafted.append((share, stream, speculation))
                continue
            room = min(self._batch.room, self._most_guesses(share, stream))
            if room > 0:
                used, fit = self._batch.used, self._core.facts.row_counts.fit
                text = share.transcript.tokens
                self._guess(share, speculation.propose(text, room=room, used=used, fit=fit))
        if drafted:
            self._draft(drafted)

    def _draft(self, drafted: Sequence[tuple[_Share, Stream, Speculation]]) -> None:
        """Adds guesses of the draft model for all these sessions at once; each gets an equal share.

        So the draft runs the fewest forwards: as many as the longest guess has tokens.
        """
        drafter = self._core.drafter
        assert drafter is not None
        asks: list[tuple[_Share, Ask]] = []
        held = paid = 0  # rows kept for guesses; guesses that need no further draft forward
        for number, (share, stream, speculation) in enumerate(drafted):
            room = -(-(self._batch.room - held) // (len(drafted) - number))
            count = speculation.choose(
                room=min(room, self._most_guesses(share, stream)),
                used=self._batch.used + held,
                fit=self._core.facts.row_counts.fit,
                paid=paid,
            )
            if count:
                paid = max(paid, count) if drafter.shares_forwards else 0
                transcript = share.transcript
                eos = stream.generation.eos
                ask = Ask(transcript, transcript.tokens, count, stream.sampling, eos)
                asks.append((share, ask))
                held += count
        if asks:
            guesses = drafter.propose([ask for _, ask in asks])
            for (share, _), guess in zip(asks, guesses):
                self._guess(share, guess)

    def _most_guesses(self, share: _Share, stream: Stream) -> int:
        """The most guesses after a pending token, if there were room; 0 or less: none."""
        size = self._core.facts.layout.chunk_tokens
        next_chunk = (share.position // size + 1) * size
        return min(stream.remaining - 1, next_chunk - share.position - 2)

    def _guess(self, share: _Share, guess: list[int]) -> None:
        """Adds rows for guesses after a share's pending token."""
        if not guess:
            return
        assert share.stream is not None
        if share.stream.reads_tokens:
            share.text = share.transcript.tokens
        share.guess = guess
        share.guess_rows = self._batch.commit(
            share.transcript.sequence, share.position + 1, np.array(guess, dtype=np.int32)
        )
        self._committed[share.transcript] += len(guess)
        self._batch.accept = self._accept

    def run(self) -> None:
        """Runs the forward. After any exception every session is unchanged."""
        batch, core = self._batch, self._core
        for share in self._shares:
            batch.wanted += (share.row, *share.guess_rows)
        if not batch.exact and batch.used not in core.facts.row_counts.ladder:
            for transcript in self._committed:
                transcript.mark_provisional()
        for feed, _ in self._fed:
            feed.start()
        try:
            logits = run(core, batch)
        finally:
            batch.accept = None  # breaks a cycle: sessions are freed without the garbage collector
        each, at = logits.unbind(), 0
        for share in self._shares:
            share.transcript.keep_logits(each[at])
            at += 1 + len(share.guess)
            if share.stream is not None and share.stream.speculation is not None:
                share.stream.speculation.observe(len(share.guess), share.accepted)
                share.transcript.count_speculation(len(share.guess), share.accepted)
        for feed, count in self._fed:
            feed.served += count
            feed.account.served += count
            feed.transcript.count_computed(feed.done - count, count)

    def _accept(self, logits: torch.Tensor) -> Mapping[pager.Sequence, int]:
        """How many rows of each sequence to keep: of guesses, those that sampling confirms.

        Hands them to the session before the commit, so that after an interrupt they are known as
        accepted guesses and never count as text.
        """
        kept = {transcript.sequence: count for transcript, count in self._committed.items()}
        at = 0
        for share in self._shares:
            rows = logits[at : at + 1 + len(share.guess)]
            at += len(rows)
            if share.guess:
                assert share.stream is not None
                share.accepted = _confirmed(share, rows, share.stream)
                kept[share.transcript.sequence] = 1 + share.accepted
        return kept


def _confirmed(share: _Share, logits: torch.Tensor, stream: Stream) -> int:
    """How many guesses, from the first on, equal the token that sampling would choose."""
    accepted = 0
    first = share.position + 1
    sampling, processors = stream.sampling, stream.processors
    text = None
    if share.text is not None:
        text = np.append(share.text, np.array(share.guess, dtype=np.int32))
    try:
        while accepted < len(share.guess):
            position = first + accepted
            if text is None:
                token = sampling.choose(logits[accepted], position)
            else:
                token = choose_after(text[:position], logits[accepted], sampling, processors)
            if token != share.guess[accepted]:
                break
            accepted += 1
    except (NonFiniteError, InvalidArgumentError):  # raised again when this token is sampled
        pass
    if accepted:
        share.transcript.accept(
            Accepted(
                start=first,
                tokens=tuple(share.guess[:accepted]),
                logits=logits[1 : 1 + accepted].clone(),
                sampling=sampling,
                processors=processors,
            )
        )
    return accepted
