"""Pictures of what is right: needles found, bits, stitched documents."""

from __future__ import annotations

from typing import Any

from kvpager_bench.report import NOT_APPLICABLE, Report, significant, tokens_name

FULL = "full attention"
KVPAGER, NO_REPAIR = "kvpager", "none"
REUSE, DECODE = "prefix reuse", "one-token decode"
_SUBJECTS = {"untied": "random weights", "shipped": "shipped model"}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

Points = tuple[tuple[float, float], ...]


def found(report: Report) -> dict[str, Points]:
    """Of each policy, the needles found at each budget, over all keys and contexts."""
    sums: dict[str, dict[float, float]] = {}
    for row in report.rows:
        mine = sums.setdefault(str(row["policy"]), {})
        budget = report.number(row, "budget")
        mine[budget] = mine.get(budget, 0) + report.number(row, "found")
    return {policy: tuple(sorted(budgets.items())) for policy, budgets in sums.items()}


def asked(report: Report) -> float:
    """The needles that each policy was asked for at each budget."""
    first = report.rows[0]
    return sum(
        report.number(row, "asked")
        for row in report.rows
        if (row["policy"], row["budget"]) == (first["policy"], first["budget"])
    )


def quality_title(report: Report) -> str:
    told = found(report)
    budget, best = told["kvpager"][0]
    title = f"kvpager finds {best:g} of {asked(report):g} needles with {budget:g}% of the cache"
    if FULL not in told:
        return f"{title} read"
    full = told[FULL][0][1]
    also = ",\nas many as with all of it" if full == best else f";\n{full:g} with all of it"
    return f"{title} read{also}"


def draw_quality(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import OTHERS, OURS, blank, label_ends

    figure, axis = blank(quality_title(report))
    told = found(report)
    same: dict[Points, list[str]] = {}
    for policy, points in told.items():
        if policy != FULL:
            same.setdefault(points, []).append(policy)
    ends, others = [], iter(OTHERS * 2)
    for points, policies in same.items():
        ours = "kvpager" in policies
        colour = OURS if ours else next(others)
        axis.plot(*zip(*points), "o-", color=colour, linewidth=3 if ours else 1.6)
        ends.append((", ".join(policies), *points[-1], colour))
    if FULL in told:
        full = told[FULL][0][1]
        axis.axhline(full, color="black", linewidth=1, linestyle=":", zorder=1)
        axis.annotate(
            FULL,
            (0.01, full),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            fontsize=8.5,
        )
    axis.set_xscale("log")
    budgets = sorted({x for policy, points in told.items() if policy != FULL for x, _ in points})
    axis.set_xticks(budgets, [f"{budget:g}%" for budget in budgets])
    axis.minorticks_off()
    axis.set_ylim(-1, 1.06 * asked(report))
    axis.set_xlabel("share of the cache that attention reads")
    axis.set_ylabel(f"needles found, of {asked(report):g}")
    axis.grid(alpha=0.25)
    label_ends(axis, ends)
    return figure


def differing(report: Report) -> dict[str, dict[str, float]]:
    """Of each subject, the share of logits that differ, by way, in percent; greedy texts."""
    shares: dict[str, dict[str, float]] = {}
    for row in report.rows:
        if row["text"] == "greedy":
            weights, _, dtype = str(row["subject"]).partition("-")
            name = f"{_SUBJECTS.get(weights, weights)}, {_DTYPES.get(dtype, dtype)}"
            way = str(row["way"]) if row["by"] == "transformers" else "kvpager"
            mine = shares.setdefault(name, {})
            mine[way] = max(mine.get(way, 0.0), report.number(row, "differing_share"))
    return shares


def exactness_title(report: Report) -> str:
    shares = differing(report)
    theirs = [share for ways in shares.values() for way, share in ways.items() if way != "kvpager"]
    ours = max(ways["kvpager"] for ways in shares.values())
    return (
        f"In transformers {significant(min(theirs), 2)} to {significant(max(theirs), 2)}% of the "
        f"logits change when a prefix is reused\nor a token decoded alone; in kvpager "
        f"{significant(ours, 2)}%"
    )


def draw_exactness(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import OTHERS, OURS, blank

    figure, axis = blank(exactness_title(report))
    shares = differing(report)
    ways = ((REUSE, OTHERS[0], "transformers"), (DECODE, OTHERS[4], "transformers"))
    for place, (way, colour, by) in enumerate((*ways, ("kvpager", OURS, "kvpager"))):
        label = "kvpager, both" if by == "kvpager" else f"transformers, {way}"
        values = [ways_of.get(way, 0.0) for ways_of in shares.values()]
        spots = [row + 0.27 * (place - 1) for row in range(len(shares))]
        bars = axis.barh(spots, values, 0.25, color=colour, label=label)
        axis.bar_label(
            bars,
            [f"{significant(value, 2)}%" for value in values],
            padding=4,
            fontsize=9.5,
            color=OURS if by == "kvpager" else "black",
        )
    axis.set_yticks(range(len(shares)), list(shares))
    axis.invert_yaxis()
    axis.set_xlim(0, 112)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("logits that differ from those of one prefill [%]")
    axis.grid(alpha=0.25, axis="x")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def _at(report: Report, policy: str) -> dict[str, Any]:
    context = report.rows[0]["context"]
    return next(r for r in report.rows if (r["context"], r["policy"]) == (context, policy))


def segments_title(report: Report) -> str:
    default, none = (_at(report, policy) for policy in ("default", NO_REPAIR))
    values = [
        significant(report.number(row, name), 3)
        for row, name in ((default, "recomputed"), (default, "exact_match"), (none, "exact_match"))
    ]
    return (
        f"Cached documents in a new order: with {values[0]}% of their tokens computed again\n"
        f"{values[1]}% of the answers are right, with none {values[2]}%"
    )


def draw_segments(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import OTHERS, OURS, blank

    figure, axis = blank(segments_title(report))
    context = report.rows[0]["context"]
    rows = [row for row in report.rows if row["context"] == context]
    families = list(dict.fromkeys(r["policy"] for r in rows if r["share"] != NOT_APPLICABLE))
    for family, colour in zip(families, OTHERS):
        mine = [_at(report, NO_REPAIR), *(row for row in rows if row["policy"] == family)]
        points = sorted(
            (report.number(row, "recomputed"), report.number(row, "exact_match")) for row in mine
        )
        axis.plot(*zip(*points), "o-", color=colour, linewidth=1.6, markersize=5, label=family)
    default = _at(report, "default")
    spot = tuple(report.number(default, name) for name in ("recomputed", "exact_match"))
    axis.plot(*spot, "D", color=OURS, markersize=11, zorder=4)
    axis.annotate(
        "default repair",
        spot,
        xytext=(10, -16),
        textcoords="offset points",
        color=OURS,
        fontweight="bold",
    )
    axis.set_ylim(-3, 108)
    axis.set_xlabel("tokens of the documents that are computed again [%]")
    axis.set_ylabel("answers that are right [%]")
    axis.grid(alpha=0.25)
    axis.legend(title="policy", loc="lower right", frameon=False, fontsize=9.5)
    return figure


def divergences(report: Report) -> dict[tuple[str, str], Points]:
    """Of each system's formats, the mean KL at each context, where all is read and it is not 0."""
    told: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in report.rows:
        kl = report.number(row, "kl")
        if row["read"] == 100 and kl > 0:
            name = (str(row["by"]), str(row["format"]))
            told.setdefault(name, []).append((report.number(row, "context"), kl))
    return {name: tuple(sorted(points)) for name, points in told.items()}


def formats_title(report: Report) -> str:
    ours = {kept: points[-1] for (by, kept), points in divergences(report).items() if by == KVPAGER}
    told = [
        f"{significant(ours[kept][1], 2)} nats in {kept}"
        for kept in ("q8", "k8v4", "q4")
        if kept in ours
    ]
    context = max(report.number(row, "context") for row in report.rows)
    return (
        f"K/V in fewer bits: the next token's distribution at {tokens_name(int(context))}\n"
        f"moves by {', '.join(told)}"
    )


def draw_formats(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import OTHERS, OURS, against_context, blank, label_ends

    figure, axis = blank(formats_title(report))
    told = divergences(report)
    ends, others = [], iter(OTHERS * 3)
    for (by, kept), points in told.items():
        ours = by == KVPAGER
        colour = OURS if ours else next(others)
        axis.plot(
            *zip(*points), "o-" if ours else "s--", color=colour, linewidth=2 if ours else 1.2
        )
        ends.append((kept if ours else f"{by}, {kept}", *points[-1], colour))
    contexts = sorted({context for points in told.values() for context, _ in points})
    against_context(axis, contexts, "mean KL from K/V in floats [nats]")
    label_ends(axis, ends)
    return figure
