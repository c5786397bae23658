"""A report as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvpager.audit.client import printable
from kvpager.audit.compare import CORRUPT, EXACT, NOT_EXACT, UNKNOWN
from kvpager.audit.report import Report, Way

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_COLOURS = {EXACT: "green", NOT_EXACT: "yellow", CORRUPT: "bold red", UNKNOWN: "yellow"}
_WORDS = {
    EXACT: "EXACT",
    NOT_EXACT: "NOT EXACT, NOT CORRUPT",
    CORRUPT: "CORRUPT",
    UNKNOWN: "UNKNOWN",
}
_SHOWN = 4  # corrupt comparisons of a way that are listed


def parts(report: Report, make: Callable[[str], Table]) -> Iterator[RenderableType]:
    """Tables and lines, top to bottom; `make` gives an empty table of a title."""
    ways = [way for way in report.ways if way.comparisons]
    if ways:
        yield f"{printable(report.model)} at {report.url}"
        yield _ways(ways, make(""))
    for way in ways:
        found = [each for each in way.comparisons if each.result == CORRUPT]
        for each in found[:_SHOWN]:
            where = "" if each.from_token is None else f", from token {each.from_token} on"
            yield f"{way.name}, prompt {each.prompt}{where}: {each.why}"
        if len(found) > _SHOWN:
            yield f"{way.name}: {len(found) - _SHOWN} more"
    if report.limit is not None:
        yield _limit(report)
    for sentence in report.notes:
        yield f"note: {sentence}"
    yield f"{_WORDS[report.verdict]}: {report.reason()}"


def _ways(ways: list[Way], table: Table) -> Table:
    from rich.text import Text

    for name, right in (
        ("way", False),
        ("prompts", True),
        ("cached", True),
        ("same", True),
        ("tokens", True),
        ("apart", True),
        ("other at", True),
        ("", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for way in ways:
        firsts = [each.first_token for each in way.comparisons if each.first_token is not None]
        cached = way.cached_tokens
        largest = max(each.largest for each in way.comparisons)
        table.add_row(
            way.name,
            f"{len(way.comparisons)}",
            "" if cached is None else f"{cached:,}",
            f"{sum(each.result == EXACT for each in way.comparisons)}",
            f"{sum(each.tokens for each in way.comparisons):,}",
            f"{largest:.2g}",
            f"{min(firsts)}" if firsts else "",
            Text(way.result, style=_COLOURS[way.result]),
        )
    return table


def _limit(report: Report) -> str:
    limit = report.limit
    assert limit is not None
    if limit.floor is None:
        return f"rounding explains {limit.value:.2g} nats: a constant, as none was measured"
    return (
        f"rounding explains {limit.value:.2g} nats: cold runs of one text are up to "
        f"{limit.floor:.2g} apart ({limit.positions:,} tokens)"
    )
