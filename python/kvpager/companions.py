"""Trims all caches of one text together, although each can only be cut at some positions.

Chunks behind a window are released, recurrent states exist only at checkpoints, and a draft
model's cache ends elsewhere than the text. So each cache answers whether it can be trimmed, and a
refusal changes nothing; the group then decides, and loses no more than necessary.
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
    """The cache was cut: it holds everything before the position and nothing after."""


@dataclass(frozen=True)
class Refused:
    """The cache is unchanged: data that a row at the position needs were released.

    Attributes:
        reason: why, for a log.
    """

    reason: str


@dataclass(frozen=True)
class NeedsCheckpoint:
    """The cache is unchanged: `position` is the nearest earlier one it can be cut at."""

    position: int


TrimAnswer: TypeAlias = Ok | Refused | NeedsCheckpoint


@runtime_checkable
class Cache(Protocol):
    """One model's cache of a text, with data for each of its first `length` tokens."""

    @property
    def length(self) -> int:
        """Number of tokens it holds."""
        ...

    def trim(self, position: int) -> TrimAnswer:
        """Drops everything from `position` on, or answers why not and changes nothing.

        Returns Ok for a position at or after `length`. After an exception it is unchanged too.
        """
        ...

    def rewind(self, position: int) -> None:
        """Cuts the cache at the checkpoint that `trim` has just named."""
        ...

    def reset(self) -> None:
        """Empties the cache. Never fails."""
        ...


@dataclass(frozen=True)
class TrimReport:
    """The result of a trim.

    Attributes:
        position: where the text was cut.
        primary: the primary cache's answer.
        companions: each companion's answer; Ok for one that ends before the position, None if the
            primary refused and the companion was not asked.
        kept: tokens that the primary cache holds now; those from here to `position` have to be
            computed again.
        lost: tokens before `position` that have to be computed again, summed over all caches.
    """

    position: int
    primary: TrimAnswer
    companions: tuple[TrimAnswer | None, ...]
    kept: int
    lost: int


@dataclass
class TrimCounters:
    """Counters of trims, over all groups that share them.

    Attributes:
        trim_primary_refused: trims that the primary cache refused, so that all caches were emptied.
        trim_companion_refused: trims that a companion refused, so that it alone was emptied.
        tokens_reprefilled: tokens of the remaining text that a cache has to compute again.
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

    The primary is expensive to compute, so a companion's refusal never affects it. A companion is
    of no use without its primary, so if the primary is emptied, all companions are too.

        primary    companion    what happens
        ok         ok           both are cut
        ok         refused      the companion is emptied; the primary is cut
        refused    ok           all are emptied
        refused    refused      all are emptied

    A cache that needs a checkpoint goes back to it, and the tokens after it are computed again. The
    caller owns the text itself, which is never lost.

    A companion that raises is in an unknown state and is emptied too. A PagerError counts as a
    refusal; any other exception is raised again after every other cache is cut, so that no cache
    reaches beyond the text.
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
        """Cuts all caches to the first `position` tokens of the text, or to fewer if necessary.

        position: 0 or more; a cache that ends before it is unchanged.

        Raises:
            InvalidArgumentError: the position is negative; nothing was done.
            Exception: from the primary, and nothing was changed; or from a companion (no
                PagerError), and everything was cut and that companion emptied.
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
    """Cuts one cache, if necessary back to a checkpoint; empties it if it refuses."""
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
