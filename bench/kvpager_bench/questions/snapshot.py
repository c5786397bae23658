"""Saving, verifying and restoring a snapshot as the context grows, beside copies of its bytes.

    kvpager bench snapshot --
    kvpager bench snapshot -- --layouts shipped --contexts 4096,65536

K/V are random and injected: what a model would say of them plays no part. A snapshot is one file;
each layout and context has a process of its own, in which peers take turns with us, round by round.

Saving, to a new name: beside memcpy of the file's bytes, writing them in 1 MiB blocks with one
fsync, that with the rename and the second fsync which make a save atomic, the program dd, and
safetensors and torch.save of the same K/V with an fsync. An asynchronous save blocks the session
for the freeze alone.

Reading, from the page cache and dropped from it: verifying everything, beside reading the file
plainly; opening and restoring; and the first forward after it, a row that attends top-k at every
layer, beside loading the whole of the same K/V with safetensors (and touching it) and torch.load.
Bytes read are those the system counts for the process, not what kvpager says of itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import ROW_COMMIT, ROW_PADDING, Layout, Pager, PagerConfig, Sequence, TopK, _core
from kvpager_bench import file_peers, harness, subjects
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import Column, Report, Subject, Timing

POOL_TOKENS = 4096
CHUNKS = 32
SINKS, RECENT = 64, 256
ROWS = 64
Q_HEADS_PER_KV = 2
TAIL_TOKENS = 32  # of a context that are not sealed, so that a tail is frozen, saved and restored
LARGE_BYTES = 1 << 30  # files from here on are measured LARGE_RUNS times
LARGE_RUNS = 3
COUNTER_BYTES = 4096  # that reading the system's counters adds to them
FLAT = 2.0  # how much longer a restore may take at the longest context

SAVE_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file_mib", "MiB"),
    Column("save_gbs", "GB/s"),
    Column("write_fsync_gbs", "GB/s"),
    Column("atomic_write_gbs", "GB/s"),
    Column("memcpy_gbs", "GB/s"),
    Column("share_of_slower", "", 2),
    Column("share_by_round", "median", 2),
    Column("dd_gbs", "GB/s", optional=True),
    Column("safetensors_gbs", "GB/s"),
    Column("torch_save_gbs", "GB/s"),
    Column("save_spread", "(max-min)/median", 2),
    Column("write_spread", "(max-min)/median", 2),
    Column("freeze_ms", "ms"),
    Column("memory_mib", "MiB at most"),
)
READ_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file", text=True),
    Column("verify_gbs", "GB/s"),
    Column("read_gbs", "GB/s"),
    Column("verify_of_read", "", 2),
    Column("restore_ms", "ms"),
    Column("restore_spread", "(max-min)/median", 2),
    Column("first_forward_ms", "ms"),
    Column("restore_reads_mib", "MiB"),
    Column("first_forward_reads_mib", "MiB"),
    Column("bound_mib", "MiB"),
    Column("file_mib", "MiB"),
    Column("share_read", "%", 2),
    Column("read_file_ms", "ms"),
    Column("safetensors_load_ms", "ms"),
    Column("torch_load_ms", "ms"),
)


class Snapshot:
    """One sequence of random K/V, and a file of it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.layout = subjects.LAYOUTS[task["layout"]]
        self.tokens: int = task["context"] - TAIL_TOKENS
        self.threads: int = task["threads"]
        self.folder = Path(task["folder"])
        self.path = self.folder / "snapshot.kvsnap"
        self.plain = self.folder / "plain"

    def tensor_file(self, how: str) -> Path:
        return self.folder / how

    def pager(self, *, holds: int) -> Pager:
        """With room for `holds` tokens of K/V; the summaries of all fit always."""
        chunks = -(-self.tokens // self.layout.chunk_tokens)
        config = PagerConfig(
            pool_tokens=POOL_TOKENS,
            selection=TopK(chunks=CHUNKS, sinks=SINKS, recent=RECENT),
            host_bytes=-(-holds // self.layout.chunk_tokens) * self.layout.chunk_bytes,
            summary_bytes=chunks * self.layout.chunk_bytes // 4,
        )
        return Pager(
            self.layout, config, rows=ROWS, fingerprint={"subject": "bench"}, threads=self.threads
        )


def forward_once(sequence: Sequence, pager: Pager) -> None:
    """One row at the end attends at every layer; nothing is committed."""
    layout = pager.layout
    rows = [1] + [0] * (ROWS - 1)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(ROWS, heads, dim, generator=generator)
        for heads, dim in (
            (Q_HEADS_PER_KV * layout.kv_heads, layout.k_dim),
            (layout.kv_heads, layout.k_dim),
            (layout.kv_heads, layout.v_dim),
        )
    )
    with pager.begin(
        [sequence if row else None for row in rows],
        [sequence.length * row for row in rows],
        [9 * row for row in rows],
        [ROW_COMMIT if row else ROW_PADDING for row in rows],
    ) as forward:
        for layer in range(layout.layers):
            forward.attend(layer, q, k, v, scaling=layout.k_dim**-0.5)


# Saving


def work_save(task: dict[str, Any]) -> dict[str, Any]:
    snapshot = Snapshot(task)
    with closing(snapshot.pager(holds=snapshot.tokens + POOL_TOKENS)) as pager:
        sequence = pager.sequence()
        subjects.inject(sequence, snapshot.layout, snapshot.tokens, provenance="exact")
        reports: list[Any] = []
        memory = harness.peak_growth(lambda: reports.append(sequence.save(snapshot.path)))
        report = reports[0]
        runs = _runs(task, report.bytes_written)
        frozen: list[_core.SnapshotContent] = []
        freeze = harness.measure(
            lambda: frozen.append(sequence.freeze()), runs=4 * task["runs"], before=frozen.clear
        )
        frozen.clear()
        # The peers' bytes are the file's own, their tensors its payload.
        data = np.fromfile(snapshot.path, dtype=np.uint8)
        tensors = _payload_tensors(snapshot.layout, data, report.chunks)
        seconds = harness.interleave(
            {
                "save": Subject(
                    lambda: sequence.save(snapshot.path),
                    lambda: file_peers.remove(snapshot.path),
                ),
                "write_fsync": Subject(
                    lambda: file_peers.write_synced(snapshot.plain, data),
                    lambda: file_peers.remove(snapshot.plain),
                ),
                "atomic": Subject(
                    lambda: file_peers.write_atomic(snapshot.plain, data),
                    lambda: file_peers.remove(snapshot.plain),
                ),
                "memcpy": Subject(file_peers.Copy(data)),
                **{
                    how: _save_peer(tensors, snapshot.tensor_file(how), how) for how in TENSOR_FILES
                },
                **_dd_peer(snapshot),
            },
            runs=runs,
        )
    file_peers.remove(snapshot.plain)
    return {
        "file_bytes": report.bytes_written,
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "runs": {name: timing.runs for name, timing in seconds.items()},
        "freeze": freeze.runs,
        "memory_bytes": memory,
    }


def _payload_tensors(
    layout: Layout, data: file_peers.Bytes, chunks: int
) -> dict[str, torch.Tensor]:
    """The payload as a K and a V tensor per layer, in the layout's dtype: a view."""
    start = 4096  # see docs/snapshot_format.md
    payload = torch.from_numpy(data[start : start + chunks * layout.chunk_bytes])
    parts = payload.view(getattr(torch, layout.k_dtype)).view(2 * layout.layers, -1)
    return {f"{'kv'[i % 2]}{i // 2}": part for i, part in enumerate(parts)}


def _save_peer(tensors: dict[str, torch.Tensor], path: Path, how: str) -> Subject:
    return Subject(
        partial(file_peers.save_tensors_synced, tensors, path, how),
        partial(file_peers.remove, path),
    )


def _dd_peer(snapshot: Snapshot) -> dict[str, Subject]:
    if not file_peers.has_dd():
        return {}
    source = snapshot.folder / "source"
    shutil.copyfile(snapshot.path, source)

    def before() -> None:
        file_peers.remove(snapshot.plain)
        file_peers.prepare(source, "cached")

    return {"dd": Subject(lambda: file_peers.dd(source, snapshot.plain), before)}


def add_save(report: Report, task: dict[str, Any], saved: dict[str, Any]) -> None:
    timings = {name: Timing(tuple(runs)) for name, runs in saved["runs"].items()}
    size = dict.fromkeys(TENSOR_FILES, saved["tensor_bytes"])
    rate = {
        name: size.get(name, saved["file_bytes"]) / timing.median / 1e9
        for name, timing in timings.items()
    }
    by_round = [
        max(memcpy, written) / ours
        for ours, memcpy, written in zip(
            *(timings[name].runs for name in ("save", "memcpy", "write_fsync"))
        )
    ]
    report.add(
        layout=task["layout"],
        context=task["context"],
        file_mib=saved["file_bytes"] / 2**20,
        save_gbs=rate["save"],
        write_fsync_gbs=rate["write_fsync"],
        atomic_write_gbs=rate["atomic"],
        memcpy_gbs=rate["memcpy"],
        share_of_slower=rate["save"] / min(rate["memcpy"], rate["write_fsync"]),
        share_by_round=statistics.median(by_round),
        dd_gbs=rate.get("dd", harness.NOT_APPLICABLE),
        safetensors_gbs=rate["safetensors"],
        torch_save_gbs=rate["torch.save"],
        save_spread=timings["save"].spread,
        write_spread=timings["write_fsync"].spread,
        freeze_ms=Timing(tuple(saved["freeze"])).median * 1e3,
        memory_mib=saved["memory_bytes"] / 2**20,
    )


# Reading


class Restore:
    """Open, restore and a first forward in a new pager, timed and counted apart."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.restore_s: list[float] = []
        self.forward_s: list[float] = []
        self.restore_bytes: set[int] = set()
        self.forward_bytes: set[int] = set()
        self.counted_bytes: set[int] = set()

    def __call__(self, state: str) -> None:
        path = self.snapshot.path
        file_peers.prepare(path, state)
        with closing(self.snapshot.pager(holds=0)) as pager:
            at_start = harness.bytes_read()
            start = time.perf_counter()
            opened = pager.open_snapshot(path)
            sequence = pager.restore(opened)
            restored = time.perf_counter()
            after_restore = harness.bytes_read()
            before_forward = time.perf_counter()
            forward_once(sequence, pager)
            end = time.perf_counter()
            after_forward = harness.bytes_read()
            self.counted_bytes.add(opened.reader.payload_bytes_read)
        self.restore_s.append(restored - start)
        self.forward_s.append(restored - start + end - before_forward)
        self.restore_bytes.add(after_restore - at_start)
        self.forward_bytes.add(after_forward - at_start)

    def to_json(self) -> dict[str, Any]:
        # The counter is read from a file itself, which adds some hundred bytes that vary.
        if len(self.counted_bytes) != 1:
            raise harness.NondeterministicSubjectError(
                f"payload bytes read vary: {sorted(self.counted_bytes)}"
            )
        return {
            "restore": self.restore_s,
            "first_forward": self.forward_s,
            "restore_bytes": max(self.restore_bytes),
            "forward_bytes": max(self.forward_bytes),
        }


def bytes_bound(snapshot: Snapshot, file_bytes: int) -> int:
    """What open, restore and a forward of one row may read at most.

    All but the sealed chunks' payload is read once; then the sinks, the recent window and what the
    kv heads of all layers select, which with random keys is seldom the same.
    """
    layout = snapshot.layout
    sealed = snapshot.tokens // layout.chunk_tokens
    fixed = SINKS // layout.chunk_tokens + -(-RECENT // layout.chunk_tokens) + 1
    selected = min(sealed, layout.layers * layout.kv_heads * CHUNKS + fixed)
    return file_bytes - (sealed - selected) * layout.chunk_bytes + COUNTER_BYTES


def work_read(task: dict[str, Any]) -> dict[str, Any]:
    snapshot = Snapshot(task)
    path = snapshot.path
    file_bytes = path.stat().st_size
    runs = _runs(task, file_bytes)
    answer: dict[str, Any] = {}
    for state in FILE_STATES:
        subjects_of_state = {
            "verify": Subject(
                lambda: _verify(path, snapshot.threads), partial(file_peers.prepare, path, state)
            ),
            "read": Subject(
                lambda: file_peers.read_file(path), partial(file_peers.prepare, path, state)
            ),
        }
        for how in TENSOR_FILES:
            file = snapshot.tensor_file(how)
            subjects_of_state[how] = Subject(
                partial(file_peers.load_tensors_whole, file, how),
                partial(file_peers.prepare, file, state),
            )
        restore = Restore(snapshot)
        restore(state)
        restore = Restore(snapshot)  # what came before was the warm-up
        subjects_of_state["restore"] = Subject(partial(restore, state))
        seconds = harness.interleave(subjects_of_state, runs=runs)
        del seconds["restore"]  # it prepares, and times its own parts
        answer[state] = {
            **{name: timing.runs for name, timing in seconds.items()},
            **restore.to_json(),
        }
    return {"file_bytes": file_bytes, "bound": bytes_bound(snapshot, file_bytes), **answer}


WORKERS = {"save": work_save, "read": work_read}


def _verify(path: Path, threads: int) -> None:
    damage = _core.SnapshotReader.open(str(path)).verify(threads)
    if damage:
        raise harness.MissingNumberError(f"{path.name} is damaged: {damage[0]}")


def add_read(report: Report, task: dict[str, Any], answer: dict[str, Any]) -> None:
    size = answer["file_bytes"]
    for state in FILE_STATES:
        measured = answer[state]
        median = {
            name: Timing(tuple(measured[name])).median
            for name in ("verify", "read", "restore", "first_forward", *TENSOR_FILES)
        }
        report.add(
            layout=task["layout"],
            context=task["context"],
            file=state,
            verify_gbs=size / median["verify"] / 1e9,
            read_gbs=size / median["read"] / 1e9,
            verify_of_read=median["read"] / median["verify"],
            restore_ms=median["restore"] * 1e3,
            restore_spread=Timing(tuple(measured["restore"])).spread,
            first_forward_ms=median["first_forward"] * 1e3,
            restore_reads_mib=measured["restore_bytes"] / 2**20,
            first_forward_reads_mib=measured["forward_bytes"] / 2**20,
            bound_mib=answer["bound"] / 2**20,
            file_mib=size / 2**20,
            share_read=100 * measured["forward_bytes"] / size,
            read_file_ms=median["read"] * 1e3,
            safetensors_load_ms=median["safetensors"] * 1e3,
            torch_load_ms=median["torch.save"] * 1e3,
        )


def judge(saves: Report, reads: Report) -> None:
    for layout in dict.fromkeys(str(row["layout"]) for row in saves.rows):
        shares = {
            harness.tokens_name(int(saves.number(row, "context"))): saves.number(
                row, "share_by_round"
            )
            for row in saves.rows
            if row["layout"] == layout
        }
        saves.judge(
            f"{layout}: a save runs at 0.9 of the slower of memcpy and write + fsync, "
            "round by round",
            min(shares.values()) >= 0.9,
            ", ".join(f"{context} {share:.2f}" for context, share in shares.items()),
        )
        for state in FILE_STATES:
            rows = [r for r in reads.rows if (r["layout"], r["file"]) == (layout, state)]
            low, high = (
                choose(rows, key=lambda row: reads.number(row, "context")) for choose in (min, max)
            )
            grown = reads.number(high, "restore_ms") / reads.number(low, "restore_ms")
            whole = reads.number(high, "read_file_ms") / reads.number(low, "read_file_ms")
            names = [harness.tokens_name(int(reads.number(row, "context"))) for row in (low, high)]
            reads.judge(
                f"{layout}, {state} file: open and restore at {names[1]} take at most {FLAT:g} "
                f"times as long as at {names[0]}",
                grown <= FLAT,
                f"{grown:.1f} times; reading the whole file takes {whole:.1f} times as long",
            )
    over = [
        row
        for row in reads.rows
        if reads.number(row, "first_forward_reads_mib") > reads.number(row, "bound_mib")
    ]
    most = max(reads.rows, key=lambda row: reads.number(row, "context"))
    reads.judge(
        "restore and first forward read no more than metadata, summaries and selected chunks",
        not over,
        f"{reads.number(most, 'first_forward_reads_mib'):.1f} of "
        f"{reads.number(most, 'file_mib'):.1f} MiB at the longest context",
    )


def measure_cell(task: dict[str, Any], saves: Report, reads: Report) -> None:
    try:
        add_save(saves, task, harness.run_worker(__spec__.name, {"what": "save", **task}))
        add_read(reads, task, harness.run_worker(__spec__.name, {"what": "read", **task}))
    finally:
        for file in Path(task["folder"]).iterdir():
            file.unlink()
    print(
        f"{task['layout']}, {task['context']} tokens: save "
        f"{saves.rows[-1]['share_of_slower']:.2f} of the slower peer, restore "
        f"{reads.rows[-2]['restore_ms']:.2f} ms",
        flush=True,
    )


def _runs(task: dict[str, Any], size: int) -> int:
    return min(task["runs"], LARGE_RUNS) if size >= LARGE_BYTES else int(task["runs"])


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--layouts", type=harness.parse_list, default=list(subjects.LAYOUTS))
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--folder", type=Path, help="where snapshots go; a temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(task["threads"])
        print(json.dumps(WORKERS[task["what"]](task)))
        return
    contexts = arguments.contexts or [4096, 16384, 65536, 131072, 262144]
    if arguments.quick:
        contexts = arguments.contexts or [1024, 4096]
    arguments.runs = arguments.runs or (2 if arguments.quick else 7)
    record = harness.start(arguments)
    settings = {
        "chunks": CHUNKS,
        "pool_tokens": POOL_TOKENS,
        "tail_tokens": TAIL_TOKENS,
        "runs": arguments.runs,
        "runs_of_large_files": min(LARGE_RUNS, arguments.runs),
    }
    saves = Report(
        harness.report_name("snapshot_save", arguments),
        "Saving a snapshot, beside copying and writing the same bytes",
        SAVE_COLUMNS,
        settings,
        record,
    )
    reads = Report(
        harness.report_name("snapshot_read", arguments),
        "Verifying and restoring a snapshot, beside reading the whole of it",
        READ_COLUMNS,
        settings,
        record,
    )
    folder = Path(tempfile.mkdtemp(prefix="kvpager-bench-", dir=arguments.folder))
    try:
        for layout in arguments.layouts:
            for context in contexts:
                task = {
                    "layout": layout,
                    "context": context,
                    "threads": arguments.threads,
                    "runs": arguments.runs,
                    "folder": str(folder),
                }
                measure_cell(task, saves, reads)
    finally:
        shutil.rmtree(folder)
    judge(saves, reads)
    saves.finish()
    reads.finish()


if __name__ == "__main__":
    main()
