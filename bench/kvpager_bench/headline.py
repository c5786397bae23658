"""The figures at the head of the results: each puts us beside our peers and says one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

# The backend comes before anything that draws.
from kvpager_bench.peers.recipes import PEERS
from kvpager_bench.plots import log_context, save
from kvpager_bench.report import Cell, Report

OURS, MISSED = "#2f6fb0", "#c8553d"
PEER_COLOURS = ("#e49444", "#5ba053", "#8a6bb1", "#c8553d", "#7f7f7f", "#b8a13a", "#4aa3a2")

# Columns of a report as lines of a plot: label, column, how many of its units a plotted one has.
Line = tuple[str, str, float]


def draw_first_token(reports: Mapping[str, Report], folder: Path, suffix: str) -> str | None:
    """Time to the first token against the context: cold, restored, and how peers come back."""
    report = reports.get("warm")
    if report is None:
        return None
    lines = (
        ("transformers, cold prefill", "transformers_cold_s", 1.0),
        ("kvpager, cold prefill", "cold_s", 1.0),
        ("transformers, torch.save reloaded", "torch_save_ms", 1e3),
        ("transformers, safetensors reloaded", "safetensors_ms", 1e3),
        ("llama.cpp, cold prefill", "llama_cold_s", 1.0),
        ("llama.cpp, state restored", "llama_ms", 1e3),
        ("kvpager, restored", "first_token_ms", 1e3),
    )
    rows = [row for row in report.rows if row.get("file", "cached") == "cached"]
    figure = _panels(report, rows, lines, "time to first token [s]")
    if figure is None:
        return None
    figure.suptitle("A restored turn answers at once, however long it is", fontsize=11)
    return save(figure, folder, f"bench-first-token{suffix}")


def draw_decode_speed(reports: Mapping[str, Report], folder: Path, suffix: str) -> str | None:
    """Decode speed against the context, a panel per shape."""
    report = reports.get("decode")
    if report is None:
        return None
    lines = (
        ("transformers, full attention", "transformers_tokens_per_s", 1.0),
        ("llama.cpp, full attention", "llama_tokens_per_s", 1.0),
        ("kvpager, full attention", "dense_tokens_per_s", 1.0),
        ("kvpager, top-k selection", "tokens_per_s", 1.0),
    )
    figure = _panels(report, report.rows, lines, "tokens per second")
    if figure is None:
        return None
    figure.suptitle("Decode speed against context; the selection is of 4K tokens", fontsize=11)
    return save(figure, folder, f"bench-decode-speed{suffix}")


def draw_quality(reports: Mapping[str, Report], folder: Path, suffix: str) -> str | None:
    """Needles found against the share of the cache that is kept, a line per policy."""
    report = reports.get("quality")
    if report is None or not {"policy", "budget", "found", "asked"} <= report.rows[0].keys():
        return None
    keys = list(dict.fromkeys(row.get("keys", "") for row in report.rows))
    width = max(6.4, 4.8 * len(keys))
    figure, axes = plt.subplots(1, len(keys), figsize=(width, 4.2), squeeze=False, sharey=True)
    for axis, name in zip(axes.flat, keys):
        _found(axis, report, [row for row in report.rows if row.get("keys", "") == name])
        axis.set_title(f"{name} keys" if name else "", fontsize=10)
        axis.set_xlabel("share of the cache that attention reads [%]")
        axis.set_ylim(-3, 103)
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("needles found [%]")
    axes.flat[0].legend(fontsize=7)
    figure.suptitle("What is found with a part of the cache", fontsize=11)
    return save(figure, folder, f"bench-quality{suffix}")


def _found(axis: Any, report: Report, rows: Sequence[Mapping[str, Cell]]) -> None:
    """A line per policy; where several contexts were asked at one budget, their mean."""
    others = iter(PEER_COLOURS * len(rows))
    for policy in dict.fromkeys(str(row["policy"]) for row in rows):
        shares: dict[float, list[float]] = {}
        for row in rows:
            if row["policy"] == policy:
                found, asked = (report.number(row, name) for name in ("found", "asked"))
                shares.setdefault(report.number(row, "budget"), []).append(found / asked)
        x = sorted(shares)
        ours = policy.startswith("kvpager")
        axis.plot(
            x,
            [100 * sum(shares[budget]) / len(shares[budget]) for budget in x],
            "o-",
            label=policy,
            color=OURS if ours else next(others),
            linewidth=2.4 if ours else 1.3,
            zorder=3 if ours else 2,
        )


def draw_attention(reports: Mapping[str, Report], folder: Path, suffix: str) -> str | None:
    """Ratios of the attention kernel to its rooflines and to torch's."""
    report = reports.get("attention")
    if report is None or not report.comparisons:
        return None
    labels = [f"{c.figure} / {c.peer}" for c in report.comparisons]
    ratios = [c.ratio for c in report.comparisons]
    figure, axis = _bars(labels, ratios, [c.holds for c in report.comparisons])
    for place, comparison in enumerate(report.comparisons):
        if comparison.aim is not None:
            axis.plot([comparison.aim] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axis.set_xlabel("ours over theirs; the black mark is the aim")
    axis.set_title("Attention beside memory bandwidth and torch", fontsize=11)
    return save(figure, folder, f"bench-attention{suffix}")


def draw_aims(reports: Mapping[str, Report], folder: Path, suffix: str) -> str | None:
    """Every promise: how many times its aim a figure reaches."""
    chosen = [
        (comparison, comparison.aim)
        for report in reports.values()
        for comparison in report.comparisons
        if comparison.aim is not None
    ]
    if not chosen:
        return None
    labels = [f"{c.figure} / {c.peer}" for c, _ in chosen]
    reached = [comparison.ratio / aim for comparison, aim in chosen]
    figure, axis = _bars(labels, reached, [c.holds for c, _ in chosen], start=1.0)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=8)
    axis.set_xlabel("ratio over its aim; red falls short")
    met = sum(c.holds for c, _ in chosen)
    axis.set_title(f"{met} of {len(chosen)} aims are met", fontsize=11)
    return save(figure, folder, f"bench-aims{suffix}")


DRAWINGS: tuple[Callable[[Mapping[str, Report], Path, str], str | None], ...] = (
    draw_first_token,
    draw_decode_speed,
    draw_quality,
    draw_attention,
    draw_aims,
)


def _panels(
    report: Report, rows: Sequence[Mapping[str, Cell]], lines: Sequence[Line], label: str
) -> Any:
    """A figure with a panel per shape, lines against the context; None where there is no line."""
    shapes = list(dict.fromkeys(row.get("shape", "") for row in rows))
    figure, axes = plt.subplots(
        1, max(1, len(shapes)), figsize=(max(6.0, 4.8 * len(shapes)), 4.2), squeeze=False
    )
    drawn = 0
    for axis, shape in zip(axes.flat, shapes):
        mine = [row for row in rows if row.get("shape", "") == shape]
        drawn += _lines(axis, report, mine, lines)
        log_context(axis, sorted({report.number(row, "context") for row in mine}), label)
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        if high < 12 * low:  # a single decade has no other numbers
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(str(shape), fontsize=10)
    for axis in axes.flat[1:]:
        if axis.get_legend() is not None:
            axis.get_legend().remove()  # the first panel's serves all
    if drawn:
        return figure
    plt.close(figure)
    return None


def _lines(
    axis: Any, report: Report, rows: Sequence[Mapping[str, Cell]], lines: Sequence[Line]
) -> int:
    """Draws the columns that the report has against the context; returns how many those were."""
    others = iter(PEER_COLOURS * 2)
    drawn = 0
    for label, column, per_unit in lines:
        ours = label.startswith("kvpager")
        shown = label.replace("transformers", f"transformers {report.environment['transformers']}")
        shown = shown.replace("llama.cpp", PEERS["llama"].title)
        colour = OURS if ours else next(others)
        points = [
            (report.number(row, "context"), report.number(row, column) / per_unit)
            for row in rows
            if isinstance(row.get(column), (int, float))
        ]
        if points:
            warm = ours and ("restored" in label or "top-k" in label)
            axis.plot(
                *zip(*sorted(points)),
                "o-" if warm or not ours else "o--",
                label=shown,
                color=colour,
                linewidth=2.4 if warm else 1.3,
            )
            drawn += 1
    return drawn


def _bars(
    labels: list[str], ratios: list[float], held: list[bool], start: float = 0.0
) -> tuple[Any, Any]:
    """Horizontal bars from `start`, the first on top; those that fall short are red."""
    figure, axis = plt.subplots(figsize=(9.0, 1.2 + 0.27 * len(labels)))
    places = list(range(len(labels)))
    lengths = [ratio - start for ratio in ratios]
    colours = [OURS if h else MISSED for h in held]
    axis.barh(places, lengths, left=start, color=colours, height=0.7)
    for place, ratio in zip(places, ratios):
        axis.annotate(
            f"{ratio:.3g}",
            (max(ratio, start), place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axis.set_yticks(places, labels, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.1, y=0.01)
    axis.grid(alpha=0.3, axis="x")
    return figure, axis
