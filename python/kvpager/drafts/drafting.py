"""Guesses of a draft model, for all texts that want some in the same forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count

from kvpager._runtime.execution.core import Ask, Drafter, EngineCore
from kvpager._runtime.scheduling.feed import Feed
from kvpager._runtime.scheduling.packing import advance
from kvpager._runtime.scheduling.stream import Generation, Stream
from kvpager._support.tokens import TokenIds
from kvpager.companions import TrimCounters
from kvpager.drafts.companion import DraftCaches, DraftCompanion
from kvpager.errors import CapacityError, CorruptSnapshotError, ModelChangedError

_log = logging.getLogger(__name__)

# Most forwards of the draft, not counting those that guess, between two of the target. A companion
# that is still behind after them makes no guesses this time. With 64 rows, a text of 32,768 tokens
# is caught up while the target generates one chunk of 64.
_CATCHING_UP = 8


class Drafting(DraftCaches):
    """One engine's draft model; guesses for all texts that want some in the same forward.

    Thread-safe: texts of different threads take turns.

    Attributes:
        guess_cost: cost of one guess relative to a forward of the target.
        shares_forwards: whether one forward computes guesses of several texts.
    """

    def __init__(self, core: EngineCore, trims: TrimCounters, guess_cost: float) -> None:
        """`trims`: the target's counters, which also count refusals here."""
        super().__init__(core, trims)
        self.guess_cost = guess_cost
        self.shares_forwards = core.facts.recurrence is None
        self._clock = count(1)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Returns guesses for each ask, at most `most`; none if its companion lags behind the text.

        The draft runs at most one forward per guess and a fixed number of further ones. Companions
        that lag share the rows of each that no guess takes.
        """
        guesses: list[list[int]] = []
        with self.lock:
            for first in range(0, len(asks), self.core.rows):
                group = asks[first : first + self.core.rows]
                for ask in group:
                    self.of(ask.transcript).used = next(self._clock)
                guesses += self._together(group, group)
        return guesses

    def _together(self, asks: Sequence[Ask], group: Sequence[Ask]) -> list[list[int]]:
        """Guesses for a group; after an error, tries each half alone."""
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
            _give_up(self.of(asks[0].transcript), asks[0].text, error)
            return [[]]

    def _guess(self, asks: Sequence[Ask]) -> list[list[int]]:
        seats = [_Seat(self.of(ask.transcript), ask) for ask in asks if self._fits(ask)]
        longest = max((seat.ask.most for seat in seats), default=0)
        catching_up = 0  # forwards without a guess
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
        by_text = {}
        for seat in seats:
            seat.take()
            by_text[seat.ask.transcript] = seat.guess
        return [by_text.get(ask.transcript, []) for ask in asks]

    def _fits(self, ask: Ask) -> bool:
        """Whether the draft has positions for the text and its guesses, and did not refuse it."""
        most = self.core.positions.most
        within = most is None or len(ask.text) + ask.most - 1 <= most
        return within and not self.of(ask.transcript).refuses(ask.text)

    def _make_room(self, asks: Sequence[Ask]) -> bool:
        """Empties the companion, in no ask, that guessed least recently; False if there is none.

        Its session gets no guesses until it has caught up.
        """
        asking = {self.of(ask.transcript) for ask in asks}
        idle = [one for one in self._companions if one not in asking and not one.empty]
        if not idle:
            return False
        min(idle, key=lambda one: one.used).reset()
        return True


def draft_stats(drafter: Drafter | None) -> dict[str, float]:
    """The draft's part of `Engine.stats`; zeros without a draft."""
    runner = None if drafter is None else drafter.core.runner
    return {
        "draft_forwards": 0 if runner is None else runner.forwards,
        "draft_tokens_fed": 0 if runner is None else runner.rows_used,
        "seconds_draft": 0.0 if runner is None else runner.seconds,
    }


class _Seat:
    """One session's part of a proposal: its text is fed, then continued token by token."""

    def __init__(self, companion: DraftCompanion, ask: Ask) -> None:
        companion.follow(ask.text)
        transcript = companion.transcript
        self.ask = ask
        self._companion = companion
        self.feed = Feed(transcript, ask.text)
        self.stream = Stream(transcript, ask.sampling, Generation(ask.most, ask.sampling, ask.eos))
        self._fed = self.feed.left <= 0

    @property
    def guess(self) -> list[int]:
        """The guesses so far."""
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
        """Takes the result of the last forward, and samples a guess if one is due."""
        transcript = self._companion.transcript
        if not self._fed:
            self._companion.note_text(transcript.committed)
            self._fed = self.feed.left <= 0
        if self.guesses and transcript.ready:
            self.stream.sample()


def _give_up(companion: DraftCompanion, text: TokenIds, error: Exception) -> None:
    """Refuses guesses to a text after an error; if a restored chunk is damaged, drops the cache."""
    if isinstance(error, CorruptSnapshotError):
        _log.warning("the draft model computes a text again: %s", error)
        companion.reset()
    else:
        _log.warning("no guesses for a text of %d tokens: %s", len(text), error)
        companion.give_up(text)
