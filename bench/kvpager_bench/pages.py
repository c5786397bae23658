"""Results inside pages that people write: what stands between two markers is replaced.

docs/benchmarks.md has all results (benchmarks_page.py), docs/segments.md what repair is worth and
how soon stitched text answers, docs/kv_formats.md what K/V in fewer bits cost in quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpager_bench.pictures.gallery import picture_of
from kvpager_bench.places import write_text
from kvpager_bench.report import (
    NOT_APPLICABLE,
    Cell,
    Column,
    MissingNumberError,
    Report,
    markdown_table,
    significant,
    tokens_name,
)

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SHOWN_SHARES = (5.0, 15.0, 50.0)  # percent, of the policies that take a share


def replace_between(path: Path, between: str) -> None:
    """Puts `between` where the page has its markers.

    Raises MissingNumberError when the markers are not there, once each and in order.
    """
    text = path.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise MissingNumberError(f"{path.name} lacks the markers {BEGIN} and {END}, once each")
    write_text(path, f"{text[: begin + len(BEGIN)]}\n{between}\n{text[end:]}")


def segments_text(reports: Mapping[str, Report]) -> str | None:
    """What docs/segments.md says of the question `segments`; None if it was not measured."""
    quality, times = reports.get("segments"), reports.get("segments_first_token")
    if quality is None or times is None:
        return None
    picture = picture_of("segments")
    context = quality.rows[0]["context"]
    rows = [row for row in quality.rows if row["context"] == context]
    prompts = f"{tokens_name(int(context))} tokens, {rows[0]['prompts']} prompts"
    return "\n\n".join(
        [
            f"{_machine(quality)} {prompts}; ± is the standard error.",
            _quality_table(quality, rows),
            f"![{picture.alt(quality)}](results/{picture.name}.png)",
            *_fell_short(quality),
            f"{_machine(times)} Medians of {times.rows[0]['runs']} texts, each with documents and "
            "a question of its own.",
            _time_table(times),
            *_fell_short(times),
        ]
    )


def kv_formats_text(reports: Mapping[str, Report]) -> str | None:
    """What docs/kv_formats.md says of K/V in fewer bits; None if that was not measured."""
    texts, needles = reports.get("quality_formats"), reports.get("quality_needles")
    if texts is None:
        return None
    picture = picture_of("quality_formats")
    settings = texts.settings
    counts = ", ".join(
        f"{count} of {tokens_name(int(length))}" for length, count in settings["windows"].items()
    )
    parts = [
        f"{_machine(texts)} {settings['model']}; windows: {counts} tokens, of which the last "
        f"{settings['scored']} are scored. KL in nats, from the same system's K/V in the model's "
        "dtype; ± is the standard error over windows.",
        _formats_table(texts),
        f"![{picture.alt(texts)}](results/{picture.name}.png)",
        *_selected(texts),
        *_fell_short(texts),
    ]
    if needles is not None:
        first = needles.rows[0]
        parts += [
            f"{_machine(needles)} Needles found of {first['asked']}, in documents of "
            f"{tokens_name(int(needles.number(first, 'context')))} tokens.",
            _needles_table(needles),
            *_fell_short(needles),
        ]
    return "\n\n".join(parts)


def _formats_table(report: Report) -> str:
    """Every system's formats where all of the context is read: a row each."""
    told: dict[tuple[str, str], dict[int, Mapping[str, Cell]]] = {}
    for row in report.rows:
        if row["read"] == 100:
            name = (str(row["by"]), str(row["format"]))
            told.setdefault(name, {})[int(report.number(row, "context"))] = row
    contexts = sorted({context for rows in told.values() for context in rows})
    columns = (
        *(Column(name, text=True) for name in ("kept by", "K/V in")),
        Column("bytes a token"),
        *(Column(f"KL at {tokens_name(context)}") for context in contexts),
        *(Column(name) for name in ("p99 of KL", "same top token", "perplexity")),
    )

    def cells(name: tuple[str, str], rows: Mapping[int, Mapping[str, Cell]]) -> list[str]:
        last = rows[max(rows)]
        size = last["token_bytes"]
        return [
            *name,
            "" if size == NOT_APPLICABLE else f"{report.number(last, 'token_bytes'):.0f}",
            *(_with_error(report, rows[c], "kl") if c in rows else "" for c in contexts),
            significant(report.number(last, "kl_p99"), 2),
            f"{report.number(last, 'same_top'):.2f}%",
            significant(report.number(last, "perplexity"), 5),
        ]

    lines = [cells(name, rows) for name, rows in told.items()]
    note = "p99, top token and perplexity are of the longest context of a row."
    return f"{markdown_table(columns, lines)}\n\n{note}"


def _selected(report: Report) -> list[str]:
    """The formats where a part of the longest context is read; nothing if that was not measured."""
    parts = [row for row in report.rows if row["read"] != 100]
    if not parts:
        return []
    context = max(report.number(row, "context") for row in parts)
    parts = [row for row in parts if row["context"] == context]
    shares = sorted({report.number(row, "read") for row in parts}, reverse=True)
    told = {(str(row["format"]), report.number(row, "read")): row for row in parts}
    columns = [Column("K/V in", text=True)]
    for share in shares:
        columns += [
            Column(f"KL, {share:g}% read"),
            Column(f"from all read, {share:g}%"),
            Column(f"perplexity, {share:g}%"),
        ]
    lines = []
    for name in dict.fromkeys(name for name, _ in told):
        line = [name]
        for share in shares:
            row = told[name, share]
            line += [
                _with_error(report, row, "kl"),
                significant(report.number(row, "kl_of_all"), 2),
                significant(report.number(row, "perplexity"), 5),
            ]
        lines.append(line)
    return [
        f"The same with a part of {tokens_name(int(context))} tokens read, selected by score: KL "
        "from K/V in the model's dtype under the same selection, and from those with all read.",
        markdown_table(tuple(columns), lines),
    ]


def _needles_table(report: Report) -> str:
    told = {
        (str(row["format"]), (str(row["keys"]), report.number(row, "read"))): row
        for row in report.rows
    }
    kinds = dict.fromkeys(kind for _, kind in told)
    columns = (
        Column("K/V in", text=True),
        *(Column(f"{keys} keys, {read:g}% read") for keys, read in kinds),
    )
    names = dict.fromkeys(name for name, _ in told)
    return markdown_table(
        columns,
        [[name, *(str(told[name, kind]["found"]) for kind in kinds)] for name in names],
    )


def _machine(report: Report) -> str:
    machine = report.environment
    return f"{machine['cpu']}, {machine['threads']} threads, {str(machine['date'])[:10]}."


def _quality_table(report: Report, rows: Sequence[Mapping[str, Cell]]) -> str:
    columns = (
        Column("policy", text=True),
        *(Column(name) for name in ("recomputed", "rows of a full prefill", "exact match")),
        *(Column(name) for name in ("of the gap", "KL [nats]", "mean error", "largest error")),
    )
    shown = [row for row in rows if row["share"] in (NOT_APPLICABLE, *SHOWN_SHARES)]
    return markdown_table(
        columns,
        [
            [
                _policy(row),
                f"{report.number(row, 'recomputed'):.1f}%",
                f"{report.number(row, 'cost'):.1f}%",
                f"{report.number(row, 'exact_match'):.1f} ± "
                f"{report.number(row, 'exact_match_se'):.1f}%",
                ""
                if row["recovered"] == NOT_APPLICABLE
                else f"{report.number(row, 'recovered'):.0f}%",
                _with_error(report, row, "kl"),
                _with_error(report, row, "mean_error"),
                significant(report.number(row, "max_error"), 2),
            ]
            for row in shown
        ],
    )


def _policy(row: Mapping[str, Cell]) -> str:
    share = row["share"]
    return f"{row['policy']}, {share:g}%" if isinstance(share, float) else str(row["policy"])


def _with_error(report: Report, row: Mapping[str, Cell], name: str) -> str:
    value, error = (report.number(row, column) for column in (name, f"{name}_se"))
    return f"{significant(value, 2)} ± {significant(error, 1)}"


def _time_table(report: Report) -> str:
    columns = (
        *(Column(name, text=True) for name in ("model", "text", "way")),
        *(Column(name) for name in ("first token", "fastest to slowest", "of that, the choice")),
        *(Column(name) for name in ("rows", "beside full prefill")),
    )

    def spelled(row: Mapping[str, Cell], name: str) -> str:
        return significant(report.number(row, name), 3)

    return markdown_table(
        columns,
        [
            [
                str(row["shape"]),
                tokens_name(int(report.number(row, "context"))),
                str(row["way"]),
                f"{spelled(row, 'first_token_ms')} ms",
                f"{spelled(row, 'fastest_ms')} to {spelled(row, 'slowest_ms')} ms",
                f"{spelled(row, 'probe_ms')} ms" if report.number(row, "probe_rows") else "",
                f"{report.number(row, 'rows') + report.number(row, 'probe_rows'):.0f}",
                f"{report.number(row, 'faster'):.2f}x",
            ]
            for row in report.rows
        ],
    )


def _fell_short(report: Report) -> list[str]:
    lines = [f"- {v.claim}: {v.evidence}" for v in report.verdicts if not v.holds]
    lines += [
        f"- {c.figure}: {c.ratio:.2f}x {c.peer}, {c.aim:g}x aimed at"
        for c in report.comparisons
        if c.aim is not None and not c.holds
    ]
    return ["Short of what was claimed or aimed at:\n\n" + "\n".join(lines)] if lines else []
