"""The output of `kvpager bench` while questions run and at the end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvpager._support.words import counted
from kvpager.cli.output import note
from kvpager.cli.terminal import Look, shows_progress

if TYPE_CHECKING:
    from rich.status import Status

    from kvpager_bench.question import Question
    from kvpager_bench.suite import Outcome, Plan, Summary, Watcher

_SAID_WIDTH = 48  # of the last line that a question printed


@contextmanager
def display(args: argparse.Namespace, plan: Plan) -> Iterator[Watcher]:
    """Lines on stderr as questions begin and end; on a terminal also one that moves."""
    if plan.size == "standard" and len(plan.questions) > 1:
        minutes = sum(question.minutes for question in plan.questions)
        note(args, f"{len(plan.questions)} questions, about {minutes:g} minutes")
    if not shows_progress(args):
        yield _Lines(args, plan)
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False, markup=False).status("") as status:
        yield _Lines(args, plan, status)


class _Lines:
    """A `kvpager_bench.suite.Watcher`."""

    def __init__(self, args: argparse.Namespace, plan: Plan, status: Status | None = None) -> None:
        self._args, self._plan, self._status = args, plan, status
        self._at = ""
        self._spent = 0.0  # seconds, of the questions that are over

    def begins(self, number: int, question: Question) -> None:
        self._at = f"[{number + 1}/{len(self._plan.questions)}] {question.name}"
        self._say(f"{self._at}: {question.asks}{self._expected(question)}")

    def goes_on(self, question: Question, seconds: float, said: str) -> None:
        if self._status is None:
            return
        from rich.text import Text

        parts = [f"{self._at}  {clock(seconds)}{self._expected(question, ' of ')}"]
        if len(self._plan.questions) > 1:
            total = f"all: {clock(self._spent + seconds)}"
            if self._plan.size == "standard":
                total += f" of about {sum(q.minutes for q in self._plan.questions):g} min"
            parts.append(total)
        if said:
            cut = said if len(said) <= _SAID_WIDTH else said[: _SAID_WIDTH - 3] + "..."
            parts.append(cut)
        self._status.update(Text(" | ".join(parts)))

    def ends(self, outcome: Outcome) -> None:
        self._spent += outcome.seconds
        if outcome.failure:
            said = f"FAILED after {clock(outcome.seconds)}: {outcome.failure}; see {outcome.log}"
        else:
            rows = sum(len(report.rows) for report in outcome.reports)
            said = f"done in {clock(outcome.seconds)}, {counted(rows, 'row')}"
        self._say(f"{self._at}: {said}")

    def _expected(self, question: Question, before: str = ", ") -> str:
        if self._plan.size != "standard" or self._plan.extra:
            return ""
        return f"{before}about {question.minutes:g} min"

    def _say(self, line: str) -> None:
        if self._status is None:
            note(self._args, line)
        else:
            self._status.console.print(line, soft_wrap=True)


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_lines(shown: Look, summary: Summary) -> Iterator[str]:
    """The one table, what fell short, who was skipped, what failed, the time taken."""
    from kvpager_bench.report import COMPARISON_COLUMNS, comparison_cells

    if summary.comparisons:
        table = shown.table("Beside its peers")
        for column in COMPARISON_COLUMNS:
            table.add_column(column.heading, justify="left" if column.text else "right")
        for comparison in summary.comparisons:
            table.add_row(*(cell.replace("*", "") for cell in comparison_cells(comparison)))
        yield from shown.render(table)
    small = " (--quick has sizes too small to tell)" if summary.plan.size == "quick" else ""
    for title, lines in (
        ("Fell short" + small, summary.short()),
        ("Peers left out", [f"{peer}: {why}" for peer, why in summary.skipped.items()]),
        ("Failed", [f"{o.question.name}: {o.failure}; see {o.log}" for o in summary.failed]),
    ):
        if lines:
            yield f"\n{title}"
            yield from (f"  {line}" for line in lines)
    done = len(summary.outcomes) - len(summary.failed)
    said = f"{done} of {counted(len(summary.plan.questions), 'question')} in "
    said += clock(summary.seconds)
    if summary.interrupted:
        said += ", then interrupted"
    yield f"\n{said}; figures in {summary.plan.results}"
