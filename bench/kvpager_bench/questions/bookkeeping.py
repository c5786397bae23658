"""What a chunk operation costs beside moving its bytes: our ledger and vLLM's block pool.

    kvpager bench bookkeeping

One allocation trace (allocation_trace.py), made once, is replayed through vLLM's KVCacheManager in
its own environment and through `kvpager.Pager` from Python, as a serving stack drives either. Ours
keeps the books of a pool without lower tiers, as vLLM's is, on device "meta", where no bytes are
moved; vLLM's manager moves none either. Both have to find the same tokens in every look-up and to
forget as many chunks. Hashing of names is timed apart for vLLM and is always in ours.

A second table is ours alone: what an operation costs as the number of chunks grows.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpager import Dense, Layout, Pager, PagerConfig
from kvpager.pager import ROW_COMMIT, Sequence
from kvpager_bench import harness
from kvpager_bench.allocation_trace import Kind, Shape, Trace, make_trace
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.peers import environments as peers
from kvpager_bench.places import scratch_folder

ROWS = 4096  # of a forward, at most
HASHES = {"xxhash": "its fastest", "sha256": "its default"}
AIM = 10.0
SCRIPT = "vllm_blocks"

COLUMNS = (
    Column("subject", text=True),
    Column("pool", "chunks"),
    Column("operations"),
    Column("look_up", "ns per operation"),
    Column("grow", "ns per operation"),
    Column("release", "ns per operation"),
    Column("hash", "ns per operation", optional=True),
    Column("total", "ns per operation"),
    Column("slowest", "ns per operation"),
)


def trace_pager(shape: Shape) -> Pager:
    """A pager whose pool is the trace's, with nothing below it and no bytes in it."""
    config = PagerConfig(
        pool_tokens=shape.pool_chunks * shape.chunk_tokens,
        chunk_tokens=shape.chunk_tokens,
        selection=Dense(),
        host_bytes=0,
        policy="lru",
    )
    layout = Layout(1, 1, 16, 16, chunk_tokens=shape.chunk_tokens)
    return Pager(layout, config, rows=ROWS, smaller_rows=range(1, ROWS), threads=1, device="meta")


class Replay:
    """Drives a pager through a trace. `seconds`: of look-ups, growth and releases."""

    def __init__(self, trace: Trace, pager: Pager) -> None:
        self.trace = trace
        self.pager = pager
        self.seconds = dict.fromkeys(("look_up", "grow", "release"), 0.0)
        self.found = np.zeros(len(trace.events), dtype=np.int64)
        self._held: dict[int, Sequence] = {}
        self._lengths: dict[int, int] = {}

    def run(self) -> None:
        rows = self.trace.events.tolist()
        at = 0
        while at < len(rows):
            kind, step, session, first, count, parent = rows[at]
            if kind == Kind.GROW:
                last = at
                while last < len(rows) and rows[last][0] == Kind.GROW and rows[last][1] == step:
                    last += 1
                self._grow(rows[at:last])
                at = last
                continue
            if kind == Kind.ARRIVE:
                self._arrive(at, session, self.trace.tokens[first : first + count])
            elif kind == Kind.FORK:
                self._fork(at, session, parent)
            else:
                self._finish(session)
            at += 1

    def _arrive(self, at: int, session: int, prompt: np.ndarray[Any, Any]) -> None:
        start = time.perf_counter()
        sequence = self.pager.sequence()
        found = sequence.adopt_prefix(prompt)
        looked = time.perf_counter()
        for first in range(found, len(prompt), ROWS):
            part = prompt[first : first + ROWS]
            self._forward([(sequence, first, len(part), ROW_COMMIT)], part)
        self.seconds["grow"] += time.perf_counter() - looked
        self.seconds["look_up"] += looked - start
        self._held[session], self._lengths[session] = sequence, len(prompt)
        self.found[at] = found

    def _grow(self, events: list[list[int]]) -> None:
        """All sessions of a step, in as few forwards as hold them."""
        each = events[0][4]
        most = ROWS // each
        for begin in range(0, len(events), most):
            part = events[begin : begin + most]
            tokens = self.trace.tokens[part[0][3] : part[-1][3] + each]
            start = time.perf_counter()
            sessions = [event[2] for event in part]
            spans = [(self._held[s], self._lengths[s], each, ROW_COMMIT) for s in sessions]
            self._forward(spans, tokens)
            self.seconds["grow"] += time.perf_counter() - start
            for event in part:
                self._lengths[event[2]] += each

    def _forward(
        self, spans: list[tuple[Sequence, int, int, int]], tokens: np.ndarray[Any, Any]
    ) -> None:
        with self.pager.begin_spans(spans, tokens) as forward:
            forward.replayed(0)  # instead of attention at every layer
            forward.commit()

    def _fork(self, at: int, session: int, parent: int) -> None:
        start = time.perf_counter()
        child = self._held[parent].fork()
        self.seconds["look_up"] += time.perf_counter() - start
        self._held[session], self._lengths[session] = child, self._lengths[parent]
        chunk = self.trace.shape.chunk_tokens
        self.found[at] = self._lengths[parent] // chunk * chunk

    def _finish(self, session: int) -> None:
        sequence = self._held.pop(session)
        start = time.perf_counter()
        sequence.close()
        self.seconds["release"] += time.perf_counter() - start


def replay_ours(trace: Trace, runs: int) -> list[dict[str, float]]:
    """Seconds by kind of each run, after one that is not counted; checks what was found."""
    seconds = []
    for run in range(runs + 1):
        replay = Replay(trace, trace_pager(trace.shape))
        gc.collect()
        gc.disable()
        replay.run()
        gc.enable()
        if run:
            seconds.append(replay.seconds)
        stats = replay.pager.stats()
        require_same_work("kvpager", trace, replay.found.tolist(), int(stats["cached_records"]))
        if stats["chunks_forgotten"] != trace.operations.forgotten:
            raise RuntimeError(
                f"kvpager forgot {stats['chunks_forgotten']} chunks, "
                f"the reference {trace.operations.forgotten}"
            )
    return seconds


def require_same_work(who: str, trace: Trace, found: list[int], cached: int) -> None:
    """Every look-up found what it should, and as many chunks can be found at the end."""
    wrong = [
        i for i, (ours, theirs) in enumerate(zip(found, trace.found.tolist())) if ours != theirs
    ]
    if wrong or len(found) != len(trace.found):
        raise RuntimeError(
            f"{who}: {len(wrong)} of {len(trace.found)} events found other tokens than the "
            f"reference, first event {wrong[:1]}"
        )
    kept = trace.operations.sealed - trace.operations.forgotten
    if cached != kept:
        raise RuntimeError(f"{who}: {cached} chunks can be found at the end, expected {kept}")


def hash_seconds(trace: Trace) -> float:
    """The time to name the chunks of the trace: a part of our figures, measured alone."""
    pager = trace_pager(trace.shape)
    arrivals = [
        trace.tokens[first : first + count]
        for kind, _, _, first, count, _ in trace.events.tolist()
        if kind in (Kind.ARRIVE, Kind.GROW)
    ]
    joined = np.concatenate(arrivals)
    return min(_timed(lambda: pager.chain_hashes(joined)) for _ in range(3))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def add_ours(report: Report, trace: Trace, runs: list[dict[str, float]], hashing: float) -> float:
    """Adds a row; returns the median nanoseconds per operation."""
    scale = 1e9 / trace.operations.total
    totals = [sum(run.values()) * scale for run in runs]
    median = sorted(runs, key=lambda run: sum(run.values()))[len(runs) // 2]
    report.add(
        subject="kvpager",
        pool=trace.shape.pool_chunks,
        operations=trace.operations.total,
        look_up=median["look_up"] * scale,
        grow=median["grow"] * scale,
        release=median["release"] * scale,
        hash=hashing * scale,
        total=float(np.median(totals)),
        slowest=max(totals),
    )
    return float(np.median(totals))


def add_vllm(report: Report, trace: Trace, answer: dict[str, Any], how: str) -> dict[str, float]:
    """Adds a row of the run with the median total; returns its nanoseconds per operation."""
    scale = 1e9 / trace.operations.total
    totals = [sum(run.values()) * scale for run in answer["runs"]]
    median = sorted(answer["runs"], key=lambda run: sum(run.values()))[len(totals) // 2]
    report.add(
        subject=f"{peers.PEERS['vllm'].title}, {how} names",
        pool=trace.shape.pool_chunks,
        operations=trace.operations.total,
        look_up=median["look_up"] * scale,
        grow=median["allocate"] * scale,
        release=median["free"] * scale,
        hash=median["hash"] * scale,
        total=float(np.median(totals)),
        slowest=max(totals),
    )
    apart = sorted(sum(run.values()) - run["hash"] for run in answer["runs"])
    return {"with": float(np.median(totals)), "without": apart[len(apart) // 2] * scale}


def compare(report: Report, trace: Trace, runs: int) -> None:
    """The same trace through both, and the ratios."""
    ours = add_ours(report, trace, replay_ours(trace, runs), hash_seconds(trace))
    print(f"kvpager: {ours:.0f} ns per operation", flush=True)
    title = peers.PEERS["vllm"].title
    found = peers.find("vllm")
    if isinstance(found, peers.Missing):
        report.skip(title, found.reason)
        return
    with scratch_folder() as folder:
        path = folder / "trace.npz"
        trace.save(path)
        task = {"trace": str(path), "hashes": list(HASHES), "runs": runs}
        try:
            answers = peers.call("vllm", SCRIPT, task, 300)
        except peers.PeerError as error:
            report.skip(title, str(error))
            return
        for how, answer in answers.items():
            require_same_work(title, trace, answer["found"], answer["cached"])
            theirs = add_vllm(report, trace, answer, how)
            print(f"{title}, {how}: {theirs['with']:.0f} ns per operation", flush=True)
            if how == "xxhash":
                report.compare(
                    "bookkeeping of a chunk operation, names by BLAKE2b, the peer's by xxHash",
                    ours=ours,
                    theirs=theirs["with"],
                    peer=title,
                    unit="ns",
                    aim=AIM,
                    lower_is_better=True,
                )
                report.compare(
                    "bookkeeping of a chunk operation, the peer's hashing left out and ours not",
                    ours=ours,
                    theirs=theirs["without"],
                    peer=title,
                    unit="ns",
                    aim=None,
                    lower_is_better=True,
                )


def growth(report: Report, pools: list[int], runs: int, seed: int) -> None:
    """What an operation costs in a pool of 10^3 chunks, and in larger ones up to 10^6."""
    costs = {}
    for pool in pools:
        trace = make_trace(Shape(pool_chunks=pool, operations=max(4 * pool, 40_000), seed=seed))
        costs[pool] = add_ours(report, trace, replay_ours(trace, runs), hash_seconds(trace))
        print(f"pool of {pool} chunks: {costs[pool]:.0f} ns per operation", flush=True)
    least, most = min(costs.values()), max(costs.values())
    report.judge(
        "the cost of an operation does not grow with the number of chunks",
        costs[pools[-1]] <= 3 * costs[pools[0]],
        f"{least:.0f} to {most:.0f} ns from {pools[0]} to {pools[-1]} chunks",
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments: argparse.Namespace = parser.parse_args()
    record = harness.start(arguments)
    shape = Shape(pool_chunks=8192, operations=200_000, seed=arguments.seed)
    pools, runs = [1 << 10, 1 << 13, 1 << 16, 1 << 18], 5
    if arguments.quick:
        shape = Shape(pool_chunks=1024, operations=20_000, seed=arguments.seed)
        pools, runs = [1 << 10, 1 << 12], 2
    if arguments.full:
        pools.append(1 << 20)
    harness.require_deterministic(
        lambda: make_trace(Shape(1024, 4_000, arguments.seed)).events.tobytes(), "the trace"
    )
    trace = make_trace(shape)
    report = Report(
        name=harness.report_name("bookkeeping", arguments),
        question="What a chunk operation costs beside moving its bytes",
        columns=COLUMNS,
        settings={
            "pool_chunks": shape.pool_chunks,
            "chunk_tokens": shape.chunk_tokens,
            "operations": vars(trace.operations),
            "rows": ROWS,
            "runs": runs,
            "hashes": HASHES,
            "not_applicable": NOT_APPLICABLE,
        },
        environment=record,
    )
    compare(report, trace, runs)
    growth(report, pools, max(1, runs // 2), arguments.seed)
    report.finish()


if __name__ == "__main__":
    main()
