"""What keys and values in fewer bits save: time of attention, bytes kept, saved and paged.

    kvpager bench codes
    kvpager bench codes -- --shapes 32/8/128

K/V are random and injected: time and bytes are measured, and nothing of quality. One row attends
over all of a context at each layer in turn, as a decoding step has it, with K/V in bfloat16 and in
fewer bits by turns; the memory is read by as many threads in the same turns. Then the same texts
are saved, and their files weighed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import NamedTuple

from kvpager.config import KV_DTYPES
from kvpager_bench import harness, machine
from kvpager_bench.harness import Column, Subject
from kvpager_bench.places import scratch_folder
from kvpager_bench.questions.attention import Case, Ours, passes
from kvpager_bench.study import Asked, Option, Study, Table

SHAPES = ("16/8/128", "32/8/128")
CONTEXT = 32768
SAVED = 4096  # tokens
PLAIN = "bfloat16"


class Aim(NamedTuple):
    """faster: times as fast as bfloat16. smaller: its bytes by these. of_bandwidth: of memory's."""

    faster: float | None
    smaller: float
    of_bandwidth: float | None


AIMS = {
    "q8": Aim(1.7, 1 / 0.53, 0.8),
    "k8v4": Aim(None, 1 / 0.44, None),
    "q4": Aim(None, 1 / 0.34, None),
}

COLUMNS = (
    Column("shape", text=True),
    Column("kv_dtype", text=True),
    Column("context", "tokens", 6),
    Column("token_bytes", "bytes a layer"),
    Column("attend_ms", "ms"),
    Column("spread", "(max-min)/median", 2),
    Column("kv_gbs", "GB/s of K/V"),
    Column("read_gbs", "GB/s of memory"),
    Column("of_read_bandwidth", "", 2),
    Column("faster", "x bfloat16", 2),
    Column("chunk_bytes", "bytes a layer"),
    Column("file_bytes", "bytes a layer"),
)


def saved_bytes(shape: str, dtype: str, threads: int) -> float:
    """Of a file of SAVED tokens, for each layer."""
    with closing(Ours(Case(shape, dtype, SAVED), threads)) as ours, scratch_folder() as folder:
        path = folder / "text.kv"
        ours.sequence.save(path)
        return path.stat().st_size / ours.case.layers


def measure_shape(asked: Asked, shape: str, context: int) -> None:
    """Every dtype by turns, and its files."""
    report, memory = asked.report(), machine.MemoryReader()
    kept = [dtype for dtype in AIMS if dtype in KV_DTYPES]
    cases = {dtype: Case(shape, dtype, context) for dtype in (PLAIN, *kept)}
    subjects: dict[str, Subject] = {}
    with ExitStack() as stack:
        for dtype, case in cases.items():
            ours = stack.enter_context(closing(Ours(case, asked.threads)))
            attend = stack.enter_context(ours.rows(1))
            subjects[dtype] = Subject(passes(attend, case.layers))
        turns = {**subjects, "memory": Subject(memory)}
        timings = harness.interleave(turns, runs=asked.options.rounds, warm_up=2)
    bandwidth = memory.bytes / timings["memory"].median
    each = {dtype: timings[dtype].per(case.layers) for dtype, case in cases.items()}
    chunks = {dtype: case.layout(layers=1).chunk_bytes for dtype, case in cases.items()}
    files = {dtype: saved_bytes(shape, dtype, asked.threads) for dtype in cases}
    rates = {
        dtype: case.row_bytes * case.tokens(1) / each[dtype].median for dtype, case in cases.items()
    }
    for dtype, case in cases.items():
        report.add(
            shape=shape,
            kv_dtype=dtype,
            context=context,
            token_bytes=case.row_bytes,
            attend_ms=each[dtype].median * 1e3,
            spread=each[dtype].spread,
            kv_gbs=rates[dtype] * 1e-9,
            read_gbs=bandwidth * 1e-9,
            of_read_bandwidth=rates[dtype] / bandwidth,
            faster=each[PLAIN].median / each[dtype].median,
            chunk_bytes=chunks[dtype],
            file_bytes=files[dtype],
        )
    peer, unit = f"K/V in {PLAIN}", "bytes a layer"
    for dtype in kept:
        aim, what = AIMS[dtype], f"{shape}, {dtype}"
        figure = f"decode attention at {harness.tokens_name(context)}, {what}"
        times = each[dtype].median * 1e3, each[PLAIN].median * 1e3
        report.compare(figure, *times, peer, "ms", aim.faster, lower_is_better=True)
        gbs = rates[dtype] * 1e-9, bandwidth * 1e-9
        report.compare(figure, *gbs, "memory bandwidth", "GB/s", aim.of_bandwidth)
        moved: dict[str, Mapping[str, float]] = {
            "of a chunk that is paged": chunks,
            "of a saved text, with summaries": files,
        }
        for name, size in moved.items():
            sizes = size[dtype], size[PLAIN]
            report.compare(
                f"bytes {name}, {what}", *sizes, peer, unit, aim.smaller, lower_is_better=True
            )


def measure(asked: Asked) -> None:
    for shape, context in itertools.product(asked.options.shapes, asked.options.contexts):
        measure_shape(asked, shape, context)


STUDY = Study(
    measure,
    (Table("codes", "What do keys and values in fewer bits save?", COLUMNS),),
    (
        Option("shapes", SHAPES, help="q_heads/kv_heads/dim, ..."),
        Option("contexts", [CONTEXT], quick=[2048], help="tokens, multiples of 64"),
        Option("rounds", 21, quick=3),
    ),
)

if __name__ == "__main__":
    STUDY.main()
