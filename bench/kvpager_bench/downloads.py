"""Tables for a spreadsheet: the rows of every report, all comparisons, all claims."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager_bench.places import write_text
from kvpager_bench.report import Report, kept

COMPARISONS, CLAIMS = "comparisons", "claims"  # files beside those named by their report


def write_downloads(reports: Mapping[str, Report], folder: Path, suffix: str) -> list[str]:
    """Returns the names of the files."""
    tables = {COMPARISONS: comparisons(reports), CLAIMS: claims(reports)}
    for name, report in reports.items():
        headings = [column.heading for column in report.columns]
        rows = [[row[column.name] for column in report.columns] for row in report.rows]
        tables[name] = _csv(headings, rows)
    for name, text in tables.items():
        write_text(folder / f"{name}{suffix}.csv", text)
    return [f"{name}{suffix}.csv" for name in tables]


def comparisons(reports: Mapping[str, Report]) -> str:
    """Every figure of ours beside a peer's, with the machine and the commit of the run."""
    headings = ("report", "figure", "kvpager", "unit", "peer", "beside it", "ratio", "aim", "met")
    rows = [
        [
            name,
            c.figure,
            c.ours,
            c.unit,
            c.peer,
            c.theirs,
            c.ratio,
            "" if c.aim is None else c.aim,
            "" if c.aim is None else "yes" if c.holds else "no",
            *_run(report),
        ]
        for name, report in reports.items()
        for c in report.comparisons
    ]
    return _csv((*headings, "date", "commit", "machine"), rows)


def claims(reports: Mapping[str, Report]) -> str:
    """Every claim that was judged, with its evidence."""
    rows = [
        [name, v.claim, "yes" if v.holds else "no", v.evidence, *_run(report)]
        for name, report in reports.items()
        for v in report.verdicts
    ]
    return _csv(("report", "claim", "holds", "evidence", "date", "commit", "machine"), rows)


def machine_name(report: Report) -> str:
    told = report.environment
    return f"{told['cpu']}, {told['cores']} cores"


def commit_name(report: Report) -> str:
    """Twelve digits, and whether there were changes on top."""
    told = report.environment
    return str(told["commit"])[:12] + (", changed" if told["dirty"] else "")


def _run(report: Report) -> tuple[str, str, str]:
    return str(report.environment["date"])[:10], commit_name(report), machine_name(report)


def _csv(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([kept(cell) for cell in row] for row in rows)
    return out.getvalue()
