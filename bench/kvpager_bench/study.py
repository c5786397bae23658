"""The form of a question: its options by size, its tables, and what measures.

    STUDY = Study(measure, (Table("decode", "A token's cost", COLUMNS),), (Option("steps", 24),))

    if __name__ == "__main__":
        STUDY.main()

`measure` gets an `Asked`: the options' values for the size that was asked for, the reports to fill,
and `work` for what has to run in a process of its own. Everything else is here and in `harness`:
the command line, threads, machine and commit, progress, printing and writing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpager_bench import harness
from kvpager_bench.places import RESULTS_VARIABLE
from kvpager_bench.report import Cell, Column, MissingNumberError, Report, printed

_SAME: Any = object()
_TOLD_CELLS = 6  # of a row, while a question runs


def ints(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Option:
    """An option of one question, with its value by size.

    name: on the command line. quick, full: where not given, as standard. among: the values it may
    have. kind: what reads it; by default what its standard value is.
    """

    name: str
    standard: Any
    quick: Any = _SAME
    full: Any = _SAME
    help: str = ""
    among: Collection[Any] = ()
    kind: Callable[[str], Any] | None = None

    def value(self, size: str) -> Any:
        """The value without the option on the command line."""
        found = {"quick": self.quick, "full": self.full}.get(size, _SAME)
        return self.standard if found is _SAME else found

    def read(self, text: str) -> Any:
        """The value of a text. Raises ArgumentTypeError or ValueError where it is none."""
        example = self.standard
        if self.kind is not None:
            return self.kind(text)
        if not isinstance(example, (list, tuple)):
            parts = [text]
        elif example and isinstance(example[0], int):
            return ints(text)
        else:
            parts = [part.strip() for part in text.split(",") if part.strip()]
        if unknown := [part for part in parts if self.among and part not in self.among]:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is unknown; expected some of {', '.join(self.among)}"
            )
        return parts if isinstance(example, (list, tuple)) else type(example)(text)


@dataclass(frozen=True)
class Table:
    """A report of a question. title: what its rows say; settings may stand in it in braces."""

    name: str
    title: str
    columns: tuple[Column, ...]


class Asked:
    """A question as it was asked: values of its options, and the reports that it fills.

    settings: go into every report; at first the options and the study's constants.
    """

    def __init__(self, study: Study, options: argparse.Namespace) -> None:
        self.study = study
        self.options: Any = options
        self.quick: bool = options.quick
        self.full: bool = options.full
        self.threads: int = options.threads
        self.record = harness.start(options.threads)
        values = {name.replace("-", "_") for name in (each.name for each in study.options)}
        self.settings: dict[str, Any] = {
            name: value
            for name, value in vars(options).items()
            if name in values and value is not None and not isinstance(value, Path)
        } | dict(study.constants)
        self.reports: dict[str, Report] = {}

    def report(self, name: str | None = None) -> Report:
        """The report of this table, the first one by default; rows are told as they come."""
        table = next(t for t in self.study.tables if name in (None, t.name))
        if table.name not in self.reports:
            self.reports[table.name] = Report(
                harness.report_name(table.name, quick=self.quick, full=self.full),
                table.title.format(**self.settings),
                table.columns,
                self.settings,
                self.record,
                keep=_tell,
            )
        return self.reports[table.name]

    def work(self, what: str, **task: Any) -> dict[str, Any]:
        """The answer of one of the study's workers, in a process of its own."""
        task = {"what": what, "threads": self.threads, **task}
        return harness.run_worker(self.study.module, task)

    def finish(self) -> None:
        """Prints and writes what has rows. Raises MissingNumberError if nothing has any."""
        measured = [report for report in self.reports.values() if report.rows]
        if not measured:
            raise MissingNumberError("nothing was measured")
        for report in measured:
            report.finish()


@dataclass(frozen=True)
class Study:
    """How a question is answered.

    workers: what `Asked.work` runs, by name: a task in, JSON out.
    """

    measure: Callable[[Asked], None]
    tables: tuple[Table, ...]
    options: tuple[Option, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The name under which another process finds it."""
        spec = sys.modules[self.measure.__module__].__spec__
        assert spec is not None
        return spec.name

    def main(self) -> None:
        """The command line of the process that a question runs in."""
        if sys.argv[1:2] == ["--worker"]:
            task = json.loads(sys.argv[2])
            harness.prepare(task["threads"])
            print(json.dumps(self.workers[task["what"]](task)))
            return
        self.ask(sys.argv[1:])

    def ask(self, words: Sequence[str]) -> Asked:
        """Answers the question with these options; returns it with its reports, written."""
        asked = Asked(self, self._parse(words))
        self.measure(asked)
        asked.finish()
        return asked

    def _parse(self, words: Sequence[str]) -> argparse.Namespace:
        parser = harness.cli(sys.modules[self.measure.__module__].__doc__)
        for option in self.options:
            parser.add_argument(f"--{option.name}", type=option.read, help=option.help or None)
        options = parser.parse_args(words)
        size = "quick" if options.quick else "full" if options.full else "standard"
        for option in self.options:
            name = option.name.replace("-", "_")
            if getattr(options, name) is None:
                setattr(options, name, option.value(size))
        if options.results is not None:
            os.environ[RESULTS_VARIABLE] = str(options.results.resolve())
        return options


def _tell(report: Report, row: Mapping[str, Cell]) -> None:
    """Prints the beginning of a row: the last line is what people see while a question runs."""
    told = [f"{c.name} {printed(row[c.name], c)}" for c in report.columns[:_TOLD_CELLS]]
    print(f"{report.name}: {', '.join(told)}", flush=True)
