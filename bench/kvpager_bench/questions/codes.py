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
from contextlib import ExitStack
from typing import NamedTuple

from kvpager.config import KV_DTYPES
from kvpager_bench import harness, machine
from kvpager_bench.harness import Column, Report, Subject
from kvpager_bench.places import scratch_folder
from kvpager_bench.questions.attention import LAYERS, Case, Ours, passes, per_call

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
    ours = Ours(Case(shape, dtype, SAVED), threads)
    try:
        with scratch_folder() as folder:
            path = folder / "text.kv"
            ours.sequence.save(path)
            return path.stat().st_size / ours.case.layers
    finally:
        ours.close()


def measure(shape: str, context: int, report: Report, threads: int, rounds: int) -> None:
    memory = machine.MemoryReader(threads)
    kept = [dtype for dtype in AIMS if dtype in KV_DTYPES]
    cases = {dtype: Case(shape, dtype, context) for dtype in (PLAIN, *kept)}
    subjects: dict[str, Subject] = {}
    with ExitStack() as stack:
        for dtype, case in cases.items():
            ours = Ours(case, threads)
            stack.callback(ours.close)
            attend = stack.enter_context(ours.rows(1))
            subjects[dtype] = Subject(passes(attend, case.layers))
        timings = harness.interleave(
            {**subjects, "memory": Subject(memory)}, runs=rounds, warm_up=2
        )
    bandwidth = memory.bytes / timings["memory"].median
    each = {dtype: per_call(timings[dtype], case.layers) for dtype, case in cases.items()}
    chunks = {dtype: case.layout(layers=1).chunk_bytes for dtype, case in cases.items()}
    files = {dtype: saved_bytes(shape, dtype, threads) for dtype in cases}
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
    for dtype in kept:
        aim = AIMS[dtype]
        what = f"{shape}, {dtype}"
        report.compare(
            f"decode attention at {harness.tokens_name(context)}, {what}",
            ours=each[dtype].median * 1e3,
            theirs=each[PLAIN].median * 1e3,
            peer=f"K/V in {PLAIN}",
            unit="ms",
            aim=aim.faster,
            lower_is_better=True,
        )
        report.compare(
            f"decode attention at {harness.tokens_name(context)}, {what}",
            ours=rates[dtype] * 1e-9,
            theirs=bandwidth * 1e-9,
            peer="memory bandwidth",
            unit="GB/s",
            aim=aim.of_bandwidth,
        )
        moved: dict[str, Mapping[str, float]] = {
            "of a chunk that is paged": chunks,
            "of a saved text, with summaries": files,
        }
        for name, size in moved.items():
            report.compare(
                f"bytes {name}, {what}",
                ours=size[dtype],
                theirs=size[PLAIN],
                peer=f"K/V in {PLAIN}",
                unit="bytes a layer",
                aim=aim.smaller,
                lower_is_better=True,
            )
        print(
            f"{shape}, {dtype}: {each[PLAIN].median / each[dtype].median:.2f} x {PLAIN}, "
            f"{rates[dtype] / bandwidth:.2f} of the memory's bandwidth, "
            f"{files[dtype] / files[PLAIN]:.3f} of its file",
            flush=True,
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--shapes", type=harness.parse_list, help="q_heads/kv_heads/dim, ...")
    parser.add_argument("--contexts", type=harness.parse_ints, help="tokens, multiples of 64")
    arguments = parser.parse_args()
    environment = harness.start(arguments)
    shapes = arguments.shapes or SHAPES
    contexts = arguments.contexts or ((2048,) if arguments.quick else (CONTEXT,))
    report = Report(
        harness.report_name("codes", arguments),
        "What do keys and values in fewer bits save?",
        COLUMNS,
        settings={"shapes": list(shapes), "contexts": list(contexts), "layers": list(LAYERS)},
        environment=environment,
    )
    for shape, context in itertools.product(shapes, contexts):
        measure(shape, context, report, arguments.threads, 3 if arguments.quick else 21)
    report.finish()


if __name__ == "__main__":
    main()
