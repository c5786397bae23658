"""A run of the GPU benchmark: what sections share, and what becomes of figures and errors."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpager_bench.gpu.machine import Machine
from kvpager_bench.gpu.sizes import Sizes
from kvpager_bench.gpu.subjects import WrongResultError, build_model
from kvpager_bench.harness import Column, MissingNumberError, Report


@dataclass
class Run:
    """Reports by section, and why a section has none or not all.

    keep: writes what was measured so far.
    """

    machine: Machine
    sizes: Sizes
    environment: Mapping[str, Any]
    reports: dict[str, Report] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None
    _deadline: float = float("inf")
    _model: Any = None

    def report(self, name: str, question: str, *columns: Column) -> Report:
        """A new, empty table, which is part of the result as it grows."""
        report = Report(name, question, columns, vars(self.sizes), self.environment)
        report.keep = lambda report, row: self.keep()  # a killed process loses no row
        self.reports[name] = report
        return report

    def carry_out(self, name: str, section: Callable[[Run], None], budget: float) -> None:
        """Runs a section. What it raises is recorded, and what it measured before is kept.

        A wrong result, which makes every later figure worthless, and an interrupt go on.
        """
        start = time.monotonic()
        self._deadline = start + budget
        try:
            section(self)
            self._require_rows(name)
        except BaseException as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, WrongResultError) or not isinstance(error, Exception):
                raise
            traceback.print_exc()
        finally:
            self.seconds[name] = time.monotonic() - start
            self.keep()
        self.machine.free()

    def _require_rows(self, name: str) -> None:
        if not self.reports[name].rows:
            raise MissingNumberError("nothing was measured")

    def out_of_time(self, what: str) -> bool:
        """Whether the section's budget is spent; if so `what` is recorded as not measured."""
        late = time.monotonic() > self._deadline
        if late:
            self.skipped.append(what)
        return late

    def ceiling(self, what: str) -> float:
        """Of the ceilings section; MissingNumberError where it was not measured."""
        return self.number("ceilings", "value", what=what)

    def number(self, section: str, column: str, **match: object) -> float:
        """The finite number in the one row that matches; MissingNumberError without such a one."""
        rows = self.rows(section, **match)
        if len(rows) != 1:
            raise MissingNumberError(f"{section}: {len(rows)} rows with {match}, expected one")
        value = self.reports[section].number(rows[0], column)
        if not math.isfinite(value):
            raise MissingNumberError(f"{section}: {column} is {value} with {match}")
        return value

    def rows(self, section: str, **match: object) -> list[dict[str, Any]]:
        report = self.reports.get(section)
        if report is None:
            raise MissingNumberError(f"{section} was not measured")
        return [r for r in report.rows if all(r[name] == value for name, value in match.items())]

    def model(self) -> Any:
        """The whole model, built when first asked for."""
        if self._model is None:
            self._model = build_model(self.machine, self.sizes)
        return self._model

    def to_json(self) -> dict[str, Any]:
        sections = {}
        for name in {**self.reports, **self.seconds, **self.errors}:
            spent = round(self.seconds.get(name, 0.0), 2)
            entry: dict[str, Any] = {"seconds": spent, "error": self.errors.get(name)}
            report = self.reports.get(name)
            if report is not None and report.rows:
                whole = report.to_json()
                entry |= {key: whole[key] for key in ("question", "columns", "rows")}
            sections[name] = entry
        return {
            "environment": dict(self.environment),
            "sizes": vars(self.sizes),
            "sections": sections,
            "not_measured": self.skipped,
        }
