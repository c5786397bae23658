"""The picture of where a conversation's chunks are, moment by moment."""

from __future__ import annotations

from typing import Any

from kvpager_bench.report import Report, tokens_name

PREFILL, QUESTION = "prefill", "question"  # what a row follows
TIERS = ("pool", "host", "disk")
COLOURS = ("#0072B2", "#a6cbe3", "#e4e4e4")
ASKED = "#D55E00"
_NAMES = {"pool": "in the pool", "host": "in host memory", "disk": "on disk"}


def places(text: str) -> list[str]:
    """The tier of every chunk, from how many neighbours each has: "2p 1d"."""
    tiers = {tier[0]: tier for tier in TIERS}
    found = []
    for part in text.split(" "):
        found += [tiers[part[-1]]] * int(part[:-1])
    return found


def residency_title(report: Report) -> str:
    last = report.rows[-1]
    pool, host, disk = (int(report.number(last, name)) for name in TIERS)
    asked = [row for row in report.rows if row["after"] == QUESTION]
    known = sum(row["asked_was_in"] == "pool" for row in asked)
    return (
        f"The pool holds {pool} of {pool + host + disk} chunks: the newest, and those with {known} "
        f"of {len(asked)} answers\nbefore anybody asks; the rest is in host memory and on disk"
    )


def draw_residency(report: Report) -> Any:
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from kvpager_bench.pictures.canvas import blank

    figure, (read, asked) = blank(
        residency_title(report), 2, sharey=True, gridspec_kw={"width_ratios": [3, 1.6]}
    )
    most = len(places(str(report.rows[-1]["places"])))
    chunk = int(report.settings["chunk_tokens"])
    colours = ListedColormap(COLOURS)
    for axis, after in ((read, PREFILL), (asked, QUESTION)):
        rows = [row for row in report.rows if row["after"] == after]
        image = np.full((most, len(rows)), np.nan)
        for column, row in enumerate(rows):
            held = [TIERS.index(tier) for tier in places(str(row["places"]))]
            image[: len(held), column] = held
        right = report.number(rows[-1], "tokens") if after == PREFILL else len(rows)
        axis.imshow(
            image,
            aspect="auto",
            interpolation="nearest",
            origin="lower",
            cmap=colours,
            vmin=-0.5,
            vmax=len(TIERS) - 0.5,
            extent=(0, right, 0, most * chunk),
        )
        if after == QUESTION:
            axis.plot(
                [column + 0.5 for column in range(len(rows))],
                [(report.number(row, "asked") + 0.5) * chunk for row in rows],
                "o",
                markersize=9,
                markerfacecolor="none",
                markeredgecolor=ASKED,
                markeredgewidth=2,
            )
            axis.set_xticks([column + 0.5 for column in range(len(rows))], range(1, len(rows) + 1))
            axis.tick_params(labelsize=8)
            axis.set_xlabel("then: questions answered")
    ticks = np.linspace(0, int(report.settings["context"]), 5).astype(int)
    names = ["0", *(tokens_name(int(tick)) for tick in ticks[1:])]
    read.set_xticks(ticks, names)
    read.set_yticks(ticks, names)
    read.set_xlabel("first: tokens of the prompt read")
    read.set_ylabel("position in the conversation [tokens]")
    handles: list[Any] = [
        Patch(facecolor=colour, label=_NAMES[tier]) for tier, colour in zip(TIERS, COLOURS)
    ]
    handles.append(
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=ASKED,
            markeredgewidth=2,
            label="chunk with the answer",
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
    return figure
