"""Figures of single questions, from what they wrote; a number that is missing is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

# The backend comes before anything that draws.
from kvpager_bench.labels import AGREE, INDEPENDENT, NO_REPAIR, PLOTTED_WAYS, PRINTED_POOL
from kvpager_bench.report import NOT_APPLICABLE, Report, tokens_name

COLOURS = {
    "model_ms": "#4878a8",
    "scan_ms": "#e49444",
    "attention_ms": "#5ba053",
    "rest_ms": "#a8a8a8",
}


def draw_needles(report: Report, folder: Path, suffix: str) -> list[str]:
    """Share of full attention's needles by policy; one panel per context, needles and chunks."""
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report.rows:
        if row["chunks"] != NOT_APPLICABLE:
            key = (row["keys"], row["context"], row["needles"], row["chunks"])
            panels.setdefault(key, []).append(row)
    written = []
    for keys in dict.fromkeys(key[0] for key in panels):
        mine = {key: rows for key, rows in panels.items() if key[0] == keys}
        columns = min(4, len(mine))
        lines = -(-len(mine) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(3.2 * columns, 2.6 * lines), squeeze=False, sharey=True
        )
        for axis in axes.flat[len(mine) :]:
            axis.remove()
        for axis, (key, rows) in zip(axes.flat, mine.items()):
            shares = [report.number(r, "found") / report.number(r, "asked") for r in rows]
            full = report.number(rows[0], "full_attention_found") / report.number(rows[0], "asked")
            axis.bar([str(row["policy"]) for row in rows], shares, color="#4878a8")
            axis.axhline(full, color="#d1605e", linewidth=1, label="full attention")
            axis.set_title(
                f"{tokens_name(int(key[1]))}, {key[2]} needles, {key[3]} chunks", fontsize=9
            )
            axis.tick_params(axis="x", rotation=60, labelsize=8)
            axis.set_ylim(0, 1.05)
        axes.flat[0].set_ylabel("needles found")
        axes.flat[0].legend(fontsize=7)
        written.append(save(figure, folder, f"needles-{keys}{suffix}"))
    return written


def draw_snapshot_save(report: Report, folder: Path, suffix: str) -> list[str]:
    """Rates of saving and of its peers against the context; one panel per layout."""
    lines = (
        ("memcpy", "memcpy_gbs"),
        ("write + fsync", "write_fsync_gbs"),
        ("write + fsync + rename + fsync", "atomic_write_gbs"),
        ("kvpager, save", "save_gbs"),
        ("safetensors + fsync", "safetensors_gbs"),
        ("torch.save + fsync", "torch_save_gbs"),
    )
    return [_panels(report, report.rows, lines, "GB/s", folder, f"snapshot-save{suffix}")]


def draw_snapshot_read(report: Report, folder: Path, suffix: str) -> list[str]:
    """Time until a snapshot can be used, beside reading the whole; one panel per layout."""
    lines = (
        ("safetensors, loaded", "safetensors_load_ms"),
        ("torch.load", "torch_load_ms"),
        ("the whole file, plainly read", "read_file_ms"),
        ("kvpager, until the first top-k forward", "first_forward_ms"),
        ("kvpager, opened and restored", "restore_ms"),
    )
    rows = [row for row in report.rows if row["file"] == "cached"]
    return [_panels(report, rows, lines, "time [ms]", folder, f"snapshot-restore{suffix}")]


def _panels(
    report: Report,
    rows: list[dict[str, Any]],
    lines: tuple[tuple[str, str], ...],
    label: str,
    folder: Path,
    name: str,
) -> str:
    """One panel per layout, columns against the context, both on logarithmic axes."""
    layouts = list(dict.fromkeys(str(row["layout"]) for row in rows))
    figure, axes = plt.subplots(1, len(layouts), figsize=(4.6 * len(layouts), 3.6), squeeze=False)
    for axis, layout in zip(axes.flat, layouts):
        mine = [row for row in rows if row["layout"] == layout]
        x = [report.number(row, "context") for row in mine]
        for line, column in lines:
            axis.plot(x, [report.number(row, column) for row in mine], "o-", label=line)
        axis.set_title(layout, fontsize=10)
        log_context(axis, x, label)
    return save(figure, folder, name)


def draw_decode(report: Report, folder: Path, suffix: str) -> list[str]:
    """Decode time per token against the context, stacked by part, with both dense ways beside."""
    shapes = list(dict.fromkeys(str(row["shape"]) for row in report.rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.6 * len(shapes), 3.6), squeeze=False)
    for axis, shape in zip(axes.flat, shapes):
        rows = [row for row in report.rows if row["shape"] == shape]
        x = [report.number(row, "context") for row in rows]
        parts = {name: [report.number(row, name) for row in rows] for name in COLOURS}
        labels = [name.removesuffix("_ms") for name in parts]
        axis.stackplot(x, *parts.values(), labels=labels, colors=list(COLOURS.values()))
        for label, column in (
            ("kvpager, dense", "dense_step_ms"),
            ("transformers", "transformers_step_ms"),
        ):
            axis.plot(x, [report.number(row, column) for row in rows], "o--", label=label)
        axis.set_title(shape, fontsize=10)
        log_context(axis, x, "decode step [ms]")
        axis.set_yscale("linear")
    return [save(figure, folder, f"decode{suffix}")]


def draw_exactness(report: Report, folder: Path, suffix: str) -> list[str]:
    """Share of texts that fork and of logits that differ, by subject; one panel each."""
    cells = list(dict.fromkeys((str(r["subject"]), str(r["text"])) for r in report.rows))
    ways = list(dict.fromkeys((str(r["by"]), str(r["way"])) for r in report.rows))
    found = {(r["subject"], r["text"], r["by"], r["way"]): r for r in report.rows}
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    shares: tuple[tuple[Any, str, Callable[[Any], float]], ...] = (
        (axes[0], "texts that fork [%]", lambda row: 100 * row["forks"] / row["prompts"]),
        (axes[1], "logits that differ [%]", lambda row: row["differing_share"]),
    )
    for axis, label, share in shares:
        width = 0.8 / len(ways)
        for number, way in enumerate(ways):
            rows = [found[cell + way] for cell in cells]
            places = [i + (number - (len(ways) - 1) / 2) * width for i in range(len(cells))]
            bars = axis.bar(places, [share(row) for row in rows], width, label=": ".join(way))
            axis.bar_label(bars, ["" if share(row) else "0" for row in rows], fontsize=7)
        names = [" ".join(cell) for cell in cells]
        axis.set_xticks(range(len(cells)), names, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(label)
        axis.set_ylim(0, 105)
    axes[0].legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))
    return [save(figure, folder, f"exactness{suffix}")]


def draw_exact_cost(report: Report, folder: Path, suffix: str) -> list[str]:
    """Decode and prefill time as multiples of transformers', against M; one line per mode."""
    names = list(dict.fromkeys(str(row["subject"]) for row in report.rows))
    figure, axes = plt.subplots(
        2, len(names), figsize=(3.4 * len(names), 5.6), squeeze=False, sharey="row"
    )
    for column, name in enumerate(names):
        mine = [row for row in report.rows if row["subject"] == name]
        counts = list(dict.fromkeys(int(report.number(row, "rows")) for row in mine))
        for axis, value, label in (
            (axes[0][column], "decode_over_transformers", "decode time"),
            (axes[1][column], "prefill_over_transformers", "prefill time"),
        ):
            for mode in dict.fromkeys(str(row["mode"]) for row in mine):
                rows = [row for row in mine if row["mode"] == mode]
                x = [report.number(row, "rows") for row in rows]
                axis.plot(x, [report.number(row, value) for row in rows], "o-", label=mode)
            axis.axhline(1, color="#808080", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.minorticks_off()
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("rows M")
            axis.grid(alpha=0.3)
            if not column:
                axis.set_ylabel(f"{label}, x transformers'")
        axes[0][column].set_title(name, fontsize=10)
    axes[0][0].legend(fontsize=7)
    return [save(figure, folder, f"exact-cost{suffix}")]


def draw_packing(report: Report, folder: Path, suffix: str) -> list[str]:
    """Generated tokens per second against sessions; one panel per kind of prompts."""
    kinds = list(dict.fromkeys(str(row["prompts"]) for row in report.rows))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(4.8 * len(kinds), 3.6), squeeze=False, sharey=True
    )
    full = int(report.settings["rows"])
    for axis, kind in zip(axes.flat, kinds):
        rows = [row for row in report.rows if row["prompts"] == kind]
        x = [report.number(row, "sessions") for row in rows]
        for label, column, style in (
            ("kvpager, packed", "tokens_per_s", "o-"),
            ("kvpager, one after the other", "one_by_one_tokens_per_s", "--"),
            ("transformers, left-padded batch", "transformers_batch_tokens_per_s", "o-"),
            ("transformers, one after the other", "transformers_one_by_one_tokens_per_s", "--"),
        ):
            axis.plot(x, [report.number(row, column) for row in rows], style, label=label)
        axis.axvline(full, color="#808080", linewidth=0.8)
        axis.set_title(f"{kind} prompts (M = {full})", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(int(sessions)) for sessions in x])
        axis.minorticks_off()
        axis.set_xlabel("sessions")
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("generated tokens per second")
    axes.flat[0].legend(fontsize=7)
    return [save(figure, folder, f"packing{suffix}")]


def draw_residency_traffic(report: Report, folder: Path, suffix: str) -> list[str]:
    """Bytes across the link against the pool; bands go from agreeing to independent heads."""
    context = max(report.number(row, "context") for row in report.rows)
    chosen = sorted({report.number(row, "chunks_selected") for row in report.rows})
    figure, axes = plt.subplots(1, len(chosen), figsize=(4.8 * len(chosen), 3.6), squeeze=False)
    for axis, chunks in zip(axes.flat, chosen):
        for label, unit, way in PLOTTED_WAYS:
            edges = []
            for shape in (AGREE, INDEPENDENT):
                rows = [
                    row
                    for row in report.rows
                    if (row["shape"], row["context"], row["chunks_selected"], row["unit"])
                    == (shape, context, chunks, unit)
                    and (row["misses"], row["policy"], row["recall"]) == way
                ]
                x = [report.number(row, "pool") for row in rows]
                edges.append([report.number(row, "link_kib") / 1024 for row in rows])
            (line,) = axis.plot(x, edges[1], "o-", label=label)
            axis.fill_between(x, *edges, color=line.get_color(), alpha=0.2)
        axis.set_title(f"{tokens_name(int(context))}, {chunks:g} chunks selected")
        log_context(axis, x, "MiB per token")
        axis.set_xlabel("pool [tokens]")
    return [save(figure, folder, f"residency-traffic{suffix}")]


def draw_companions(report: Report, folder: Path, suffix: str) -> list[str]:
    """Prompt tokens computed and seconds taken, where what a draft refuses is kept or wiped."""
    rows = [row for row in report.rows if row["draft"] != "none"]
    if not rows:
        return []
    cells = list(dict.fromkeys((str(r["shape"]), str(r["draft"]), r["prefix"]) for r in rows))
    names = [f"{shape}\n{draft} draft, {tokens_name(int(n))}" for shape, draft, n in cells]
    figure, axes = plt.subplots(1, 2, figsize=(4.0 + 2.2 * len(cells), 3.6))
    for axis, column, label in (
        (axes[0], "computed", "prompt tokens computed"),
        (axes[1], "prompt_s", "seconds for prompts"),
    ):
        for place, way in ((-0.2, "kept"), (0.2, "wiped")):
            found = {(r["shape"], r["draft"], r["prefix"]): r for r in rows if r["way"] == way}
            values = [report.number(found[cell], column) for cell in cells]
            axis.bar([i + place for i in range(len(cells))], values, 0.4, label=way)
        axis.set_xticks(range(len(cells)), names, fontsize=8)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=8)
    return [save(figure, folder, f"companions{suffix}")]


def draw_hybrid_cost(report: Report, folder: Path, suffix: str) -> list[str]:
    """Memory for states and tokens that a cut computes again, against the chunks between states."""
    context = max(report.number(row, "context") for row in report.rows)
    rows = [row for row in report.rows if row["context"] == context]
    x = [report.number(row, "every") for row in rows]
    figure, memory = plt.subplots(figsize=(5.6, 3.6))
    cost = memory.twinx()
    lines = [
        *memory.plot(
            x, [report.number(row, "kib_per_token") for row in rows], "o-", label="states"
        ),
        *memory.plot(
            x, [report.number(row, "kv_kib_per_token") for row in rows], "--", label="K/V"
        ),
        *cost.plot(
            x, [report.number(row, "mean_back") for row in rows], "s-C2", label="a cut, on average"
        ),
        *cost.plot(
            x, [report.number(row, "worst_back") for row in rows], "s:C2", label="a cut, at worst"
        ),
    ]
    memory.set_xscale("log", base=2)
    memory.set_xticks(x, [f"{every:g}" for every in x])
    memory.minorticks_off()
    memory.set_xlabel("chunks from state to state")
    memory.set_ylabel("KiB per token")
    memory.set_ylim(0)
    cost.set_ylabel("tokens computed again")
    cost.set_ylim(0)
    memory.legend(handles=lines, fontsize=8, loc="upper center")
    memory.grid(alpha=0.3)
    return [save(figure, folder, f"hybrid-cost{suffix}")]


def draw_segments(report: Report, folder: Path, suffix: str) -> list[str]:
    """Exact match and error against the tokens recomputed and against all rows spent."""
    context = report.rows[0]["context"]
    rows = [row for row in report.rows if row["context"] == context]
    (none,) = (row for row in rows if row["policy"] == NO_REPAIR)
    families = list(dict.fromkeys(r["policy"] for r in rows if r["share"] != NOT_APPLICABLE))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    for axis, x, y, label in (
        (axes[0], "recomputed", "exact_match", "exact match [%]"),
        (axes[1], "cost", "exact_match", "exact match [%]"),
        (axes[2], "recomputed", "mean_error", "mean error of logits"),
    ):
        for family in families:
            mine = [none, *(row for row in rows if row["policy"] == family)]
            axis.errorbar(
                *([report.number(row, name) for row in mine] for name in (x, y)),
                yerr=[report.number(row, f"{y}_se") for row in mine],
                fmt="o-",
                markersize=4,
                capsize=2,
                label=str(family),
            )
        axis.set_xlabel(
            "tokens recomputed [%]" if x == "recomputed" else "rows, probes too [% of full prefill]"
        )
        axis.set_ylabel(label)
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return [save(figure, folder, f"segments{suffix}")]


def draw_segments_first_token(report: Report, folder: Path, suffix: str) -> list[str]:
    """Time to the first token in each way; one panel per shape and length."""
    cells = list(dict.fromkeys((str(row["shape"]), row["context"]) for row in report.rows))
    figure, axes = plt.subplots(1, len(cells), figsize=(3.2 * len(cells), 3.8), squeeze=False)
    for axis, (shape, context) in zip(axes.flat, cells):
        rows = [row for row in report.rows if (row["shape"], row["context"]) == (shape, context)]
        names = [str(row["way"]).replace(", ", ",\n") for row in rows]
        bars = axis.bar(names, [report.number(row, "first_token_ms") for row in rows])
        axis.bar_label(bars, [f"{report.number(row, 'faster'):.1f}x" for row in rows], fontsize=8)
        axis.set_title(f"{shape}, {tokens_name(int(context))}", fontsize=10)
        axis.tick_params(axis="x", rotation=45, labelsize=8)
        axis.margins(y=0.12)
    axes.flat[0].set_ylabel("time to first token [ms]")
    return [save(figure, folder, f"segments-first-token{suffix}")]


DRAWINGS: dict[str, Callable[[Report, Path, str], list[str]]] = {
    "needles": draw_needles,
    "exactness": draw_exactness,
    "exact_cost": draw_exact_cost,
    "packing": draw_packing,
    "snapshot_save": draw_snapshot_save,
    "snapshot_read": draw_snapshot_read,
    "decode": draw_decode,
    "residency_traffic": draw_residency_traffic,
    "companions": draw_companions,
    "hybrid_cost": draw_hybrid_cost,
    "segments": draw_segments,
    "segments_first_token": draw_segments_first_token,
}

# Of reports too long to print, the rows that are.
PRINTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "residency_traffic": lambda row: row["pool"] == PRINTED_POOL,
}


def log_context(axis: Any, x: list[float], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, [tokens_name(int(tokens)) for tokens in x])
    axis.minorticks_off()
    axis.set_yscale("log")
    axis.set_xlabel("context [tokens]")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def save(figure: Any, folder: Path, name: str) -> str:
    figure.tight_layout()
    # No software version inside: a figure changes only when its numbers do.
    figure.savefig(
        folder / f"{name}.png", dpi=110, bbox_inches="tight", metadata={"Software": None}
    )
    plt.close(figure)
    return f"{name}.png"
