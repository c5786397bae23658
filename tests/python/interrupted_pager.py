"""Calls of the lower level that are interrupted, and what must hold after each interrupt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interrupts import Tried, at_every_instant, open_files
from kvpager.config import Dense, PagerConfig
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, ROW_PADDING, Layout, Pager, Sequence

C, M, DIM = 16, 16, 16
LAYOUT = Layout(1, 1, DIM, DIM, chunk_tokens=C)
RANDOM = np.random.default_rng(3)
LENGTH = 3 * C + 5
TOKENS = RANDOM.integers(0, 1000, LENGTH + M, dtype=np.int32)
K, V = RANDOM.standard_normal((2, 1, LENGTH + M, 1, DIM), dtype=np.float32)
Q = RANDOM.standard_normal((M, 1, DIM), dtype=np.float32)


def make() -> Pager:
    config = PagerConfig(
        8 * C, chunk_tokens=C, selection=Dense(), host_bytes=64 * LAYOUT.chunk_bytes
    )
    return Pager(LAYOUT, config, rows=M, threads=1)


@dataclass
class Subject:
    """A pager with one text, and what has to be the same after an interrupt."""

    pager: Pager
    sequence: Sequence
    folder: Path
    files: set[str]
    made: Any = None

    def forward(self) -> np.ndarray:
        """M rows after the text; returns what the first of them attended to."""
        at = self.sequence.length
        tokens = TOKENS[at : at + M]
        with self.pager.begin_spans([(self.sequence, at, M, ROW_COMMIT)], tokens) as forward:
            rows = slice(at, at + M)
            out = forward.attend(0, Q, K[0, rows], V[0, rows], scaling=1.0)
            forward.commit()
        return out[0]


def expected_row() -> bytes:
    """What a row after the text attends to, in a pager that nobody has interrupted."""
    pager = make()
    sequence = pager.sequence()
    sequence.append(TOKENS[:LENGTH], K[:, :LENGTH], V[:, :LENGTH], provenance="exact")
    subject = Subject(pager, sequence, Path(), set())
    return subject.forward().tobytes()


def rows(s: Subject) -> None:
    s.forward()


def rows_one_by_one(s: Subject) -> None:
    at = s.sequence.length
    sequences = [s.sequence] * 3 + [None] * (M - 3)
    kinds = [ROW_COMMIT] * 3 + [ROW_PADDING] * (M - 3)
    positions = [*range(at, at + 3), *[0] * (M - 3)]
    with s.pager.begin(sequences, positions, TOKENS[at : at + M], kinds) as forward:
        part = slice(at, at + M)
        forward.attend(0, Q, K[0, part], V[0, part], scaling=1.0)
        forward.commit({s.sequence: 2})


def given_rows(s: Subject) -> None:
    at = s.sequence.length
    part = slice(at, at + 4)
    spans = [(s.sequence, at, 4, ROW_GIVEN)]
    with s.pager.begin_spans(spans, (), given=TOKENS[part], dense=True) as forward:
        forward.give(K[:, part], V[:, part])
        forward.commit()


def a_forward_without_with(s: Subject) -> None:
    at = s.sequence.length
    forward = s.pager.begin_spans([(s.sequence, at, M, ROW_COMMIT)], TOKENS[at : at + M])
    try:
        part = slice(at, at + M)
        forward.attend(0, Q, K[0, part], V[0, part], scaling=1.0)
        forward.commit()
    finally:
        forward.abort()


def append(s: Subject) -> None:
    part = slice(s.sequence.length, s.sequence.length + 7)
    s.sequence.append(TOKENS[part], K[:, part], V[:, part])


def new_sequence(s: Subject) -> None:
    s.made = s.pager.sequence()
    s.made.adopt_prefix(TOKENS[:LENGTH])


def fork(s: Subject) -> None:
    s.made = s.sequence.fork()
    s.made.trim(C + 3)


def fork_and_close(s: Subject) -> None:
    made = s.sequence.fork()
    made.close()


def pin(s: Subject) -> None:
    with s.sequence.pin(0, 2 * C):
        s.pager.evict_all()


def keep_a_pin(s: Subject) -> None:
    s.made = s.sequence.pin(0, 2 * C)
    s.made.release()


def look(s: Subject) -> None:
    s.sequence.read_kv(0, 0, LENGTH)
    s.sequence.select(0, Q[0])
    s.sequence.ledger()
    s.sequence.residency()
    s.pager.stats()


def trim(s: Subject) -> None:
    s.sequence.trim(LENGTH - 2)


def reserve(s: Subject) -> None:
    s.sequence.reserve(LENGTH + M)
    s.sequence.reserve(LENGTH)


def save(s: Subject) -> None:
    s.sequence.save(s.folder / "a.kvsnap")


def save_and_restore(s: Subject) -> None:
    s.sequence.save(s.folder / "a.kvsnap")
    s.made = s.pager.restore(s.pager.open_snapshot(s.folder / "a.kvsnap"))
    s.made.read_kv(0, 0, LENGTH)


def close(s: Subject) -> None:
    s.sequence.close()


def reset(s: Subject) -> None:
    s.pager.reset()


def another(s: Subject) -> None:
    s.made = make()


OPERATIONS = [
    rows,
    rows_one_by_one,
    given_rows,
    a_forward_without_with,
    append,
    new_sequence,
    fork,
    fork_and_close,
    pin,
    keep_a_pin,
    look,
    trim,
    reserve,
    save,
    save_and_restore,
    close,
    reset,
    another,
]


def interrupt(operate: Callable[[Subject], None], expected: bytes, folder: Path) -> Tried:
    """Interrupts a call at all of its instants, as `at_every_instant` does."""

    def prepare() -> Subject:
        files = open_files()
        pager = make()
        sequence = pager.sequence()
        sequence.append(TOKENS[:LENGTH], K[:, :LENGTH], V[:, :LENGTH], provenance="exact")
        return Subject(pager, sequence, folder, files)

    def check(s: Subject, interrupted: bool) -> None:
        if s.pager._core is None:  # within reset
            s.pager.reset()
        assert not s.pager.core.forward_running()
        s.pager.check_invariants()
        if s.sequence.closed:
            s.sequence = s.pager.sequence()
            s.sequence.append(TOKENS[:LENGTH], K[:, :LENGTH], V[:, :LENGTH], provenance="exact")
        if s.sequence.length > LENGTH:
            s.sequence.trim(LENGTH)
        if s.sequence.length < LENGTH:  # a trim that was done
            part = slice(s.sequence.length, LENGTH)
            s.sequence.append(TOKENS[part], K[:, part], V[:, part], provenance="exact")
        assert s.forward().tobytes() == expected

    def finish(s: Subject) -> None:
        s.made = None
        s.sequence.reserve(s.sequence.length)
        s.pager.evict_all()
        stats = s.pager.stats()
        assert stats["sequences"] == 1
        assert stats["pinned_blocks"] == 0
        assert stats["reserved_chunks"] == 0
        s.sequence.close()
        stats = s.pager.stats()
        assert stats["open_blocks"] == 0
        assert stats["records"] == stats["cached_records"]
        s.pager.check_invariants()
        s.pager.close()
        assert {path.name for path in folder.iterdir()} <= {"a.kvsnap"}
        assert open_files() <= s.files
        for path in folder.iterdir():
            path.unlink()

    return at_every_instant(prepare, operate, check, finish)
