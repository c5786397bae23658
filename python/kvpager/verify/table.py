"""A report as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvpager.verify.check import NOT_APPLICABLE, SAME, WITHIN, Outcome
from kvpager.verify.report import Report

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvpager._model.proof.shapes import ShapeReport

_COLOURS = {
    "same": "green",
    "within": "green",
    "differs": "bold red",
    "failed": "bold red",
    "not run": "yellow",
}
_LENGTHS = 24  # listed one by one
_PARTS_OF_A_NAME = 2  # self_attn.q_proj: the layer's number says nothing of a shape


def parts(report: Report, make: Callable[[str], Table]) -> Iterator[RenderableType]:
    """Tables and lines, top to bottom; `make` gives an empty table of a title."""
    for selection in dict.fromkeys(outcome.selection for outcome in report.outcomes):
        outcomes = [outcome for outcome in report.outcomes if outcome.selection == selection]
        yield f"rows attend to {selection}"
        yield _relations(outcomes, make(""))
    yield from _explanations(report)
    if report.shapes:
        yield _shapes(report.shapes, make("rows of each shape of layer"))
    for sentence in report.advice:
        yield f"advice: {sentence}"
    if report.advice:
        yield ""
    if report.lengths:
        yield f"lengths tried: {_lengths_text(report.lengths)} tokens"
    yield report.verdict()


def _relations(outcomes: list[Outcome], table: Table) -> Table:
    from rich.text import Text

    for name, right in (
        ("relation", False),
        ("cases", True),
        ("bits compared", True),
        ("differ", True),
        ("", False),
        ("seconds", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for outcome in outcomes:
        compared = outcome.comparison
        counted = compared.elements > 0
        table.add_row(
            outcome.relation,
            f"{outcome.cases:,}" if counted else "",
            f"{compared.bits:,}" if counted else "",
            f"{compared.differing_bits:,}" if counted else "",
            Text(outcome.status, style=_COLOURS.get(outcome.status, "")),
            f"{outcome.seconds:.1f}",
        )
    return table


def _explanations(report: Report) -> Iterator[str]:
    """Why what is not the same is not, and the figures beside the bits."""
    explained = False
    for outcome in report.outcomes:
        first = outcome.comparison.first
        if outcome.status not in (SAME, WITHIN, NOT_APPLICABLE):
            explained = True
            yield f"{outcome.relation} ({outcome.statement}): {outcome.status}"
            if first is not None:
                yield f"  first: {first}"
            if outcome.reason:
                yield f"  {outcome.reason}"
        elif outcome.status == NOT_APPLICABLE:
            explained = True
            yield f"{outcome.relation}: {outcome.reason}"
    if explained:
        yield ""
    notes = [
        f"{outcome.relation}: {'; '.join(outcome.notes)}"
        for outcome in report.outcomes
        if outcome.selection == report.outcomes[0].selection
        if outcome.notes
    ]
    yield from notes
    if notes:
        yield ""


def _shapes(shapes: list[ShapeReport], table: Table) -> Table:
    table.add_column("layer", no_wrap=True)
    table.add_column("in x out", justify="right", no_wrap=True)
    table.add_column("row index", no_wrap=True)
    table.add_column("neighbours", no_wrap=True)
    table.add_column("threads", no_wrap=True)
    table.add_column("equal row counts", no_wrap=True)
    table.add_column("modules")
    for shape in shapes:
        threads = shape.thread_dependent
        table.add_row(
            shape.kind,
            f"{shape.in_features} x {shape.out_features}",
            "MATTERS" if shape.row_dependent else "same",
            "MATTER" if shape.neighbour_dependent else "same",
            "not asked" if threads is None else "matter" if threads else "same",
            " | ".join(_ranges(shape.classes)),
            _names(shape.modules),
        )
    return table


def _lengths_text(lengths: list[int]) -> str:
    if len(lengths) <= _LENGTHS:
        return ", ".join(map(str, lengths))
    return f"{len(lengths)}, from {lengths[0]} to {lengths[-1]}"


def _ranges(classes: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    """Each class, a run of the counts that were tried as first-last."""
    tried = sorted(count for counts in classes for count in counts)
    for counts in classes:
        at = tried.index(counts[0])
        if len(counts) > 1 and list(counts) == tried[at : at + len(counts)]:
            yield f"{counts[0]}-{counts[-1]}"
        else:
            yield " ".join(map(str, counts))


def _names(modules: tuple[str, ...]) -> str:
    first = ".".join(modules[0].split(".")[-_PARTS_OF_A_NAME:])
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
