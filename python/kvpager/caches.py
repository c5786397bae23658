"""Caches of one text, cut together: what each can give up alone, and what the others then lose.

A model's caches cannot all be cut at any position: a window has let go of what lies behind it, a
recurrent state knows only where it is and where it was kept, and a draft model's cache ends
somewhere else. So a cache says what it can do, and a refusal changes nothing; the group decides,
and loses no more than it must.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from kvpager.errors import InvalidArgumentError, InvariantError, PagerError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ok:
    """The cache holds what it held before the position, and nothing from it on."""


@dataclass(frozen=True)
class Refused:
    """The cache is as it was: what a row at the position needs is not there any more.

    Attributes:
        reason: why, for people.
    """

    reason: str


@dataclass(frozen=True)
class NeedsCheckpoint:
    """The cache is as it was: the nearest place before that it can go back to is `position`."""

    position: int


TrimAnswer: TypeAlias = Ok | Refused | NeedsCheckpoint


@runtime_checkable
class Cache(Protocol):
    """What one model holds of a text: something for each of its first `length` tokens."""

    @property
    def length(self) -> int:
        """How far into the text it is."""
        ...

    def trim(self, position: int) -> TrimAnswer:
        """Forgets everything from `position` on, or says why not and changes nothing.

        A position at or after `length` takes nothing away: Ok. One that raises has changed nothing
        either.
        """
        ...

    def rewind(self, position: int) -> None:
        """Goes back to the checkpoint that a trim has just named."""
        ...

    def reset(self) -> None:
        """Forgets everything. Does not fail."""
        ...


@dataclass(frozen=True)
class TrimReport:
    """What a trim came to.

    Attributes:
        position: where the text was cut.
        primary: what the primary cache answered.
        companions: what each companion answered; Ok for one that had not come so far, None for one
            that was not asked, because the primary refused.
        kept: tokens that the primary cache holds now; those from here to `position` are to be
            computed again.
        lost: tokens before `position` that a cache held and has to compute again, of all caches.
    """

    position: int
    primary: TrimAnswer
    companions: tuple[TrimAnswer | None, ...]
    kept: int
    lost: int


@dataclass
class TrimCounters:
    """What trims have cost, over all groups that share the counters.

    Attributes:
        trim_primary_refused: trims that the primary cache refused, so that all began anew.
        trim_companion_refused: trims that a companion refused, which then began anew, alone.
        tokens_reprefilled: tokens that a trim kept and a cache has to compute again all the same.
    """

    trim_primary_refused: int = 0
    trim_companion_refused: int = 0
    tokens_reprefilled: int = 0

    def note(self, report: TrimReport) -> None:
        """Adds one trim."""
        self.trim_primary_refused += isinstance(report.primary, Refused)
        self.trim_companion_refused += sum(
            isinstance(answer, Refused) for answer in report.companions
        )
        self.tokens_reprefilled += report.lost


class CacheGroup:
    """A primary cache and its companions, which may lag behind it, run ahead, or be empty.

    What the primary holds is what the text costs to compute, so nothing that a companion cannot do
    touches it. The other way round, a companion without its primary is of no use: where the primary
    has to begin anew, all do.

        primary    companion    what happens
        ok         ok           both are cut
        ok         refused      the companion begins anew; the primary does not notice
        refused    ok           all begin anew
        refused    refused      all begin anew

    A cache that needs a checkpoint goes back to it; what follows is computed again. The text itself
    belongs to the caller and survives everything.

    A companion that fails, rather than refuse, is in no state that anybody knows: it begins anew as
    well. A PagerError is its own affair and counts as a refusal; anything else is raised, but not
    before every other cache is cut, so that none goes on beyond the text.
    """

    def __init__(
        self,
        primary: Cache,
        companions: Iterable[Cache] = (),
        counters: TrimCounters | None = None,
    ) -> None:
        self.primary = primary
        self.companions = list(companions)
        self.counters = TrimCounters() if counters is None else counters

    def trim(self, position: int) -> TrimReport:
        """Cuts all caches to the first `position` tokens of the text, or further where they must.

        position: 0 or more; one at or after a cache's length takes nothing away from it.

        Raises:
            InvalidArgumentError: the position is negative; nothing was done.
            Exception: the primary's own, and nothing was done; or a companion's that is no
                PagerError, and all was done, that companion having begun anew.
        """
        if position < 0:
            raise InvalidArgumentError(f"position is {position}; expected 0 or more")
        caches = (self.primary, *self.companions)
        held = [cache.length for cache in caches]
        answer = _cut(self.primary, position)
        answers: list[TrimAnswer | None] = []
        failures: list[BaseException] = []
        for companion in self.companions:
            if isinstance(answer, Refused):
                companion.reset()
                answers.append(None)
                continue
            try:
                answers.append(_cut(companion, position))
            except BaseException as failure:  # raised when all are cut
                companion.reset()
                answers.append(Refused(f"{type(failure).__name__}: {failure}"))
                if isinstance(failure, PagerError):
                    _log.warning("a companion cache begins anew: %s", failure)
                else:
                    failures.append(failure)
        lost = sum(
            max(0, min(before, position) - cache.length) for cache, before in zip(caches, held)
        )
        report = TrimReport(position, answer, tuple(answers), self.primary.length, lost)
        self.counters.note(report)
        if failures:
            raise failures[0]
        return report

    def reset(self) -> None:
        """Empties all of them."""
        for cache in (self.primary, *self.companions):
            cache.reset()


def _cut(cache: Cache, position: int) -> TrimAnswer:
    """Cuts one cache: where it refuses it is emptied, where it needs a checkpoint it is there."""
    if position >= cache.length:
        return Ok()
    answer = cache.trim(position)
    if isinstance(answer, Refused):
        cache.reset()
    elif isinstance(answer, NeedsCheckpoint):
        cache.rewind(answer.position)
    if cache.length > position:
        raise InvariantError(
            f"{type(cache).__name__} answered {answer}, but holds {cache.length} tokens; expected "
            f"{position} at most"
        )
    return answer
