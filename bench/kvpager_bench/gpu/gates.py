"""What the figures of the GPU benchmark are to be, and what they were predicted to be.

The predictions are for an H100 that copies 3.0 TB/s, in the 8B shape and bfloat16; they were made
before anything was measured. A figure that is missing fails its gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvpager_bench.gpu.model_sections import topk_name
from kvpager_bench.gpu.products import LAYER
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import CHUNK_TOKENS, Sizes

LEAST, MOST = "at least", "at most"
Figure = Callable[[Run, str], float]  # of a run and a section
Size = Callable[[Sizes], int]


@dataclass(frozen=True)
class Gate:
    """A figure of a section, its limit and its prediction; either may be missing.

    wanted: LEAST or MOST, and the limit. predicted: the least and the most that are expected.
    """

    section: str
    claim: str
    unit: str
    figure: Figure
    wanted: tuple[str, float] | None = None
    predicted: tuple[float, float] | None = None

    def judge(self, run: Run) -> Judged:
        try:
            value = self.figure(run, self.section)
        except Exception as error:
            return Judged(self, None, False, f"not measured: {error}")
        return Judged(self, value, self._holds(value), "")

    def _holds(self, value: float) -> bool:
        if self.wanted is None:
            return math.isfinite(value)
        which, limit = self.wanted
        return value >= limit if which == LEAST else value <= limit


@dataclass(frozen=True)
class Judged:
    """A gate and what was measured. holds: the limit is met, or the figure is there."""

    gate: Gate
    measured: float | None
    holds: bool
    why_not: str

    def to_json(self) -> dict[str, object]:
        gate = self.gate
        return {
            "section": gate.section,
            "claim": gate.claim,
            "unit": gate.unit,
            "predicted": gate.predicted,
            "wanted": gate.wanted,
            "measured": self.measured,
            "holds": self.holds,
            **({"why_not": self.why_not} if self.why_not else {}),
        }

    def __str__(self) -> str:
        gate = self.gate
        said = self.why_not if self.measured is None else f"{self.measured:.4g} {gate.unit}"
        if gate.predicted is not None:
            said += f"; predicted {gate.predicted[0]:g} to {gate.predicted[1]:g}"
        if gate.wanted is not None:
            said += f"; wanted {gate.wanted[0]} {gate.wanted[1]:g}"
        return f"{self._word}: {gate.claim}: {said}"

    @property
    def _word(self) -> str:
        if self.measured is None:
            return "MISSING"
        if self.gate.wanted is None:
            return "measured"
        return "holds" if self.holds else "FAILS"


def _at(column: str, **match: Any) -> Figure:
    """The number of one row. A callable among `match` is asked for its value by the run's sizes."""

    def figure(run: Run, section: str) -> float:
        values = {k: v(run.sizes) if callable(v) else v for k, v in match.items()}
        return run.number(section, column, **values)

    return figure


def _evicted_bytes(run: Run, section: str) -> float:
    return sum(run.number(section, f"bytes_{way}", what="evict, clean") for way in ("up", "down"))


def _worst_prefill(run: Run, section: str) -> float:
    """Of all cells, each of which has to be there."""
    return min(
        run.number(section, "over_flash", what="prefill", rows=rows, context=context)
        for rows in run.sizes.prefill_rows
        for context in run.sizes.contexts
    )


def _flatness(run: Run, section: str) -> float:
    """The slowest step over the fastest, each context measured."""
    contexts = (*run.sizes.near_contexts, run.sizes.far_context)
    chosen = topk_name(run.sizes)
    steps = [run.number(section, "step_ms", selection=chosen, context=c) for c in contexts]
    return max(steps) / min(steps)


def _restore(run: Run, section: str) -> float:
    """The slower selection."""
    return max(
        run.number(section, "first_token_ms", selection=selection, source="pinned memory")
        for selection in ("dense", topk_name(run.sizes))
    )


def _size(name: str, which: int | None = None) -> Size:
    """A size by its name, or one of several."""

    def size(sizes: Sizes) -> int:
        found: Any = getattr(sizes, name)
        return int(found if which is None else found[which])

    return size


def _topk_layer(sizes: Sizes) -> str:
    return f"one layer, {topk_name(sizes)}"


def _long_chunks(sizes: Sizes) -> int:
    return sizes.long // CHUNK_TOKENS


def _decode_at(column: str, context: str) -> Figure:
    return _at(column, what="decode", sequences=1, context=_size(context))


def _layer(column: str, which: int) -> Figure:
    return _at(column, what=LAYER, rows=_size("product_rows", which))


GATES = (
    Gate(
        "paging", "32 chunks come up", "of a pinned copy",
        _at("eta", what="promote", chunks=_size("paged_chunks", -1)), (LEAST, 0.90),
    ),
    Gate(
        "paging", "one chunk comes up", "of a pinned copy",
        _at("eta", what="promote", chunks=_size("paged_chunks", 0)), (LEAST, 0.90), (0.80, 0.92),
    ),
    Gate(
        "paging", "sealing and promoting at once", "x the rate",
        _at("ratio", what="duplex: both"), (LEAST, 1.5),
    ),
    Gate("paging", "evicting clean chunks moves", "bytes", _evicted_bytes, (MOST, 0)),
    Gate(
        "paging", "missed chunks are read in place", "GB/s",
        _at("rate_gbs", what="read in place"), predicted=(40, 48),
    ),
    Gate(
        "paging", "256 rows over 128K missed tokens", "of a pinned copy",
        _at("eta", what="stage in waves"), (LEAST, 0.9), (0.88, 0.97),
    ),
    Gate(
        "attention", "dense decode at 2K", "us per layer",
        _decode_at("time_us", "short"), predicted=(20, 25),
    ),
    Gate(
        "attention", "dense decode at 32K", "us per layer",
        _decode_at("time_us", "middle"), predicted=(62, 75),
    ),
    Gate(
        "attention", "dense decode at 128K", "us per layer",
        _decode_at("time_us", "long"), predicted=(205, 225),
    ),
    Gate(
        "attention", "dense decode at 32K reads", "of the device copy",
        _decode_at("of_copy", "middle"), (LEAST, 0.8), (0.60, 0.72),
    ),
    Gate(
        "attention", "dense decode at 128K reads", "of the device copy",
        _decode_at("of_copy", "long"), (LEAST, 0.85), (0.80, 0.87),
    ),
    Gate("attention", "prefill", "of torch's flash kernel", _worst_prefill, (LEAST, 0.7)),
    Gate(
        "attention", "prefill of 256 rows at 32K", "TFLOP/s",
        _at("tflops", what="prefill", rows=_size("prefill_rows", -1), context=_size("middle")),
        predicted=(250, 320),
    ),
    Gate(
        "selection", "scores and selection at 32K", "us per layer",
        _at("selection_us", chunks=_size("scanned_chunks", 0)), (MOST, 12), (9, 13),
    ),
    Gate(
        "selection", "top 32 chunks at 32K", "us per layer",
        _at("attend_us", chunks=_size("scanned_chunks", 0)), predicted=(40, 55),
    ),
    Gate(
        "selection", "top 32 chunks at 128K", "us per layer",
        _at("attend_us", chunks=_long_chunks), predicted=(55, 75),
    ),
    Gate(
        "selection", "a scan of 16K chunks", "us per layer",
        _at("selection_us", chunks=_size("most_scanned")), predicted=(170, 220),
    ),
    Gate(
        "linear", "linear layers of 1 row read weights at", "of the device copy",
        _layer("of_copy", 0), (LEAST, 0.8), (0.70, 0.88),
    ),
    Gate(
        "linear", "linear layers of 64 rows read weights at", "of the device copy",
        _layer("of_copy", -2), predicted=(0.55, 0.80),
    ),
    Gate(
        "linear", "linear layers of 256 rows", "x the speed of cuBLAS's",
        _layer("over_torch", -1), predicted=(0.35, 0.55),
    ),
    Gate(
        "rows", "proving the row counts of 256 and starting", "s",
        _at("start_s", rows=_size("rows", -1)),
    ),
    Gate(
        "decode", "a top-k step at 16K", "ms",
        _at("step_ms", selection=topk_name, context=_size("near_contexts", 0)), predicted=(9, 13),
    ),
    Gate(
        "decode", "a top-k step at 256K", "ms",
        _at("step_ms", selection=topk_name, context=_size("far_context")), predicted=(9, 14),
    ),
    Gate(
        "decode", "a top-k step at 16K", "x transformers' graphed step over 2K",
        _at("over_graphed", selection=topk_name, context=_size("near_contexts", 0)),
        (MOST, 1.3), (1.15, 1.6),
    ),
    Gate("decode", "top-k steps from 16K to 256K", "slowest over fastest", _flatness, (MOST, 1.15)),
    Gate(
        "profiles", "dense attention launches", "kernels per layer",
        _at("kernels", what="one layer, dense"), predicted=(3, 3),
    ),
    Gate(
        "profiles", "top-k attention launches", "kernels per layer",
        _at("kernels", what=_topk_layer), predicted=(5, 5),
    ),
    Gate(
        "profiles", "Python and launches of top-k attention", "us per layer",
        _at("host_us", what=_topk_layer), predicted=(20, 30),
    ),
    Gate("restore", "32K from pinned memory: first token", "ms", _restore, (MOST, 150), (105, 130)),
)  # fmt: skip


def judge(run: Run, sections: Collection[str]) -> list[Judged]:
    """Of the gates of these sections."""
    return [gate.judge(run) for gate in GATES if gate.section in sections]
