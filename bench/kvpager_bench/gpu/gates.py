"""What the figures of the GPU benchmark are to be, and what they were predicted to be.

The predictions are for an H100 that copies 3.0 TB/s, in the 8B shape and bfloat16; they were made
before anything was measured. A figure that is missing fails its gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvpager_bench.gpu.model_sections import topk_name
from kvpager_bench.gpu.products import LAYER
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import CHUNK_TOKENS, Sizes
from kvpager_bench.harness import MissingNumberError

LEAST, MOST = "at least", "at most"
Figure = Callable[[Run], float]


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
            value = self.figure(run)
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


def _promotion(which: int) -> Figure:
    return lambda run: run.number(
        "paging", "eta", what="promote", chunks=run.sizes.paged_chunks[which]
    )


def _duplex(run: Run) -> float:
    return run.number("paging", "ratio", what="duplex: both")


def _evicted_bytes(run: Run) -> float:
    moved = (run.number("paging", f"bytes_{way}", what="evict, clean") for way in ("up", "down"))
    return sum(moved)


def _read_in_place(run: Run) -> float:
    return run.number("paging", "rate_gbs", what="read in place")


def _staged_in_waves(run: Run) -> float:
    return run.number("paging", "eta", what="stage in waves")


def _decode_attention(column: str, context: Callable[[Sizes], int]) -> Figure:
    return lambda run: run.number(
        "attention", column, what="decode", sequences=1, context=context(run.sizes)
    )


def _worst_prefill(run: Run) -> float:
    """Of all cells, each of which has to be there."""
    return min(
        run.number("attention", "over_flash", what="prefill", rows=rows, context=context)
        for rows in run.sizes.prefill_rows
        for context in run.sizes.contexts
    )


def _prefill_rate(run: Run) -> float:
    rows, context = run.sizes.prefill_rows[-1], run.sizes.middle
    return run.number("attention", "tflops", what="prefill", rows=rows, context=context)


def _chosen(column: str, chunks: Callable[[Sizes], int]) -> Figure:
    return lambda run: run.number("selection", column, chunks=chunks(run.sizes))


def _layer(column: str, which: int) -> Figure:
    return lambda run: run.number("linear", column, what=LAYER, rows=run.sizes.product_rows[which])


def _row_start(run: Run) -> float:
    return run.number("rows", "start_s", rows=run.sizes.rows[-1])


def _step_ms(run: Run, context: int) -> float:
    return run.number("decode", "step_ms", selection=topk_name(run), context=context)


def _step(context: Callable[[Sizes], int]) -> Figure:
    return lambda run: _step_ms(run, context(run.sizes))


def _over_graphed(run: Run) -> float:
    context = run.sizes.near_contexts[0]
    return run.number("decode", "over_graphed", selection=topk_name(run), context=context)


def _flatness(run: Run) -> float:
    """The slowest step over the fastest, each context measured."""
    contexts = (*run.sizes.near_contexts, run.sizes.far_context)
    steps = [_step_ms(run, context) for context in contexts]
    return max(steps) / min(steps)


def _profiled(column: str, what: Callable[[Run], str]) -> Figure:
    return lambda run: run.number("profiles", column, what=what(run))


def _dense_layer(run: Run) -> str:
    del run
    return "one layer, dense"


def _topk_layer(run: Run) -> str:
    return f"one layer, {topk_name(run)}"


def _restore(run: Run) -> float:
    """The slower selection."""
    return max(
        run.number("restore", "first_token_ms", selection=selection, source="pinned memory")
        for selection in ("dense", topk_name(run))
    )


def _differing_bits(run: Run) -> float:
    if run.number("dense_pool", "bits_compared") <= 0:
        raise MissingNumberError("no bits were compared")
    return run.number("dense_pool", "differing_bits")


GATES = (
    Gate("paging", "32 chunks come up", "of a pinned copy", _promotion(-1), (LEAST, 0.90)),
    Gate(
        "paging", "one chunk comes up", "of a pinned copy", _promotion(0),
        (LEAST, 0.90), (0.80, 0.92),
    ),
    Gate("paging", "sealing and promoting at once", "x the rate", _duplex, (LEAST, 1.5)),
    Gate("paging", "evicting clean chunks moves", "bytes", _evicted_bytes, (MOST, 0)),
    Gate("paging", "missed chunks are read in place", "GB/s", _read_in_place, predicted=(40, 48)),
    Gate(
        "paging", "256 rows over 128K missed tokens", "of a pinned copy", _staged_in_waves,
        (LEAST, 0.9), (0.88, 0.97),
    ),
    Gate(
        "attention", "dense decode at 2K", "us per layer",
        _decode_attention("time_us", lambda sizes: sizes.short), predicted=(20, 25),
    ),
    Gate(
        "attention", "dense decode at 32K", "us per layer",
        _decode_attention("time_us", lambda sizes: sizes.middle), predicted=(62, 75),
    ),
    Gate(
        "attention", "dense decode at 128K", "us per layer",
        _decode_attention("time_us", lambda sizes: sizes.long), predicted=(205, 225),
    ),
    Gate(
        "attention", "dense decode at 32K reads", "of the device copy",
        _decode_attention("of_copy", lambda sizes: sizes.middle), (LEAST, 0.8), (0.60, 0.72),
    ),
    Gate(
        "attention", "dense decode at 128K reads", "of the device copy",
        _decode_attention("of_copy", lambda sizes: sizes.long), (LEAST, 0.85), (0.80, 0.87),
    ),
    Gate("attention", "prefill", "of torch's flash kernel", _worst_prefill, (LEAST, 0.7)),
    Gate("attention", "prefill of 256 rows at 32K", "TFLOP/s", _prefill_rate, predicted=(250, 320)),
    Gate(
        "selection", "scores and selection at 32K", "us per layer",
        _chosen("selection_us", lambda sizes: sizes.scanned_chunks[0]), (MOST, 12), (9, 13),
    ),
    Gate(
        "selection", "top 32 chunks at 32K", "us per layer",
        _chosen("attend_us", lambda sizes: sizes.scanned_chunks[0]), predicted=(40, 55),
    ),
    Gate(
        "selection", "top 32 chunks at 128K", "us per layer",
        _chosen("attend_us", lambda sizes: sizes.long // CHUNK_TOKENS), predicted=(55, 75),
    ),
    Gate(
        "selection", "a scan of 16K chunks", "us per layer",
        _chosen("selection_us", lambda sizes: sizes.most_scanned), predicted=(170, 220),
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
    Gate("rows", "proving the row counts of 256 and starting", "s", _row_start),
    Gate(
        "decode", "a top-k step at 16K", "ms",
        _step(lambda sizes: sizes.near_contexts[0]), predicted=(9, 13),
    ),
    Gate(
        "decode", "a top-k step at 256K", "ms",
        _step(lambda sizes: sizes.far_context), predicted=(9, 14),
    ),
    Gate(
        "decode", "a top-k step at 16K", "x transformers' graphed step over 2K", _over_graphed,
        (MOST, 1.3), (1.15, 1.6),
    ),
    Gate("decode", "top-k steps from 16K to 256K", "slowest over fastest", _flatness, (MOST, 1.15)),
    Gate(
        "profiles", "dense attention launches", "kernels per layer",
        _profiled("kernels", _dense_layer), predicted=(3, 3),
    ),
    Gate(
        "profiles", "top-k attention launches", "kernels per layer",
        _profiled("kernels", _topk_layer), predicted=(5, 5),
    ),
    Gate(
        "profiles", "Python and launches of top-k attention", "us per layer",
        _profiled("host_us", _topk_layer), predicted=(20, 30),
    ),
    Gate("restore", "32K from pinned memory: first token", "ms", _restore, (MOST, 150), (105, 130)),
    Gate("dense_pool", "a pool of 1/8 of the context changes", "bits", _differing_bits, (MOST, 0)),
)  # fmt: skip


def judge(run: Run, sections: Collection[str]) -> list[Judged]:
    """Of the gates of these sections."""
    return [gate.judge(run) for gate in GATES if gate.section in sections]
