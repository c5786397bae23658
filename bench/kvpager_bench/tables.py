"""Tables and figures from what the benchmarks wrote: `kvpager bench tables`.

    bench.md      the one table of all comparisons, what fell short, figures
    results.md    every question in full
    benchmarks.md the promised comparisons, between its two markers; in a checkout alone
    segments.md   the results of the question `segments`, between two such markers; likewise

Figures of a checkout's own folder of results go to docs/results. Others, and those of quick and
full runs, go beside what they were made from. A result that is missing is left out and named; one
that lacks a number is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpager_bench import headline, places
from kvpager_bench.pages import replace_between, segments_text
from kvpager_bench.places import write_text
from kvpager_bench.plots import DRAWINGS, PRINTED
from kvpager_bench.question import QUESTIONS
from kvpager_bench.report import (
    Column,
    Comparison,
    MissingNumberError,
    Report,
    comparison_cells,
    comparison_table,
    load_report,
    markdown_table,
)
from kvpager_bench.suite import SUITE_FILE, shortfalls

ORDER = (
    *(name for question in QUESTIONS.values() for name in question.reports),
    *("profile", "profile_moving", "verify_all"),  # of programs that are no questions
)


@dataclass(frozen=True)
class Written:
    """What was written, and the reports that were not there to be read."""

    files: tuple[Path, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "bench tables",
            "files": [str(path) for path in self.files],
            "missing": list(self.missing),
        }


def write_all(source: Path, suffix: str) -> Written:
    """Of the results in `source` with names that end in `suffix`.

    Raises MissingNumberError where there are none, or one lacks a number.
    """
    kept = source == places.RESULTS_DIR.resolve() and not suffix
    folder = places.DOCS_DIR if kept else source / f"tables{suffix}"
    written = render(source, folder, suffix)
    if kept:
        reports = load_all(source, suffix)
        pages = {
            places.CHECKOUT / "docs" / "benchmarks.md": promises(reports),
            places.CHECKOUT / "docs" / "segments.md": segments_text(reports),
        }
        told = {path: text for path, text in pages.items() if text is not None}
        for path, text in told.items():
            replace_between(path, text)
        written = replace(written, files=(*written.files, *told))
    return written


def load_all(source: Path, suffix: str) -> dict[str, Report]:
    """The reports that are there by name, in the order of ORDER."""
    paths = {name: source / f"{name}{suffix}.json" for name in ORDER}
    return {name: load_report(path) for name, path in paths.items() if path.is_file()}


def render(source: Path, folder: Path, suffix: str) -> Written:
    """Writes bench.md, results.md and the figures to `folder`."""
    reports = load_all(source, suffix)
    if not reports:
        raise MissingNumberError(f"no results in {source.name}/: run the benchmarks first")
    folder.mkdir(parents=True, exist_ok=True)
    sections, figures = [], []
    for name, report in reports.items():
        mine = DRAWINGS[name](report, folder, suffix) if name in DRAWINGS else []
        figures += mine
        sections.append(section(report, mine))
    heads = [head for draw in headline.DRAWINGS if (head := draw(reports, folder, suffix))]
    text = (
        "# Results\n\nEvery question in full, written by `kvpager bench tables` from "
        f"`bench/results/`. In one table: [bench{suffix}.md](bench{suffix}.md).\n\n"
    )
    write_text(folder / f"results{suffix}.md", text + "\n".join(sections))
    write_text(folder / f"bench{suffix}.md", overview(reports, heads, suite_seconds(source)))
    files = [f"bench{suffix}.md", f"results{suffix}.md", *heads, *figures]
    missing = tuple(name for name in ORDER if name not in reports)
    return Written(tuple(folder / name for name in files), missing)


def suite_seconds(source: Path) -> float | None:
    """What the last whole suite took, if there was one."""
    path = source / SUITE_FILE
    return (
        float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) if path.is_file() else None
    )


def overview(reports: dict[str, Report], figures: Sequence[str], seconds: float | None) -> str:
    """The one table of all comparisons and what belongs to it, as Markdown."""
    comparisons = [c for report in reports.values() for c in report.comparisons]
    lines = [
        "# Beside its peers",
        "",
        "Written by `kvpager bench tables` from `bench/results/`; `make bench` measures. Both "
        "figures of a row come from one run on one machine, taken in turns. A ratio says how many "
        "times better ours is; an aim is the ratio that was promised. How each is measured: "
        "[bench/README.md](../../bench/README.md); every row: [results.md](results.md).",
        "",
    ]
    if seconds is not None:
        lines += [f"The suite took {seconds / 60:.0f} minutes.", ""]
    if comparisons:
        lines += [_score(comparisons), "", comparison_table(comparisons), ""]
    short = [f"{name}: {line}" for name, report in reports.items() for line in shortfalls(report)]
    lines += _listed("What fell short", short)
    skipped: dict[str, str] = {}
    for report in reports.values():
        for entry in report.skipped:
            skipped.setdefault(entry.peer, entry.reason)
    lines += _listed("Peers left out", [f"{peer}: {reason}" for peer, reason in skipped.items()])
    if figures:
        lines += ["## Figures", "", *(f"![{name}]({name})\n" for name in figures)]
    lines += ["## Runs", "", _runs(reports), ""]
    return "\n".join(lines)


def _score(comparisons: Sequence[Comparison]) -> str:
    promised = [c for c in comparisons if c.aim is not None]
    met = sum(c.holds for c in promised)
    return f"{met} of {len(promised)} aims are met."


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {line}" for line in lines), ""] if lines else []


def _runs(reports: dict[str, Report]) -> str:
    """When, where and from what each report was measured."""
    names = ("report", "date", "commit", "cpu", "isa", "threads", "torch", "transformers")
    rows = []
    for name, report in reports.items():
        machine = report.environment
        dirty = ", changed" if machine["dirty"] else ""
        rows.append(
            [
                name,
                str(machine["date"])[:10],
                str(machine["commit"])[:12] + dirty,
                f"{machine['cpu']}, {machine['cores']} cores",
                *(str(machine[key]) for key in names[4:]),
            ]
        )
    return markdown_table(tuple(Column(name, text=True) for name in names), rows)


def section(report: Report, figures: Sequence[str]) -> str:
    """One result as Markdown: question, machine, verdicts, comparisons, figures, table."""
    machine = report.environment
    dirty = " with local changes" if machine["dirty"] else ""
    lines = [
        f"## {report.question}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({machine['isa']}), {machine['threads']} "
        f"threads, torch {machine['torch']}, transformers {machine['transformers']}, kvpager "
        f"{machine['kvpager']} at {str(machine['commit'])[:12]}{dirty}, {machine['date']}.",
        "",
    ]
    for verdict in report.verdicts:
        held = "holds" if verdict.holds else "**does not hold**"
        lines.append(f"- {verdict.claim}: {held} ({verdict.evidence})")
    lines += [f"- left out: {entry.peer} ({entry.reason})" for entry in report.skipped]
    if report.comparisons:
        lines += ["", comparison_table(report.comparisons)]
    lines += ["", *(f"![{name}]({name})" for name in figures), ""]
    printed = PRINTED.get(report.name.removesuffix("-quick").removesuffix("-full"))
    if printed is not None and any(map(printed, report.rows)):
        rows = [row for row in report.rows if printed(row)]
        measured = report.settings.get("rows_measured", len(report.rows))
        lines += [f"{len(rows)} of {measured} rows:", ""]
        report = replace(report, rows=rows)
    lines += [report.markdown(), ""]
    return "\n".join(lines)


def promises(reports: dict[str, Report]) -> str | None:
    """What docs/benchmarks.md says: the promised comparisons; None where nothing was promised.

    Of every question the last promise per peer is shown, which is the one at the largest size.
    """
    promised = [c for report in reports.values() for c in report.comparisons if c.aim is not None]
    if not promised:
        return None
    columns = tuple(
        Column(name, text=name in ("figure", "peer"))
        for name in ("figure", "kvpager", "peer", "beside it", "ratio", "aim")
    )
    shown = {
        (report.name, comparison.peer): comparison
        for report in reports.values()
        for comparison in report.comparisons
        if comparison.aim is not None
    }
    rows = []
    for comparison in shown.values():
        *cells, _ = comparison_cells(comparison)
        cells[-1] += "" if comparison.holds else ", **missed**"
        rows.append(cells)
    link = (
        f"{_score(promised)} [All comparisons, figures and what fell short]"
        "(results/bench.md); written by `make bench`."
    )
    return f"{markdown_table(columns, rows)}\n\n{link}"
