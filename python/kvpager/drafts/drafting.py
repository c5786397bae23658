"""Guesses by a draft model, for all texts that want some in the same forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from kvpager.caches import TrimCounters
from kvpager.drafts.companion import DraftCaches, DraftCompanion
from kvpager.errors import (
    CapacityError,
    CorruptSnapshotError,
    ModelChangedError,
)
from kvpager.execution.core import Ask, Drafter, EngineCore
from kvpager.sampling import Sampling
from kvpager.scheduling.feed import Feed
from kvpager.scheduling.packing import advance
from kvpager.scheduling.stream import Stream
from kvpager.tokens import TokenIds

_log = logging.getLogger(__name__)

# Most forwards of the draft, beside those that guess, between two of the target: what a companion
# may take to catch up before the text goes on without its guesses. With 64 rows a text of 32,768
# tokens is caught up within the 64 of one chunk.
_CATCHING_UP = 8


class _Wanted(NamedTuple):
    """An `Ask`, and the companion that answers it."""

    companion: DraftCompanion
    text: TokenIds
    most: int
    sampling: Sampling
    eos: frozenset[int]


class Drafting(DraftCaches):
    """One engine's draft model; guesses for all texts that want some in the same forward.

    Thread-safe: texts of different threads take turns.

    Attributes:
        guess_cost: of one guess beside a forward of the target.
        shares_forwards: whether guesses of several texts take one forward together.
    """

    def __init__(self, core: EngineCore, trims: TrimCounters, guess_cost: float) -> None:
        """`trims`: of the target's texts, where refusals are counted."""
        super().__init__(core, trims)
        self.guess_cost = guess_cost
        self.shares_forwards = core.recurrence is None
        self._clock = count(1)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Guesses for each, at most as many as it asked for; none where its companion lags.

        The draft runs at most a forward per guess and a fixed number of further ones, in each of
        which companions that lag share the rows that nobody guesses in.
        """
        guesses: list[list[int]] = []
        with self.lock:
            for first in range(0, len(asks), self.core.rows):
                group = []
                for ask in asks[first : first + self.core.rows]:
                    companion = self.of(ask.transcript)
                    companion.used = next(self._clock)
                    group.append(_Wanted(companion, *ask[1:]))
                guesses += self._together(group, group)
        return guesses

    def _together(self, asks: Sequence[_Wanted], group: Sequence[_Wanted]) -> list[list[int]]:
        """Guesses for these of a group, or for each half where something is wrong with one."""
        try:
            return self._guess(asks)
        except ModelChangedError:
            raise
        except Exception as error:  # the text goes on without guesses
            if self.core.closed:
                return [[] for _ in asks]
            if isinstance(error, CapacityError) and self._make_room(group):
                return self._together(asks, group)
            if len(asks) > 1:
                half = len(asks) // 2
                parts = (asks[:half], asks[half:])
                return [guess for part in parts for guess in self._together(part, group)]
            _give_up(asks[0], error)
            return [[]]

    def _guess(self, asks: Sequence[_Wanted]) -> list[list[int]]:
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
            advance(self.core, guessing, lagging)
        by_companion = {}
        for seat in seats:
            seat.take()
            by_companion[seat.ask.companion] = seat.guess
        return [by_companion.get(ask.companion, []) for ask in asks]

    def _fits(self, ask: _Wanted) -> bool:
        """Whether the draft has positions for the text and its guesses, and has not given it up."""
        most = self.core.positions.most
        within = most is None or len(ask.text) + ask.most - 1 <= most
        return within and not ask.companion.refuses(ask.text)

    def _make_room(self, asks: Sequence[_Wanted]) -> bool:
        """Empties the one that guessed least recently and is none of these, if there is one.

        Its session loses guesses until it has caught up.
        """
        asking = {ask.companion for ask in asks}
        idle = [one for one in self._companions if one not in asking and not one.empty]
        if not idle:
            return False
        min(idle, key=lambda one: one.used).reset()
        return True


def draft_stats(drafter: Drafter | None) -> dict[str, float]:
    """The draft's part of `Engine.stats`; zeros without one."""
    runner = None if drafter is None else drafter.core.runner
    return {
        "draft_forwards": 0 if runner is None else runner.forwards,
        "draft_tokens_fed": 0 if runner is None else runner.rows_used,
        "seconds_draft": 0.0 if runner is None else runner.seconds,
    }


class _Seat:
    """One session's part of a proposal: its text is fed, then continued token by token."""

    def __init__(self, ask: _Wanted) -> None:
        ask.companion.follow(ask.text)
        transcript = ask.companion.transcript
        self.ask = ask
        self.feed = Feed(transcript, ask.text)
        self.stream = Stream(
            transcript=transcript,
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
        transcript = self.ask.companion.transcript
        if not self._fed:
            self.ask.companion.note_text(transcript.committed)
            self._fed = self.feed.left <= 0
        if self.guesses and transcript.ready:
            self.stream.sample()


def _give_up(ask: _Wanted, error: Exception) -> None:
    """Leaves a text without guesses, or without what was restored of them where that is damaged."""
    if isinstance(error, CorruptSnapshotError):
        _log.warning("the draft model computes a text again: %s", error)
        ask.companion.reset()
    else:
        _log.warning("no guesses for a text of %d tokens: %s", len(ask.text), error)
        ask.companion.give_up(ask.text)
