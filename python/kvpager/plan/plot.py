"""Decode speed and memory against context, as a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.plan.result import Plan

_CHOSEN, _DENSE, _FULL, _LIMIT = "#0b6e5f", "#d9a441", "#86a5d3", "#e4572e"


def draw_plan(plan: Plan) -> bytes:
    """The file's bytes: tokens per second on the left, bytes of K/V on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sessions = plan.workload.sessions
    speeds = plan.speeds()
    at = [speed.context for speed in speeds]
    figure = Figure(figsize=(12, 4.6), dpi=110)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    kind = plan.config.selection.kind
    left.plot(at, [sessions / s.chosen.seconds for s in speeds], "o-", color=_CHOSEN, label=kind)
    if kind != "dense":
        left.plot(
            at, [sessions / s.dense.seconds for s in speeds], "o-", color=_DENSE, label="dense"
        )
    left.set_ylabel("tokens/s")
    left.set_title("decoding", loc="left")
    gib = 2**30
    right.plot(at, [s.full_bytes / gib for s in speeds], "o-", color=_FULL, label="full cache")
    right.plot(at, [s.pool_bytes / gib for s in speeds], "o-", color=_CHOSEN, label="in the pool")
    right.axhline(plan.memory.pool / gib, color=_LIMIT, linestyle="--", label="pool, its bound")
    right.set_ylabel("GiB of K/V")
    right.set_title("memory", loc="left")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in at])
        axes.set_xlabel("context [tokens]" + (f", {sessions} sessions" if sessions > 1 else ""))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(
        f"{plan.shape.name} on {plan.machine.name}: expected, not measured", x=0.01, ha="left"
    )
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
