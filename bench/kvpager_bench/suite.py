"""Runs questions one after the other, each in a process of its own, and collects their reports.

If a question fails, hangs or writes nothing, the others still run. An interrupt ends the running
question with all its processes; reports of the others stay. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvpager_bench.places import module_environment
from kvpager_bench.question import PACKAGE, Question
from kvpager_bench.report import Comparison, MissingNumberError, Report, load_report

QUICK, STANDARD, FULL = "quick", "standard", "full"
SUFFIXES = {QUICK: "-quick", STANDARD: "", FULL: "-full"}
LOGS = "logs"  # below the folder of results
_TICK_S = 0.2
_PATIENCE_S = 5.0  # between asking a question to end and making it
_LEAST_LIMIT_S = 600.0
_LIMIT = 4  # times what a question is expected to take


@dataclass(frozen=True)
class Plan:
    """What is asked, and how. limit_s: of each question; None for none."""

    questions: tuple[Question, ...]
    results: Path
    size: str = STANDARD
    threads: int | None = None
    extra: tuple[str, ...] = ()
    package: str = PACKAGE

    def command(self, question: Question) -> list[str]:
        module = f"{self.package}.{question.name}"
        # Unbuffered: the last line of its log says why it failed, or what it is at.
        command = [sys.executable, "-u", "-m", module, "--results", str(self.results)]
        if self.size != STANDARD:
            command.append(f"--{self.size}")
        if self.threads is not None:
            command += ["--threads", str(self.threads)]
        return [*command, *self.extra]

    def limit_s(self, question: Question) -> float | None:
        """Seconds after which a question counts as hanging; None, unknown, for a full size."""
        if self.size == FULL or self.extra:
            return None
        return max(_LEAST_LIMIT_S, _LIMIT * 60 * question.minutes)

    def log(self, question: Question) -> Path:
        return self.results / LOGS / f"{question.name}{SUFFIXES[self.size]}.log"

    def report_paths(self, question: Question) -> list[Path]:
        return [self.results / f"{name}{SUFFIXES[self.size]}.json" for name in question.reports]


@dataclass(frozen=True)
class Outcome:
    """The result of one question. failure: empty, or why there is none."""

    question: Question
    seconds: float
    log: Path
    reports: tuple[Report, ...] = ()
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.question.name,
            "seconds": round(self.seconds, 1),
            "expected_minutes": self.question.minutes,
            "failure": self.failure or None,
            "log": str(self.log),
            "reports": [report.name for report in self.reports],
        }


class Watcher(Protocol):
    """Receives the progress of a run."""

    def begins(self, number: int, question: Question) -> None:
        """Called when a question starts. number: from 0."""

    def goes_on(self, question: Question, seconds: float, said: str) -> None:
        """Called several times a second. said: the last line that the question printed."""

    def ends(self, outcome: Outcome) -> None:
        """Called with a question's result."""


@dataclass
class Summary:
    """The result of a run of several questions."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure]

    @property
    def reports(self) -> list[Report]:
        return [report for outcome in self.outcomes for report in outcome.reports]

    @property
    def comparisons(self) -> list[Comparison]:
        return [comparison for report in self.reports for comparison in report.comparisons]

    @property
    def skipped(self) -> dict[str, str]:
        """Reasons by peer, each peer once."""
        said: dict[str, str] = {}
        for report in self.reports:
            for skipped in report.skipped:
                said.setdefault(skipped.peer, skipped.reason)
        return said

    def short(self) -> list[str]:
        """Missed aims and claims that do not hold, one line each."""
        return [line for report in self.reports for line in shortfalls(report)]

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "bench",
            "size": self.plan.size,
            "results": str(self.plan.results),
            "seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
            "questions": [outcome.to_json() for outcome in self.outcomes],
            "comparisons": [
                {"report": report.name, **comparison.to_json()}
                for report in self.reports
                for comparison in report.comparisons
            ],
            "short": self.short(),
            "skipped": [{"peer": peer, "reason": why} for peer, why in self.skipped.items()],
        }


def shortfalls(report: Report) -> list[str]:
    """The missed aims and failed claims of a report."""
    missed = [
        f"{c.figure}: {c.ratio:.3g}x {c.peer}, {c.aim:g}x aimed at"
        for c in report.comparisons
        if not c.holds
    ]
    return missed + [f"{v.claim}: {v.evidence}" for v in report.verdicts if not v.holds]


def ask_all(plan: Plan, watcher: Watcher) -> Summary:
    """Asks the questions in turn. An interrupt ends it early, and the summary says so."""
    summary = Summary(plan)
    start = time.monotonic()
    try:
        for number, question in enumerate(plan.questions):
            watcher.begins(number, question)
            outcome = ask(plan, question, watcher)
            summary.outcomes.append(outcome)
            watcher.ends(outcome)
    except KeyboardInterrupt:
        summary.interrupted = True
    summary.seconds = time.monotonic() - start
    return summary


def ask(plan: Plan, question: Question, watcher: Watcher) -> Outcome:
    """Runs one question; what it prints goes to its log. Its process is gone when this returns."""
    log = plan.log(question)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = {path: _stamp(path) for path in plan.report_paths(question)}
    start = time.monotonic()
    with log.open("wb") as file:
        # A session of its own: an interrupt at the terminal comes to us, and we end it whole.
        process = subprocess.Popen(
            plan.command(question),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=module_environment(),
        )
    try:
        failure = _wait(process, plan, question, watcher, start)
    finally:
        _end(process)
    reports = []
    for path, stamp in before.items():
        if _stamp(path) not in (None, stamp):
            try:
                reports.append(load_report(path))
            except (MissingNumberError, ValueError, KeyError, TypeError) as error:
                failure = failure or f"its report {path.name} cannot be read: {error}"
    if not failure and not reports:
        failure = "it wrote no report"
    return Outcome(question, time.monotonic() - start, log, tuple(reports), failure)


def _wait(
    process: subprocess.Popen[bytes],
    plan: Plan,
    question: Question,
    watcher: Watcher,
    start: float,
) -> str:
    """Waits until it has ended or hangs; returns why it failed, or nothing."""
    limit = plan.limit_s(question)
    log = plan.log(question)
    while True:
        try:
            code = process.wait(_TICK_S)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - start
            if limit is not None and seconds > limit:
                return f"it hung: ended after {limit / 60:g} minutes"
            watcher.goes_on(question, seconds, last_line(log))
            continue
        if code == 0:
            return ""
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = last_line(log)
        return f"{ended}: {said}" if said else ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a question and what it started, workers and peers; does nothing to one that is over."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first lets it remove what it wrote
        if process.poll() is None:
            _signal_group(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
    _signal_group(process.pid, signal.SIGKILL)  # and workers that outlived it
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        os.killpg(group, number)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty; what follows a carriage return, where one is."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4096))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Time and inode of a report, which change when it is written again."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
