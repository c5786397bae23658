"""How near attention comes to the machine's memory bandwidth and arithmetic, beside torch SDPA.

    kvpager bench attention
    kvpager bench attention -- --shapes 16/8/128

K/V are random and injected: only time is measured. What is timed of ours is `Forward.attend` as a
model's layer calls it: the rows' K/V are checked and written, the ledger hears which chunks matter,
the chunks' addresses are found, and the rows attend over all of them where they lie. SDPA gets the
same keys and values gathered into contiguous tensors beforehand, which a paged cache would have to
do first. It is given its better form of two, grouped heads and repeated
ones, and the mask it needs.

One row is timed as a decoding step has it: a pass over all layers of one forward, peers likewise,
and a figure is that of a layer. Layers are so many that no pass finds the keys of the one before in
a cache. The memory is read by as many threads in the same turns, and what is held against it is
median against median: on a shared machine it is another one from second to second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import Layout, Pager, PagerConfig
from kvpager.pager import ROW_COMMIT
from kvpager_bench import harness, machine, subjects
from kvpager_bench.harness import Column, Report, Subject
from kvpager_bench.study import Asked, Option, Study, Table

ROWS = 64
CHUNK = 64
SHAPES = ("16/8/128", "8/2/64")
FULL_SHAPES = (*SHAPES, "32/8/128", "16/2/128")
CONTEXTS = (2048, 8192, 32768)
DTYPES = ("float32", "bfloat16")
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
    Column("attend_ms", "ms"),
    Column("spread", "(max-min)/median", 2),
    Column("kv_gbs", "GB/s of K/V"),
    Column("gflops", "GFLOP/s"),
    Column("read_gbs", "GB/s of memory"),
    Column("of_read_bandwidth", "", 2),
    Column("sdpa_ms", "ms"),
    Column("over_sdpa", "x"),
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


def check_determinism(ours: Ours, rows: int) -> None:
    """Raises if two runs over the layers differ."""

    def digest() -> str:
        with ours.rows(rows) as attend:
            return harness.digest(*(attend().clone() for _ in range(ours.case.layers)))

    harness.require_deterministic(digest, f"{ours.case}, {rows} rows")


def passes(call: Callable[[], object], layers: int) -> Callable[[], None]:
    """`call` once for each of so many layers."""

    def run() -> None:
        for _ in range(layers):
            call()

    return run


def measure_case(asked: Asked, case: Case) -> None:
    """One row and many, ours and torch's by turns."""
    ours = Ours(case, asked.threads)
    memory = machine.MemoryReader()
    rounds = asked.options.rounds
    with closing(ours):
        for rows in (1, ROWS):
            check_determinism(ours, rows)
            calls = case.layers if rows == 1 else 1
            grouped = Sdpa(ours, rows, repeated=False)
            timed: dict[str, Callable[[], object]] = {"grouped": grouped}
            if grouped.grouped:
                timed["repeated"] = Sdpa(ours, rows, repeated=True)
            forms = list(timed)
            with ours.rows(rows) as attend:
                check_close(case, attend(), grouped, rows)
                for _ in range(case.layers - 1):
                    attend()  # so that both go on with the first layer
                timed["ours"] = attend
                subjects_ = {name: Subject(passes(it, calls)) for name, it in timed.items()}
                timings = harness.interleave(
                    {**subjects_, "memory": Subject(memory)},
                    runs=rounds * (DECODE_ROUNDS if rows == 1 else 1),
                    warm_up=2,
                )
            bandwidth = memory.bytes / timings["memory"].median
            each = {name: timings[name].per(calls) for name in timed}
            sdpa = min(each[name].median for name in forms)
            add(asked.report(), case, rows, bandwidth, each["ours"], sdpa)


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
    sdpa: float,
) -> None:
    """A row, and the comparisons of the longest context."""
    rate = case.row_bytes * case.tokens(rows) / ours.median
    report.add(
        shape=case.shape,
        dtype=case.dtype,
        rows=rows,
        context=case.context,
        attend_ms=ours.median * 1e3,
        spread=ours.spread,
        kv_gbs=rate * 1e-9,
        gflops=case.gflop(rows) / ours.median,
        read_gbs=bandwidth * 1e-9,
        of_read_bandwidth=rate / bandwidth,
        sdpa_ms=sdpa * 1e3,
        over_sdpa=sdpa / ours.median,
    )
    if case.context != JUDGED:
        return
    what = f"{case.shape}, {case.dtype}, {harness.tokens_name(case.context)}"
    if rows == 1:
        figure, aim = f"decode attention, {what}", 1.0
        peer = "memory bandwidth"
        report.compare(figure, rate * 1e-9, bandwidth * 1e-9, peer, "GB/s", OF_BANDWIDTH)
    else:
        figure, aim = f"{rows}-row prefill attention, {what}", OF_SDPA[case.dtype]
    milliseconds = ours.median * 1e3, sdpa * 1e3
    report.compare(figure, *milliseconds, "torch SDPA", "ms", aim, lower_is_better=True)


def measure(asked: Asked) -> None:
    o = asked.options
    for shape, dtype, context in itertools.product(o.shapes, DTYPES, o.contexts):
        measure_case(asked, Case(shape, dtype, context))


STUDY = Study(
    measure,
    (Table("attention", "How near does attention come to the machine's limits?", COLUMNS),),
    (
        Option("shapes", SHAPES, full=FULL_SHAPES, help="q_heads/kv_heads/dim, ..."),
        Option("contexts", CONTEXTS, quick=CONTEXTS[:1], help="tokens, multiples of 64"),
        Option("rounds", 7, quick=3),
    ),
)

if __name__ == "__main__":
    STUDY.main()
