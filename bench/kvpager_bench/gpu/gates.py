"""The targets of the GPU benchmark's figures. A missing figure fails its gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpager_bench.gpu.run import Run
from kvpager_bench.harness import MissingNumberError, Verdict

FLAT_FROM, FLAT_TO = 16384, 262144
JUDGED_CONTEXT = 32768


@dataclass(frozen=True)
class Gate:
    """A figure and its limit. least: the figure must be at least that, else at most."""

    claim: str
    limit: float
    least: bool
    figure: Callable[[Run], float]

    def judge(self, run: Run) -> Verdict:
        wanted = f"{'at least' if self.least else 'at most'} {self.limit:g}"
        try:
            value = self.figure(run)
        except Exception as error:
            return Verdict(self.claim, False, f"not measured ({error}); wanted {wanted}")
        holds = value >= self.limit if self.least else value <= self.limit
        return Verdict(self.claim, holds, f"{value:.4g}; wanted {wanted}")


def _promotion(chunks: int) -> Callable[[Run], float]:
    return lambda run: run.number("paging", "eta", what="promote", chunks=chunks)


def _duplex(run: Run) -> float:
    return run.number("paging", "ratio", what="duplex: both")


def _evicted_bytes(run: Run) -> float:
    return run.number("paging", "bytes_down", what="evict, clean") + run.number(
        "paging", "bytes_up", what="evict, clean"
    )


def _decode_attention(run: Run) -> float:
    return run.number("attention", "of_copy", what="decode", sequences=1, context=JUDGED_CONTEXT)


def _prefill_attention(run: Run) -> float:
    """The worst of all cells, each of which has to be there."""
    return min(
        run.number("attention", "over_flash", what="prefill", rows=rows, context=context)
        for rows in run.sizes.prefill_rows
        for context in run.sizes.prefill_contexts
    )


def _flatness(run: Run) -> float:
    """The slowest step over the fastest from FLAT_FROM to FLAT_TO, each context measured."""
    contexts = [context for context in run.sizes.contexts if FLAT_FROM <= context <= FLAT_TO]
    if not {FLAT_FROM, FLAT_TO} <= set(contexts):
        raise MissingNumberError(f"contexts are {contexts}")
    selection = f"top-{run.sizes.selected}"
    steps = [
        run.number("decode", "step_ms", selection=selection, context=context)
        for context in contexts
    ]
    return max(steps) / min(steps)


def _restore(run: Run) -> float:
    """The slower selection."""
    return max(
        run.number(
            "restore",
            "first_token_ms",
            selection=selection,
            context=JUDGED_CONTEXT,
            source="pinned memory",
        )
        for selection in ("dense", f"top-{run.sizes.selected}")
    )


def _differing_bits(run: Run) -> float:
    if run.number("dense_pool", "bits_compared") <= 0:
        raise MissingNumberError("no bits were compared")
    return run.number("dense_pool", "differing_bits")


GATES = (
    Gate("32 chunks come up at 0.90 of a plain pinned copy", 0.90, True, _promotion(32)),
    Gate("one chunk comes up at 0.75 of a plain pinned copy", 0.75, True, _promotion(1)),
    Gate("sealing and promoting at once save a third of the time", 1.5, True, _duplex),
    Gate("evicting clean chunks moves no bytes", 0, False, _evicted_bytes),
    Gate("decode attention at 32K reads at 0.8 of the device copy", 0.8, True, _decode_attention),
    Gate("prefill attention runs at 0.7 of torch's flash kernel", 0.7, True, _prefill_attention),
    Gate("top-k decode from 16K to 256K stays within 15%", 1.15, False, _flatness),
    Gate("32K from pinned memory: first token within 150 ms", 150, False, _restore),
    Gate("a pool of 1/8 of the context changes no bit", 0, False, _differing_bits),
)


def judge(run: Run) -> list[Verdict]:
    """Of every gate; a rehearsal reaches none."""
    if run.machine.rehearsal:
        return [Verdict(gate.claim, False, "a rehearsal judges nothing") for gate in GATES]
    return [gate.judge(run) for gate in GATES]
