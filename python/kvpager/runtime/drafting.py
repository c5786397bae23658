"""Guesses by a draft model, for all sessions that want some in the same forward."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    ModelChangedError,
)
from kvpager.runtime.feed import Feed
from kvpager.runtime.group import TrimCounters
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.stream import Stream
from kvpager.runtime.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.runtime.draft import DraftCompanion
    from kvpager.runtime.engine import Engine

_log = logging.getLogger(__name__)

# Most forwards of the draft, beside those that guess, between two of the target: what a companion
# may take to catch up before the text goes on without its guesses. With 64 rows a text of 32,768
# tokens is caught up within the 64 of one chunk.
_CATCHING_UP = 8


class Ask(NamedTuple):
    """Guesses that a session wants.

    Attributes:
        companion: the session's.
        text: all of it, [n] int32, the pending token included.
        most: guesses wanted, at least 1.
        sampling: what will choose the tokens, and so the guesses: with the same draws they agree
            more often.
        eos: a guess of one of these is the last one.
    """

    companion: DraftCompanion
    text: TokenIds
    most: int
    sampling: Sampling
    eos: frozenset[int]


class Drafting:
    """One engine's draft: another engine, and the companions that sessions have in it.

    Thread-safe: sessions of different threads take turns.

    Attributes:
        engine: the draft model's.
        guess_cost: of one guess beside a forward of the target.
        shares_forwards: whether guesses of several sessions take one forward together.
        lock: held by whoever changes a companion.
        closed: companions that gave their room up for good.
    """

    def __init__(self, engine: Engine, trims: TrimCounters, guess_cost: float) -> None:
        """`trims`: of the target's engine, where refusals are counted."""
        self.engine = engine
        self.guess_cost = guess_cost
        self.shares_forwards = engine.recurrence is None
        self.lock = threading.RLock()
        self.closed = 0
        self._trims = trims
        self._companions: weakref.WeakSet[DraftCompanion] = weakref.WeakSet()
        self._clock = count(1)

    def register(self, companion: DraftCompanion) -> None:
        """Remembers one, so that it can give its room to others."""
        with self.lock:
            self._companions.add(companion)

    def note_refusal(self, position: int) -> None:
        """Counts a companion that could not be cut at `position` and began anew."""
        self._trims.trim_companion_refused += 1
        self._trims.tokens_reprefilled += position

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Guesses for each, at most as many as it asked for; none where its companion lags.

        The draft runs at most a forward per guess and a fixed number of further ones, in each of
        which companions that lag share the rows that nobody guesses in.
        """
        guesses: list[list[int]] = []
        with self.lock:
            for first in range(0, len(asks), self.engine.rows):
                group = asks[first : first + self.engine.rows]
                for ask in group:
                    ask.companion.used = next(self._clock)
                guesses += self._together(group, group)
        return guesses

    def _together(self, asks: Sequence[Ask], group: Sequence[Ask]) -> list[list[int]]:
        """Guesses for these of a group, or for each half where something is wrong with one."""
        try:
            return self._guess(asks)
        except ModelChangedError:
            raise
        except Exception as error:  # the text goes on without guesses
            if self.engine.closed:
                return [[] for _ in asks]
            if isinstance(error, CapacityError) and self._make_room(group):
                return self._together(asks, group)
            if len(asks) > 1:
                half = len(asks) // 2
                parts = (asks[:half], asks[half:])
                return [guess for part in parts for guess in self._together(part, group)]
            _give_up(asks[0], error)
            return [[]]

    def _guess(self, asks: Sequence[Ask]) -> list[list[int]]:
        from kvpager.runtime.packing import advance  # which imports this module

        seats = [_Seat(ask) for ask in asks if self._fits(ask)]
        longest = max((seat.ask.most for seat in seats), default=0)
        catching_up = 0  # forwards in which nobody guessed
        for _ in range(_CATCHING_UP + longest):
            for seat in seats:
                seat.take()
            guessing = [seat.stream for seat in seats if seat.guesses]
            lagging = [seat.feed for seat in seats if seat.lags]
            if not guessing:
                if not lagging or catching_up == _CATCHING_UP:
                    break
                catching_up += 1
            advance(self.engine, guessing, lagging)
        by_companion = {}
        for seat in seats:
            seat.take()
            by_companion[seat.ask.companion] = seat.guess
        return [by_companion.get(ask.companion, []) for ask in asks]

    def _fits(self, ask: Ask) -> bool:
        """Whether the draft has positions for the text and its guesses, and has not given it up."""
        most = self.engine.positions.most
        within = most is None or len(ask.text) + ask.most - 1 <= most
        return within and not ask.companion.refuses(ask.text)

    def _make_room(self, asks: Sequence[Ask]) -> bool:
        """Empties the one that guessed least recently and is none of these, if there is one.

        Its session loses guesses until it has caught up.
        """
        asking = {ask.companion for ask in asks}
        idle = [one for one in self._companions if one not in asking and not one.empty]
        if not idle:
            return False
        min(idle, key=lambda one: one.used).reset()
        return True


def draft_stats(drafting: Drafting | None) -> dict[str, float]:
    """The draft's part of `Engine.stats`; zeros without one."""
    runner = None if drafting is None else drafting.engine.runner
    return {
        "draft_forwards": 0 if runner is None else runner.forwards,
        "draft_tokens_fed": 0 if runner is None else runner.rows_used,
        "seconds_draft": 0.0 if runner is None else runner.seconds,
    }


class _Seat:
    """One session's part of a proposal: its text is fed, then continued token by token."""

    def __init__(self, ask: Ask) -> None:
        ask.companion.follow(ask.text)
        session = ask.companion.session
        self.ask = ask
        self.feed = Feed(session, ask.text)
        self.stream = Stream(
            session=session,
            sampling=ask.sampling,
            remaining=ask.most,
            eos=ask.eos,
            stop=(),
            speculation=None,
            logprobs=False,
        )
        self._fed = self.feed.left <= 0

    @property
    def guess(self) -> list[int]:
        """What was guessed so far."""
        return self.stream.produced

    @property
    def lags(self) -> bool:
        """Whether tokens of the text are still to be fed."""
        return not self._fed

    @property
    def guesses(self) -> bool:
        """Whether it wants a forward for another guess."""
        return self._fed and self.stream.live

    def take(self) -> None:
        """Notes how far the last forward has brought it, and chooses the guess that is due."""
        session = self.ask.companion.session
        if not self._fed:
            self.ask.companion.note_text(session.committed)
            self._fed = self.feed.left <= 0
        if self.guesses and session.ready:
            self.stream.sample()


def _give_up(ask: Ask, error: Exception) -> None:
    """Leaves a text without guesses, or without what was restored of them where that is damaged."""
    if isinstance(error, CorruptSnapshotError):
        _log.warning("the draft model computes a text again: %s", error)
        ask.companion.reset()
    else:
        _log.warning("no guesses for a text of %d tokens: %s", len(ask.text), error)
        ask.companion.give_up(ask.text)
