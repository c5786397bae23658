"""Turns the records of the deep tests into the tables of docs/testing.md.

python -m deep.report [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[2]
RECORDS = TREE / "docs" / "results" / "deep"
PAGE = TREE / "docs" / "testing.md"

Record = dict[str, Any]
Row = dict[str, Any]


def table(head: list[str], rows: Iterable[list[object]]) -> list[str]:
    """Lines of a Markdown table; numbers stand at the right."""
    body = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *body)]


def counted(record: Record, columns: dict[str, Callable[[Row], object]]) -> list[str]:
    """One line per row of a record, and their sum."""
    rows = [[name, *(of(row) for of in columns.values())] for name, row in record["rows"].items()]
    total = ["**all**", *(sum(row[i] for row in rows) for i in range(1, len(columns) + 1))]
    return table([record["part"], *columns], [*rows, total])


def calls(record: Record) -> list[str]:
    columns: dict[str, Callable[[Row], object]] = {
        "calls": lambda row: row["calls"],
        "failures tried": lambda row: row["cases"],
        "refused": lambda row: row["refused"],
        "got over": lambda row: row["cases"] - row["refused"],
        "wrong": lambda row: len(row["wrong"]),
    }
    names: dict[str, int] = {}
    for row in record["rows"].values():
        for call, count in row["by_call"].items():
            names[call] = names.get(call, 0) + count
    said = ", ".join(f"{name} {names[name]:,}" for name in sorted(names, key=lambda n: -names[n]))
    errors = ", ".join(record["errors"])
    return [*counted(record, columns), "", f"Errors: {errors}. Calls that failed: {said}."]


def power(record: Record) -> list[str]:
    columns: dict[str, Callable[[Row], object]] = {
        "changes recorded": lambda row: row["events"],
        "states looked at": lambda row: row["trees"],
        "repeated": lambda row: row["repeated"],
        "wrong": lambda row: len(row["wrong"]),
    }
    said = (
        f"Seed {record['seed']}. Per change at most {record['whole']} states in which each file "
        f"and folder has all of its changes or none, and {record['torn']} with any part of them."
    )
    return [*counted(record, columns), "", said]


def pairs(record: Record) -> list[str]:
    columns: dict[str, Callable[[Row], object]] = {
        "pairs": lambda row: row["pairs"],
        "calls": lambda row: row["calls"],
        "refused": lambda row: row["refused"],
        "wrong": lambda row: len(row["wrong"]),
    }
    return counted(record, columns)


def soak(record: Record) -> list[str]:
    lines = []
    for row in record["rows"].values():
        done = ", ".join(f"{name} {count:,}" for name, count in sorted(row["done"].items()))
        lines += [
            f"{row['seconds']:,} s, {sum(row['done'].values()):,} steps ({done}).",
            f"Resident memory {row['rss_first'] >> 20} MiB after the first fifth and",
            f"{row['rss_last'] >> 20} MiB at the end, slope {row['rss_slope'] / 1024:+.1f} KiB per",
            f"1,000 steps (limit {row['rss_limit'] / 1024:.0f}); descriptors",
            f"{row['descriptors_first']} and {row['descriptors_last']}.",
            f"Wrong: {len(row['wrong'])}.",
        ]
    return lines


def interrupts(record: Record) -> list[str]:
    columns: dict[str, Callable[[Row], object]] = {
        "instants": lambda row: row["instants"],
        "interrupted": lambda row: row["interrupted"],
        "wrong": lambda row: len(row["wrong"]),
    }
    return counted(record, columns)


def identity(record: Record) -> list[str]:
    columns: dict[str, Callable[[Row], object]] = {
        "changes": lambda row: row["changes"],
        "without effect": lambda row: row["without_effect"],
        "refused": lambda row: row["refused"],
        "wrong": lambda row: len(row["wrong"]),
    }
    return counted(record, columns)


TABLES: dict[str, Callable[[Record], list[str]]] = {
    "calls": calls,
    "power": power,
    "pairs": pairs,
    "soak": soak,
    "interrupts": interrupts,
    "identity": identity,
}


def page(text: str) -> str:
    """The page with all tables made anew; each is between two comments that name its record."""
    for name, make in TABLES.items():
        path = RECORDS / f"{name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        lines = [f"Run at {record['commit']}, {record['date']}.", "", *make(record)]
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(lambda _: "\n".join([begin, *lines, end]), text)  # noqa: B023
        assert count == 1, f"{PAGE} has {count} places for {name}"
    return text


def main() -> int:
    old = PAGE.read_text()
    new = page(old)
    if "--check" in sys.argv:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
