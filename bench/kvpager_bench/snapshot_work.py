"""The workers of the question about snapshots: saving, reading, and the peers beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Layout, Pager, PagerConfig, TopK, _core
from kvpager.pager import ROW_COMMIT, ROW_PADDING, Sequence, SnapshotInfo
from kvpager.stores import FileStore
from kvpager_bench import file_peers, harness, subjects
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import Subject

POOL_TOKENS = 4096
CHUNKS = 32
SINKS, RECENT = 64, 256
ROWS = 64
Q_HEADS_PER_KV = 2
TAIL_TOKENS = 32  # of a context that are not sealed, so that a tail is frozen, saved and restored
LARGE_BYTES = 1 << 30  # files from here on are measured LARGE_RUNS times
LARGE_RUNS = 3
KEY = bytes(32)  # of the encrypted copy
COUNTER_BYTES = 4096  # that reading the system's counters adds to them


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


def work_save(task: dict[str, Any]) -> dict[str, Any]:
    snapshot = Snapshot(task)
    with closing(snapshot.pager(holds=snapshot.tokens + POOL_TOKENS)) as pager:
        sequence = pager.sequence()
        subjects.inject(sequence, snapshot.layout, snapshot.tokens, provenance="exact")
        reports: list[Any] = []
        memory = harness.peak_growth(lambda: reports.append(sequence.save(snapshot.path)))
        report = reports[0]
        runs = runs_of(task, report.bytes_written)
        frozen: list[_core.SnapshotContent] = []
        freeze = harness.measure(
            lambda: frozen.append(sequence.freeze()), runs=4 * task["runs"], before=frozen.clear
        )
        frozen.clear()
        # The peers' bytes are the file's own, their tensors its payload.
        data = np.fromfile(snapshot.path, dtype=np.uint8)
        tensors = _payload_tensors(snapshot.layout, data, report.chunks)
        plain = {
            "write_fsync": file_peers.write_synced,
            "reserved": file_peers.write_reserved,
        }
        turns = {
            "save": fresh(snapshot.path, lambda: sequence.save(snapshot.path)),
            "memcpy": Subject(file_peers.Copy(data)),
        }
        for name, write in plain.items():
            turns[name] = fresh(snapshot.plain, partial(write, snapshot.plain, data))
        for how in TENSOR_FILES:
            file = snapshot.tensor_file(how)
            turns[how] = fresh(file, partial(file_peers.save_tensors_synced, tensors, file, how))
        seconds = harness.interleave(turns, runs=runs)
    snapshot.plain.unlink()
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


def fresh(path: Path, call: Callable[[], object]) -> Subject:
    """Of a file that is not there before a run: overwriting is another thing."""
    return Subject(call, partial(path.unlink, missing_ok=True))


class Restore:
    """Open, restore and a first forward in a new pager, timed and counted apart."""

    def __init__(self, snapshot: Snapshot, path: Path) -> None:
        self.snapshot = snapshot
        self.path = path
        self.restore_s: list[float] = []
        self.forward_s: list[float] = []
        self.restore_bytes: set[int] = set()
        self.forward_bytes: set[int] = set()
        self.counted_bytes: set[int] = set()

    def __call__(self, state: str) -> None:
        path = self.path
        file_peers.prepare(path, state)
        with closing(self.snapshot.pager(holds=0)) as pager:
            at_start = harness.bytes_read()
            start = time.perf_counter()
            opened = SnapshotInfo.of(FileStore(key=KEY).open(str(path)))
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
    runs = runs_of(task, file_bytes)
    answer: dict[str, Any] = {}
    copy = file_peers.Copy(np.fromfile(path, dtype=np.uint8))
    encrypted = snapshot.folder / "encrypted.kvsnap"
    plain = FileStore().open(str(path))
    FileStore(key=KEY).save(
        str(encrypted), plain, fingerprint=plain.fingerprint, session=plain.session
    )
    for state in FILE_STATES:
        subjects_of_state = {
            "verify": Subject(
                lambda: _verify(path, snapshot.threads), partial(file_peers.prepare, path, state)
            ),
            "read": Subject(
                lambda: file_peers.read_file(path), partial(file_peers.prepare, path, state)
            ),
            "memcpy": Subject(copy),
            "verify_encrypted": Subject(
                lambda: _verify(encrypted, snapshot.threads),
                partial(file_peers.prepare, encrypted, state),
            ),
        }
        for how in TENSOR_FILES:
            file = snapshot.tensor_file(how)
            subjects_of_state[how] = Subject(
                partial(file_peers.load_tensors_whole, file, how),
                partial(file_peers.prepare, file, state),
            )
        restores = {}
        for name, file in (("restore", path), ("restore_encrypted", encrypted)):
            Restore(snapshot, file)(state)  # a warm-up
            restores[name] = Restore(snapshot, file)
            subjects_of_state[name] = Subject(partial(restores[name], state))
        seconds = harness.interleave(subjects_of_state, runs=runs)
        for name in restores:
            del seconds[name]  # it prepares, and times its own parts
        answer[state] = {
            **{name: timing.runs for name, timing in seconds.items()},
            **restores["restore"].to_json(),
            "encrypted": restores["restore_encrypted"].to_json(),
        }
    return {"file_bytes": file_bytes, "bound": bytes_bound(snapshot, file_bytes), **answer}


def _verify(path: Path, threads: int) -> None:
    damage = FileStore(key=KEY).open(str(path)).verify(threads)
    if damage:
        raise harness.MissingNumberError(f"{path.name} is damaged: {damage[0]}")


def runs_of(task: dict[str, Any], size: int) -> int:
    return min(task["runs"], LARGE_RUNS) if size >= LARGE_BYTES else int(task["runs"])
