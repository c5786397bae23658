"""How near attention comes to the machine's memory bandwidth and arithmetic, beside torch SDPA.

    kvpager bench attention
    kvpager bench attention -- --shapes 16/8/128

K/V are random and injected: only time is measured. What is timed of ours is `Forward.attend` as a
model's layer calls it: the rows' K/V are checked and written, the ledger hears which chunks matter,
the chunks' addresses are found, and the rows attend over all of them where they lie. SDPA gets the
same keys and values gathered into contiguous tensors beforehand, which a paged cache would have to
do first; once that is counted too. It is given its better form of two, grouped heads and repeated
ones, and the mask it needs.

One row is timed as a decoding step has it: a pass over all layers of one forward, peers likewise,
and a figure is that of a layer. Layers are so many that no pass finds the keys of the one before in
a cache. The memory is read by as many threads in the same turns, and what is held against it is
median against median: on a shared machine it is another one from second to second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import Layout, Pager, PagerConfig
from kvpager.pager import ROW_COMMIT
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report, Subject

MODULE = "kvpager_bench.questions.attention"
ROWS = 64
CHUNK = 64
SHAPES = ("16/8/128", "8/2/64")
FULL_SHAPES = (*SHAPES, "32/8/128", "16/2/128")
CONTEXTS = (2048, 8192, 32768)
DTYPES = ("float32", "bfloat16")
TIERS = ("base", "v3", "v4")
UNCACHED_BYTES = 96 << 20  # of K/V that the runs go through in turns
LAYERS = (2, 48)  # at least, at most
DECODE_ROUNDS = 3  # times as many for one row: its runs are short
JUDGED = 32768
OF_BANDWIDTH = 0.8
OF_SDPA = {"float32": 0.7, "bfloat16": 0.6}  # prefill
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}

COLUMNS = (
    Column("shape", text=True),
    Column("dtype", text=True),
    Column("rows"),
    Column("context", "tokens", 6),
    Column("isa", text=True),
    Column("attend_ms", "ms"),
    Column("spread", "(max-min)/median", 2),
    Column("kv_gbs", "GB/s of K/V"),
    Column("gflops", "GFLOP/s"),
    Column("read_gbs", "GB/s of memory"),
    Column("of_read_bandwidth", "", 2),
    Column("sdpa_ms", "ms", optional=True),
    Column("sdpa_with_gather_ms", "ms", optional=True),
    Column("over_sdpa", "x", optional=True),
)


# Dtypes of K and of V, where they differ, by kv_dtype.
MIXED = {"k8v4": ("q8", "q4")}


@dataclass(frozen=True)
class Case:
    """q_heads/kv_heads/dim, dtype, and tokens of which the last ROWS are the queries' own."""

    shape: str
    dtype: str
    context: int

    @property
    def heads(self) -> tuple[int, int, int]:
        q_heads, kv_heads, dim = (int(part) for part in self.shape.split("/"))
        return q_heads, kv_heads, dim

    @property
    def row_bytes(self) -> int:
        """Of one token's K/V at one layer."""
        return self.layout(layers=1).token_bytes

    @property
    def row_dtype(self) -> torch.dtype:
        """Of queries, keys and values as they are given."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def layout(self, layers: int) -> Layout:
        _, kv_heads, dim = self.heads
        k_dtype, v_dtype = MIXED.get(self.dtype, (self.dtype, self.dtype))
        # As by default: what has 4 bits is rotated.
        rotated: dict[str, Any] = {
            field: True
            for field, dtype in (("k_rotated", k_dtype), ("v_rotated", v_dtype))
            if dtype == "q4"
        }
        return Layout(
            layers=layers,
            kv_heads=kv_heads,
            k_dim=dim,
            v_dim=dim,
            k_dtype=k_dtype,
            v_dtype=v_dtype,
            **rotated,
        )

    @property
    def layers(self) -> int:
        needed = -(-UNCACHED_BYTES // (self.row_bytes * self.context))
        least, most = LAYERS
        return max(least, min(most, needed))

    def tokens(self, rows: int) -> int:
        """Visible to the last of `rows` rows."""
        return self.context - ROWS + rows

    def pairs(self, rows: int) -> float:
        return rows * self.tokens(rows) - rows * (rows - 1) / 2

    def gflop(self, rows: int) -> float:
        q_heads, _, dim = self.heads
        return 4 * q_heads * dim * self.pairs(rows) * 1e-9


class Ours:
    """A sequence with its context in a pager; `attend` works through the layers in turn."""

    def __init__(self, case: Case, threads: int) -> None:
        q_heads, kv_heads, dim = case.heads
        self.case = case
        self.layout = case.layout(case.layers)
        chunks = case.context // CHUNK
        config = PagerConfig(
            pool_tokens=case.context + 4 * CHUNK,
            host_bytes=(chunks + 4) * self.layout.chunk_bytes,
            exact=False,
        )
        self.pager = Pager(self.layout, config, rows=ROWS, smaller_rows=(1,), threads=threads)
        self.sequence = self.pager.sequence()
        subjects.inject(self.sequence, self.layout, case.context - ROWS)
        generator = torch.Generator().manual_seed(1)
        dtype = case.row_dtype
        self.q = torch.randn(ROWS, q_heads, dim, generator=generator).to(dtype)
        self.k = torch.randn(ROWS, kv_heads, dim, generator=generator).to(dtype)
        self.v = torch.randn(ROWS, kv_heads, dim, generator=generator).to(dtype)
        self.scaling = dim**-0.5

    @contextmanager
    def rows(self, rows: int) -> Iterator[Callable[[], torch.Tensor]]:
        """Within one forward of `rows` rows, the call that attends at the next layer."""
        start = self.case.context - ROWS
        forward = self.pager.begin(
            [self.sequence] * rows,
            np.arange(start, start + rows),
            np.full(rows, 9, dtype=np.int32),
            np.full(rows, ROW_COMMIT, dtype=np.uint8),
        )
        layers = itertools.cycle(range(self.case.layers))
        out = torch.empty_like(self.q[:rows])

        def attend() -> torch.Tensor:
            q, k, v = self.q[:rows], self.k[:rows], self.v[:rows]
            forward.attend(next(layers), q, k, v, scaling=self.scaling, out=out)
            return out

        with forward:
            yield attend

    def gathered(self, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [1, kv_heads, tokens, dim] of each layer, the rows' own behind the context's."""
        dtype = self.case.row_dtype
        found = []
        for layer in range(self.case.layers):
            k, v = self.sequence.read_kv(layer, 0, self.case.context - ROWS)
            both = [
                torch.cat([old.to(dtype), new[:rows]]).transpose(0, 1).contiguous()[None]
                for old, new in ((k, self.k), (v, self.v))
            ]
            found.append((both[0], both[1]))
        return found

    def close(self) -> None:
        self.sequence.close()
        self.pager.close()


class Sdpa:
    """torch's attention over gathered K/V, layer after layer."""

    def __init__(self, ours: Ours, rows: int, *, repeated: bool) -> None:
        q_heads, kv_heads, _ = ours.case.heads
        self.kv = ours.gathered(rows)
        self.grouped = not repeated and q_heads != kv_heads
        if repeated:
            times = q_heads // kv_heads
            self.kv = [
                (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)) for k, v in self.kv
            ]
        self.q = ours.q[:rows].transpose(0, 1).contiguous()[None]
        self.scaling = ours.scaling
        self.mask = None
        if rows > 1:
            tokens = ours.case.tokens(rows)
            own = torch.full((rows, rows), float("-inf")).triu(1)
            mask = torch.cat([torch.zeros(rows, tokens - rows), own], 1)
            self.mask = mask.to(self.q.dtype)[None, None]
        self.layers = itertools.cycle(range(len(self.kv)))

    def __call__(self) -> torch.Tensor:
        k, v = self.kv[next(self.layers)]
        return self.attend(k, v)

    def attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.q, k, v, attn_mask=self.mask, scale=self.scaling, enable_gqa=self.grouped
        )


class GatheredSdpa:
    """The same, with the chunks of a paged cache copied together first."""

    def __init__(self, sdpa: Sdpa) -> None:
        self.sdpa = sdpa
        self.chunks = [(_in_chunks(k), _in_chunks(v), k.shape[2]) for k, v in sdpa.kv]
        count = self.chunks[0][0].shape[0]
        self.order = torch.arange(count)

    def __call__(self) -> torch.Tensor:
        k, v, tokens = self.chunks[next(self.sdpa.layers)]
        return self.sdpa.attend(self._gather(k, tokens), self._gather(v, tokens))

    def _gather(self, chunks: torch.Tensor, tokens: int) -> torch.Tensor:
        return chunks[self.order].transpose(0, 1).flatten(1, 2)[None, :, :tokens]


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] as [chunks, heads, CHUNK, dim]."""
    padding = -x.shape[2] % CHUNK
    padded = torch.nn.functional.pad(x[0], (0, 0, 0, padding))
    heads, tokens, dim = padded.shape
    return padded.view(heads, tokens // CHUNK, CHUNK, dim).transpose(0, 1).contiguous()


def determinism(ours: Ours, rows: int) -> str:
    """Raises if two runs over the layers differ; the digest of one."""

    def digest() -> str:
        with ours.rows(rows) as attend:
            return harness.digest(*(attend().clone() for _ in range(ours.case.layers)))

    harness.require_deterministic(digest, f"{ours.case}, {rows} rows")
    return digest()


def passes(call: Callable[[], object], layers: int) -> Callable[[], None]:
    """`call` once for each of so many layers."""

    def run() -> None:
        for _ in range(layers):
            call()

    return run


def per_call(timing: harness.Timing, calls: int) -> harness.Timing:
    return harness.Timing(tuple(seconds / calls for seconds in timing.runs))


def measure(
    case: Case, report: Report, threads: int, rounds: int, row_counts: tuple[int, ...]
) -> None:
    ours = Ours(case, threads)
    memory = machine.MemoryReader(threads)
    try:
        for rows in row_counts:
            determinism(ours, rows)
            calls = case.layers if rows == 1 else 1
            grouped = Sdpa(ours, rows, repeated=False)
            forms = {"grouped": grouped}
            if grouped.grouped:
                forms["repeated"] = Sdpa(ours, rows, repeated=True)
            gathered = GatheredSdpa(grouped)
            with ours.rows(rows) as attend:
                check_close(case, attend(), grouped, rows)
                for _ in range(case.layers - 1):
                    attend()  # so that both go on with the first layer
                timed: dict[str, Callable[[], object]] = {
                    "ours": attend,
                    **forms,
                    "gather": gathered,
                }
                timings = harness.interleave(
                    {
                        **{name: Subject(passes(it, calls)) for name, it in timed.items()},
                        "memory": Subject(memory),
                    },
                    runs=rounds * (DECODE_ROUNDS if rows == 1 else 1),
                    warm_up=2,
                )
            bandwidth = memory.bytes / timings["memory"].median
            timings = {name: per_call(timings[name], calls) for name in timed}
            best = min((timings[name] for name in forms), key=lambda timing: timing.median)
            add(report, case, rows, bandwidth, timings["ours"], best.median)
            report.rows[-1]["sdpa_with_gather_ms"] = timings["gather"].median * 1e3
            compare(report, case, rows, bandwidth, timings["ours"].median, best.median)
            row = report.rows[-1]
            print(
                f"{case.shape} {case.dtype} {rows} rows, {case.context} tokens: "
                f"{row['attend_ms']:.3f} ms, {row['kv_gbs']:.1f} of {row['read_gbs']:.1f} GB/s, "
                f"{row['gflops']:.0f} GFLOP/s, {row['over_sdpa']:.2f} x SDPA",
                flush=True,
            )
            del forms, grouped, gathered, timed
    finally:
        ours.close()


def check_close(case: Case, got: torch.Tensor, sdpa: Sdpa, rows: int) -> None:
    """Compares outputs of the first layer: differing ones are not timed."""
    k, v = sdpa.kv[0]
    expected = sdpa.attend(k.float(), v.float()) if case.dtype == "float32" else sdpa.attend(k, v)
    difference = (got.float() - expected[0].transpose(0, 1).float()).abs().max().item()
    if not difference <= TOLERANCE[case.dtype]:
        raise harness.MissingNumberError(
            f"{case}, {rows} rows: outputs differ from SDPA's by {difference:.3g}; "
            f"expected at most {TOLERANCE[case.dtype]}"
        )


def add(
    report: Report,
    case: Case,
    rows: int,
    bandwidth: float,
    ours: harness.Timing,
    sdpa: float | None,
    isa: str = "",
) -> None:
    rate = case.row_bytes * case.tokens(rows) / ours.median
    report.add(
        shape=case.shape,
        dtype=case.dtype,
        rows=rows,
        context=case.context,
        isa=isa or str(report.environment["isa"]),
        attend_ms=ours.median * 1e3,
        spread=ours.spread,
        kv_gbs=rate * 1e-9,
        gflops=case.gflop(rows) / ours.median,
        read_gbs=bandwidth * 1e-9,
        of_read_bandwidth=rate / bandwidth,
        sdpa_ms=harness.NOT_APPLICABLE if sdpa is None else sdpa * 1e3,
        sdpa_with_gather_ms=harness.NOT_APPLICABLE,
        over_sdpa=harness.NOT_APPLICABLE if sdpa is None else sdpa / ours.median,
    )


def compare(
    report: Report, case: Case, rows: int, bandwidth: float, ours: float, sdpa: float
) -> None:
    """The comparisons of the longest context; shorter ones are rows of the table."""
    if case.context != JUDGED:
        return
    what = f"{case.shape}, {case.dtype}, {harness.tokens_name(case.context)}"
    if rows == 1:
        rate = case.row_bytes * case.tokens(rows) / ours
        report.compare(
            f"decode attention, {what}",
            ours=rate * 1e-9,
            theirs=bandwidth * 1e-9,
            peer="memory bandwidth",
            unit="GB/s",
            aim=OF_BANDWIDTH,
        )
    report.compare(
        f"decode attention, {what}" if rows == 1 else f"{rows}-row prefill attention, {what}",
        ours=ours * 1e3,
        theirs=sdpa * 1e3,
        peer="torch SDPA",
        unit="ms",
        aim=1.0 if rows == 1 else OF_SDPA[case.dtype],
        lower_is_better=True,
    )


def worker(task: dict[str, Any]) -> None:
    """One case on the tier of this process: prints seconds and a digest for 1 row and for ROWS."""
    torch.set_num_threads(task["threads"])
    ours = Ours(Case(task["shape"], task["dtype"], task["context"]), task["threads"])
    answer: dict[str, Any] = {}
    for rows in (1, ROWS):
        answer[f"digest {rows}"] = determinism(ours, rows)
        calls = ours.case.layers if rows == 1 else 1
        with ours.rows(rows) as attend:
            timing = harness.measure(passes(attend, calls), runs=task["rounds"])
        answer[str(rows)] = per_call(timing, calls).runs
    ours.close()
    print(json.dumps(answer))


def measure_tiers(case: Case, report: Report, threads: int, rounds: int) -> None:
    """The same bits from every tier, and what each takes."""
    bandwidth = machine.memory_bandwidth(threads).read
    digests: dict[int, set[str]] = {1: set(), ROWS: set()}
    best = str(report.environment["isa"])
    tiers = TIERS[: TIERS.index(best) + 1] if best in TIERS else (best,)
    for tier in tiers:
        task = {**vars(case), "threads": threads, "rounds": rounds}
        before = os.environ.get("KVPAGER_ISA")
        os.environ["KVPAGER_ISA"] = tier
        try:
            answer = harness.run_worker(MODULE, task)
        finally:
            if before is None:
                del os.environ["KVPAGER_ISA"]
            else:
                os.environ["KVPAGER_ISA"] = before
        for rows in (1, ROWS):
            digests[rows].add(answer[f"digest {rows}"])
            add(report, case, rows, bandwidth, harness.Timing(tuple(answer[str(rows)])), None, tier)
        print(f"tier {tier}: {report.rows[-2]['attend_ms']:.3f} ms a row", flush=True)
    report.judge(
        "every instruction-set tier gives the same bits",
        all(len(found) == 1 for found in digests.values()),
        f"{', '.join(tiers)}: {sum(map(len, digests.values()))} digests of 2 forwards",
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--shapes", type=harness.parse_list, help="q_heads/kv_heads/dim, ...")
    parser.add_argument("--contexts", type=harness.parse_ints, help="tokens, multiples of 64")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    environment = harness.start(arguments)
    shapes = arguments.shapes or (FULL_SHAPES if arguments.full else SHAPES)
    contexts = arguments.contexts or (CONTEXTS[:1] if arguments.quick else CONTEXTS)
    rounds = 3 if arguments.quick else 7
    report = Report(
        harness.report_name("attention", arguments),
        "How near does attention come to the machine's memory bandwidth and arithmetic?",
        COLUMNS,
        settings={"shapes": list(shapes), "contexts": list(contexts), "rounds": rounds},
        environment=environment,
    )
    for shape, dtype, context in itertools.product(shapes, DTYPES, contexts):
        measure(Case(shape, dtype, context), report, arguments.threads, rounds, (1, ROWS))
    tiers = Case(shapes[0], "bfloat16", 2048)
    measure_tiers(tiers, report, arguments.threads, 2 if arguments.quick else 3)
    report.finish()


if __name__ == "__main__":
    main()
