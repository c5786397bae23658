"""What docs/benchmarks.md says between its markers: all of it from the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpager._support.words import counted
from kvpager_bench.downloads import CLAIMS, COMPARISONS, commit_name, machine_name
from kvpager_bench.limits import limit_of
from kvpager_bench.pictures.gallery import PICTURES, Picture
from kvpager_bench.question import origin_of
from kvpager_bench.report import (
    Column,
    Comparison,
    Report,
    comparison_cells,
    markdown_table,
    printed,
)
from kvpager_bench.suite import shortfalls


@dataclass(frozen=True)
class Links:
    """Where the page finds its files: before and after each of their names."""

    before: str = "results/"
    suffix: str = ""

    def to(self, name: str, ending: str) -> str:
        return f"{self.before}{name}{self.suffix}.{ending}"


def benchmarks_text(reports: Mapping[str, Report], links: Links) -> str:
    """The page from its first table on."""
    parts = [_promises(reports, links)]
    parts += [
        _part(picture, reports[picture.report], links)
        for picture in PICTURES
        if picture.report in reports
    ]
    if "verify_all" in reports:
        parts.append(_verified(reports["verify_all"], links))
    if "alone" in reports:
        parts.append(_alone(reports["alone"], links))
    if "exact_cost" in reports:
        parts.append(_exact_cost(reports["exact_cost"], links))
    parts.append(_listed("What fell short", _short(reports, links)))
    skipped: dict[str, str] = {}
    for report in reports.values():
        for entry in report.skipped:
            skipped.setdefault(entry.peer, entry.reason)
    parts.append(_listed("Peers left out", [f"{peer}: {why}" for peer, why in skipped.items()]))
    parts.append(_downloads(reports, links))
    return "\n\n".join(part for part in parts if part)


def _promises(reports: Mapping[str, Report], links: Links) -> str:
    """Of every question the last promise per peer, which is the one at the largest size."""
    promised = [
        (name, c)
        for name, report in reports.items()
        for c in report.comparisons
        if c.aim is not None
    ]
    told = sum(len(report.comparisons) for report in reports.values())
    files = (
        f"[All {told} comparisons]({links.to(COMPARISONS, 'csv')}) and [all claims]"
        f"({links.to(CLAIMS, 'csv')}) are files to download."
    )
    if not promised:
        return files
    columns = tuple(
        Column(name, text=name in ("figure", "peer"))
        for name in ("figure", "kvpager", "peer", "beside it", "ratio", "aim")
    )
    shown = {(name, comparison.peer): comparison for name, comparison in promised}
    rows = [_promise(comparison) for comparison in shown.values()]
    met = sum(comparison.holds for _, comparison in promised)
    score = f"{met} of {len(promised)} aims are met. {files}"
    return f"{markdown_table(columns, rows)}\n\n{score}"


def _promise(comparison: Comparison) -> list[str]:
    *cells, _ = comparison_cells(comparison)
    cells[-1] += "" if comparison.holds else ", **missed**"
    return cells


def _part(picture: Picture, report: Report, links: Links) -> str:
    return "\n\n".join(
        [
            f"## {picture.heading}",
            f"![{picture.alt(report)}]({links.to(picture.name, 'png')})",
            picture.told_beside(report),
            origin(report, links),
        ]
    )


def origin(report: Report, links: Links) -> str:
    """Where the figures are from: the command, the machine, the commit, the rows."""
    told = report.environment
    name = _plain(report, links)
    where = f"{machine_name(report)}, {counted(told['threads'], 'thread')}, torch {told['torch']}"
    when = f"{str(told['date'])[:10]}, commit {commit_name(report)}"
    source = origin_of(name, str(told["kvpager"]))
    return f"{source}; {where}, {when}. [Its rows]({links.to(name, 'csv')})."


def _verified(report: Report, links: Links) -> str:
    told = [
        f"- {verdict.claim}: {'holds' if verdict.holds else '**does not hold**'} "
        f"({verdict.evidence})"
        for verdict in report.verdicts
    ]
    return "\n\n".join(["## Every way to the same bits", "\n".join(told), origin(report, links)])


def _alone(report: Report, links: Links) -> str:
    rows = [[printed(row[c.name], c) for c in report.columns] for row in report.rows]
    return "\n\n".join(
        [
            "## One conversation with a small real model",
            "SmolLM2-135M-Instruct: a token decoded, in the first turn of 16 tokens and in later "
            "ones; the prompt, 64 tokens shorter than the context; from the start of a process "
            "until it takes a prompt; its memory, libraries included; the first token behind a "
            "restored prompt, from the look-up and from the start of a fresh process.",
            markdown_table(report.columns, rows),
            origin(report, links),
        ]
    )


def _exact_cost(report: Report, links: Links) -> str:
    return "\n\n".join(
        [
            "## What exactness costs",
            "One session: time to decode a token / to prefill 256 tokens, as multiples of what "
            "transformers takes beside it (one-token steps over a DynamicCache; one-shot prefill), "
            "by mode and rows M of a forward. Where a few rows are proven to give the bits of M, "
            "decode runs in forwards of a few; `all, M only` is without such proofs.",
            exact_cost_table(report),
            origin(report, links),
        ]
    )


def exact_cost_table(report: Report) -> str:
    """Markdown: decode and prefill time as multiples of transformers', by subject, mode and M."""
    lines = []
    for subject in dict.fromkeys(str(row["subject"]) for row in report.rows):
        mine = [row for row in report.rows if row["subject"] == subject]
        counts = list(dict.fromkeys(int(report.number(row, "rows")) for row in mine))
        lines += [
            "",
            f"| {subject}: decode / prefill time, as multiples of transformers' | "
            + " | ".join(f"M = {count}" for count in counts)
            + " |",
            "|---" * (len(counts) + 1) + "|",
        ]
        for mode in dict.fromkeys(str(row["mode"]) for row in mine):
            cells = {
                int(report.number(row, "rows")): " / ".join(
                    f"{report.number(row, f'{what}_over_transformers'):.2f}"
                    for what in ("decode", "prefill")
                )
                for row in mine
                if row["mode"] == mode
            }
            lines.append(f"| {mode} | " + " | ".join(cells.get(c, "-") for c in counts) + " |")
    return "\n".join(lines[1:])


def _downloads(reports: Mapping[str, Report], links: Links) -> str:
    """Every report: its rows, when, where and from what it was measured, and how to do it again."""
    columns = tuple(
        Column(name, text=name != "rows")
        for name in ("report", "says", "rows", "date", "commit", "machine", "command")
    )
    rows = [
        [
            f"[{name}]({links.to(name, 'csv')})",
            report.question.replace("|", "\\|"),
            str(len(report.rows)),
            str(report.environment["date"])[:10],
            commit_name(report),
            machine_name(report),
            origin_of(name, str(report.environment["kvpager"])),
        ]
        for name, report in reports.items()
    ]
    return f"## Everything that was measured\n\n{markdown_table(columns, rows)}"


def _short(reports: Mapping[str, Report], links: Links) -> list[str]:
    """A line for every limit, with the figures that it keeps from their aims below."""
    limited: dict[tuple[str, str], list[str]] = {}
    for name, report in reports.items():
        for line in shortfalls(report):
            why = limit_of(_plain(report, links), line)
            limited.setdefault((name, why), []).append(line)
    return [
        "\n".join([f"{name}: {why or 'no limit was found'}", *(f"  - {line}" for line in lines)])
        for (name, why), lines in limited.items()
    ]


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {line}" for line in lines)]) if lines else ""


def _plain(report: Report, links: Links) -> str:
    return report.name.removesuffix(links.suffix) if links.suffix else report.name
