"""The report of an audit: data, a verdict, JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpager.audit.compare import CHANGED, CORRUPT, EXACT, NOT_EXACT, UNKNOWN, Comparison, Result
from kvpager.audit.limits import Limit

_ORDER = (CORRUPT, UNKNOWN, NOT_EXACT, EXACT)  # the first that occurs is the result of all


@dataclass
class Way:
    """One way to ask for the texts, and its answers compared with the cold ones.

    Attributes:
        name: such as "warm".
        about: what is done, in a line.
        reuses: whether it may use what the server keeps; a cold run may not.
        comparisons: one for each prompt.
    """

    name: str
    about: str
    reuses: bool
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def result(self) -> Result:
        """The worst of its comparisons; unknown without any."""
        found = {comparison.result for comparison in self.comparisons}
        return next((result for result in _ORDER if result in found), UNKNOWN)

    @property
    def worst(self) -> Comparison | None:
        """The comparison to show: the farthest apart of those with the way's result."""
        shown = [each for each in self.comparisons if each.result == self.result]
        return max(shown, key=lambda each: each.largest, default=None)

    @property
    def cached_tokens(self) -> int | None:
        """Of all prompts; None where the server reports none."""
        counts = [each.cached_tokens for each in self.comparisons]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "about": self.about,
            "reuses": self.reuses,
            "result": self.result,
            "cached_tokens": self.cached_tokens,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
        }


@dataclass
class Report:
    """What an audit found, so far.

    Attributes:
        url: of the server's API.
        model: its name.
        cold: how texts are computed without the cache (`Asker.cold`).
        limit: between rounding and corruption; None before it is known.
        scored: whether there are log-probabilities.
        ways: in the order in which they ran.
        notes: what else there is to know, in sentences.
        prompts: the texts.
        seconds: duration.
        ended: why the audit ended early; empty if it did not.
    """

    url: str
    model: str = ""
    cold: str = ""
    scored: bool = True
    limit: Limit | None = None
    ways: list[Way] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ended: str = ""

    @property
    def verdict(self) -> Result:
        """Corrupt if anything is; unknown if anything was not compared or nothing was reused."""
        results = {way.result for way in self.ways if way.comparisons}
        if CORRUPT in results:
            return CORRUPT
        if self.ended or not self.reused or not self.tokens:
            return UNKNOWN
        return next(result for result in _ORDER if result in results)

    @property
    def reused(self) -> bool:
        """Whether a way used the cache, as far as the server says."""
        counts = [way.cached_tokens for way in self.ways if way.reuses and way.comparisons]
        return any(count is None or count > 0 for count in counts)

    @property
    def tokens(self) -> int:
        """Number of tokens that were compared with a cold run's."""
        return sum(each.tokens for way in self.ways for each in way.comparisons)

    def reason(self) -> str:
        """One line."""
        verdict = self.verdict
        if verdict == CORRUPT:
            way = next(way for way in self.ways if way.result == CORRUPT and way.comparisons)
            worst = way.worst
            assert worst is not None
            where = "" if worst.from_token is None else f", from token {worst.from_token} on"
            return f"{way.name}, prompt {worst.prompt}{where}: {worst.why}"
        if self.ended:
            return self.ended
        if not self.reused:
            return "the server reused nothing: it reports 0 cached tokens in every way"
        if verdict == UNKNOWN:
            whys = (e.why for w in self.ways for e in w.comparisons if e.result == UNKNOWN)
            return next(whys, "the answers are empty")
        if verdict == EXACT:
            what = "tokens and their log-probabilities" if self.scored else "tokens"
            return f"{self.tokens:,} {what} are the same in every way"
        made = [each for way in self.ways for each in way.comparisons]
        apart = max(each.largest for each in made if each.why != CHANGED)
        changed = any(each.why == CHANGED for each in made)
        return (
            f"{'the model has changed since the restart; ' if changed else ''}log-probabilities of "
            f"one text are {f'up to {apart:.2g}' if apart else '0'} nats apart"
            f"{', which rounding explains' if apart else ''}; {self.tokens:,} tokens compared"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "url": self.url,
            "model": self.model,
            "verdict": self.verdict,
            "reason": self.reason(),
            "ended": self.ended or None,
            "cold": self.cold,
            "limit": None if self.limit is None else self.limit.to_json(),
            "ways": [way.to_json() for way in self.ways],
            "notes": self.notes,
            "prompts": self.prompts,
            "seconds": self.seconds,
        }
