"""The report of a benchmark: a table, verdicts on claims, comparisons with peers.

A report names its columns once; a row that lacks one, or holds a number that is not finite, is an
error and never a zero. The one table of all questions consists of the comparisons. Nothing here
imports torch, so that results can be read and shown quickly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kvpager_bench.places import results_dir, write_text

SCHEMA = 3
_KEPT_DIGITS = 9  # of a float in a file: printed again, a table is the same
NOT_APPLICABLE = "n/a"  # the one thing an optional column may hold instead of a number

Cell: TypeAlias = "str | int | float | bool"

ENVIRONMENT = (
    "cpu",
    "cores",
    "memory_bytes",
    "threads",
    "isa",
    "python",
    "torch",
    "transformers",
    "kvpager",
    "kernel_version",
    "commit",
    "dirty",
    "date",
    "load_average",
)


class MissingNumberError(Exception):
    """A report lacks a number it promised, or holds one that is not finite."""


@dataclass(frozen=True)
class Column:
    """One column of a report.

    unit: empty for plain numbers and for text. digits: significant ones when printed. optional:
    whether NOT_APPLICABLE may stand in for a number.
    """

    name: str
    unit: str = ""
    digits: int = 3
    text: bool = False
    optional: bool = False

    def to_json(self) -> dict[str, Any]:
        return without_defaults(self)

    @property
    def heading(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    def check(self, value: object, where: str) -> None:
        if self.text:
            if not isinstance(value, str) or not value:
                raise MissingNumberError(f"{where}: {self.name} is {value!r}; expected text")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            if not (self.optional and value == NOT_APPLICABLE):
                raise MissingNumberError(f"{where}: {self.name} is {value!r}; expected a number")
        elif not math.isfinite(value):
            raise MissingNumberError(f"{where}: {self.name} is {value}; expected a finite number")


@dataclass(frozen=True)
class Verdict:
    """A claim the numbers were gathered to judge, and whether they bear it out."""

    claim: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Comparison:
    """One figure of ours beside a peer's or a roofline's, of the same run.

    ours, theirs: in `unit`. aim: the least ratio that was promised; None where none was.
    """

    figure: str
    ours: float
    theirs: float
    peer: str
    unit: str
    aim: float | None
    lower_is_better: bool = False
    digits: int = 3

    def __post_init__(self) -> None:
        for name in ("figure", "peer"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise MissingNumberError(f"a comparison's {name} is {getattr(self, name)!r}")
        numbers = {"ours": self.ours, "theirs": self.theirs}
        if self.aim is not None:
            numbers["aim"] = self.aim
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise MissingNumberError(f"{self.figure}: {name} is {value!r}; expected a number")
            if not math.isfinite(value) or value <= 0:
                raise MissingNumberError(f"{self.figure}: {name} is {value}; expected it above 0")

    @property
    def ratio(self) -> float:
        """How many times better ours is than theirs."""
        return self.theirs / self.ours if self.lower_is_better else self.ours / self.theirs

    @property
    def holds(self) -> bool:
        return self.aim is None or self.ratio >= self.aim

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio, "holds": self.holds}


@dataclass(frozen=True)
class Skipped:
    """A peer that could not be had, and why: no failure, and no number."""

    peer: str
    reason: str

    def __post_init__(self) -> None:
        if not self.peer or not self.reason:
            raise MissingNumberError(f"peer {self.peer!r} is skipped for {self.reason!r}")


@dataclass
class Report:
    """The table of one question. `name` is also that of its file.

    keep: called with every row that is added.
    """

    name: str
    question: str
    columns: tuple[Column, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    keep: Callable[[Report, Mapping[str, Cell]], None] = field(
        default=lambda report, row: None, compare=False, repr=False
    )

    def add(self, **values: Cell) -> dict[str, Cell]:
        """Adds a row: exactly one value per column. Raises MissingNumberError otherwise."""
        where = f"{self.name}, row {len(self.rows)}"
        names = [column.name for column in self.columns]
        lacking = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if lacking or unknown:
            raise MissingNumberError(f"{where}: lacks {lacking}, has unknown {unknown}")
        for column in self.columns:
            column.check(values[column.name], where)
        row = {name: values[name] for name in names}
        self.rows.append(row)
        self.keep(self, row)
        return row

    def judge(self, claim: str, holds: bool, evidence: str) -> None:
        self.verdicts.append(Verdict(claim, bool(holds), evidence))

    def compare(
        self,
        figure: str,
        ours: float,
        theirs: float,
        peer: str,
        unit: str,
        aim: float | None = None,
        *,
        lower_is_better: bool = False,
        digits: int = 3,
    ) -> Comparison:
        """Puts a figure of ours beside a peer's: a row of the one table of all questions.

        figure: a phrase a reader understands alone, "decode attention at 32K, bfloat16". aim: the
        ratio, of how many times better ours is, that is promised; None for none. Raises
        MissingNumberError for a number that is not finite or not above 0, or a figure that is
        already beside this peer.
        """
        comparison = Comparison(
            figure, float(ours), float(theirs), peer, unit, aim, lower_is_better, digits
        )
        if any((c.figure, c.peer) == (figure, peer) for c in self.comparisons):
            raise MissingNumberError(f"{self.name}: {figure!r} is beside {peer!r} already")
        self.comparisons.append(comparison)
        return comparison

    def skip(self, peer: str, reason: str) -> None:
        """Says that a peer could not be had. A peer is named once, with its first reason."""
        if all(skipped.peer != peer for skipped in self.skipped):
            self.skipped.append(Skipped(peer, " ".join(reason.split())))

    def number(self, row: Mapping[str, Cell], name: str) -> float:
        """The number in a row; text, NOT_APPLICABLE and unknown names raise MissingNumberError."""
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise MissingNumberError(f"{self.name}: {name} is {value!r}; expected a number")
        return float(value)

    def to_json(self) -> dict[str, Any]:
        """JSON for a file: a row as the list of its cells, floats of nine digits."""
        if not self.rows:
            raise MissingNumberError(f"{self.name}: no rows were measured")
        compared = [
            {name: kept(value) for name, value in without_defaults(comparison).items()}
            for comparison in self.comparisons
        ]
        return {
            "schema": SCHEMA,
            "name": self.name,
            "question": self.question,
            "environment": dict(self.environment),
            "settings": dict(self.settings),
            "columns": [column.to_json() for column in self.columns],
            "rows": [[kept(row[column.name]) for column in self.columns] for row in self.rows],
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "comparisons": compared,
            "skipped": [vars(skipped) for skipped in self.skipped],
        }

    def write(self, folder: Path | None = None) -> Path:
        """Replaces name.json in `folder`, by default `places.results_dir()`.

        An interrupted run leaves the older file whole.
        """
        folder = folder or results_dir()
        text = json_lines(self.to_json())
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        write_text(path, text)
        return path

    def markdown(self) -> str:
        return markdown_table(
            self.columns, [[printed(row[c.name], c) for c in self.columns] for row in self.rows]
        )

    def print(self) -> None:
        print(f"\n{self.question}\n\n{self.markdown()}\n")
        for verdict in self.verdicts:
            print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.claim} ({verdict.evidence})")
        if self.comparisons:
            print(f"\n{comparison_table(self.comparisons)}\n")
        for skipped in self.skipped:
            print(f"skipped: {skipped.peer} ({skipped.reason})")

    def finish(self) -> None:
        """Prints the table and writes the file."""
        self.print()
        print(f"wrote {self.write()}", flush=True)


def load_report(path: Path) -> Report:
    """Reads a report back, checking all that adding to it checks.

    Raises MissingNumberError for another schema, an incomplete environment, row or comparison, or
    no rows.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise MissingNumberError(f"{path.name}: schema {data.get('schema')!r}, expected {SCHEMA}")
    lacking = [name for name in ENVIRONMENT if data["environment"].get(name) in (None, "")]
    if lacking:
        raise MissingNumberError(f"{path.name}: environment lacks {lacking}")
    if not data["rows"]:
        raise MissingNumberError(f"{path.name}: no rows")
    report = Report(
        name=data["name"],
        question=data["question"],
        columns=tuple(Column(**column) for column in data["columns"]),
        settings=data["settings"],
        environment=data["environment"],
    )
    names = [column.name for column in report.columns]
    for number, row in enumerate(data["rows"]):
        if len(row) != len(names):
            raise MissingNumberError(
                f"{path.name}, row {number}: {len(row)} cells for {len(names)} columns"
            )
        report.add(**dict(zip(names, row)))
    for verdict in data["verdicts"]:
        report.judge(**verdict)
    report.comparisons = [Comparison(**entry) for entry in data["comparisons"]]
    report.skipped = [Skipped(**entry) for entry in data["skipped"]]
    return report


def without_defaults(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that a file needs for it to be read back."""
    required = object()
    return {
        name: value
        for name, value in vars(record).items()
        if value != getattr(type(record), name, required)
    }


def kept(value: Any) -> Any:
    """A value as a file keeps it."""
    return float(f"{value:.{_KEPT_DIGITS}g}") if isinstance(value, float) else value


def json_lines(data: Mapping[str, Any]) -> str:
    """JSON with a line for each member, and for each element of a list."""

    def dump(value: Any) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    lines = []
    for name, value in data.items():
        text = dump(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {dump(element)}" for element in value) + "\n ]"
        lines.append(f" {dump(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


COMPARISON_COLUMNS = (
    Column("figure", text=True),
    Column("kvpager"),
    Column("peer", text=True),
    Column("beside it"),
    Column("ratio"),
    Column("aim"),
    Column("holds", text=True),
)


def comparison_cells(comparison: Comparison) -> list[str]:
    """A comparison as printed: one text per COMPARISON_COLUMNS."""
    unit = f" {comparison.unit}" if comparison.unit else ""
    holds = "yes" if comparison.holds else "**no**"
    return [
        comparison.figure,
        significant(comparison.ours, comparison.digits) + unit,
        comparison.peer,
        significant(comparison.theirs, comparison.digits) + unit,
        significant(comparison.ratio, 3) + "x",
        "" if comparison.aim is None else f">= {comparison.aim:g}x",
        "" if comparison.aim is None else holds,
    ]


def comparison_table(comparisons: list[Comparison]) -> str:
    return markdown_table(COMPARISON_COLUMNS, [comparison_cells(c) for c in comparisons])


def markdown_table(columns: tuple[Column, ...], rows: list[list[str]]) -> str:
    """Text columns stand left, numbers right."""
    cells = [[column.heading for column in columns], *rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if column.text else text.rjust(width)
            for text, width, column in zip(line, widths, columns)
        )
        + " |"
        for line in cells
    ]
    rules = ["-" * w if c.text else "-" * (w - 1) + ":" for w, c in zip(widths, columns)]
    lines.insert(1, "| " + " | ".join(rules) + " |")
    return "\n".join(lines)


def tokens_name(tokens: int) -> str:
    """1M, 32K, 100."""
    if tokens and tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def significant(value: float, digits: int) -> str:
    """`digits` significant digits, without an exponent unless the number is tiny."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def printed(value: Cell, column: Column) -> str:
    """A cell as tables show it."""
    return significant(value, column.digits) if isinstance(value, float) else str(value)
