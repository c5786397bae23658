"""The allocation trace, the reference that keeps its books, and our replay of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("kvpager_bench")

from kvpager import Engine, InvalidArgumentError, PagerConfig
from kvpager_bench import subjects
from kvpager_bench.allocation_trace import Kind, ReferencePool, Shape, Trace, make_trace
from kvpager_bench.harness import Report
from kvpager_bench.questions import bookkeeping

SMALL = Shape(pool_chunks=512, operations=6000, seed=3, templates=24, template_chunks=(4, 24))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(SMALL)


def test_a_trace_is_a_function_of_its_shape(trace: Trace) -> None:
    again = make_trace(SMALL)
    assert again.events.tobytes() == trace.events.tobytes()
    assert again.tokens.tobytes() == trace.tokens.tobytes()
    other = make_trace(replace(SMALL, seed=4))
    assert other.events.tobytes() != trace.events.tobytes()


def test_a_trace_has_everything_that_it_is_about(trace: Trace) -> None:
    assert set(trace.events[:, 0].tolist()) == {int(kind) for kind in Kind}
    counts = trace.operations
    assert min(counts.found, counts.taken, counts.sealed, counts.released, counts.forgotten) > 100
    assert counts.total >= SMALL.operations
    # All that was shared or taken is released in the end.
    assert counts.found + counts.taken == counts.released
    # A conversation is found again, and some of it not.
    arrivals = trace.events[:, 0] == Kind.ARRIVE
    shares = trace.found[arrivals] / trace.events[arrivals, 4]
    assert (shares > 0).any()
    assert (shares == 0).any()


def test_no_prompt_ends_with_a_chunk(trace: Trace) -> None:
    arrivals = trace.events[trace.events[:, 0] == Kind.ARRIVE]
    assert (arrivals[:, 4] % SMALL.chunk_tokens != 0).all()


def test_every_session_ends_once_and_grows_only_in_between(trace: Trace) -> None:
    running: set[int] = set()
    for kind, _, session, _, _, parent in trace.events.tolist():
        if kind in (Kind.ARRIVE, Kind.FORK):
            assert session not in running
            assert kind == Kind.ARRIVE or parent in running
            running.add(session)
        else:
            assert session in running
            if kind == Kind.FINISH:
                running.remove(session)
    assert not running


def test_the_reference_never_holds_more_than_its_pool() -> None:
    pool = ReferencePool(pool_chunks=4, chunk_tokens=2)

    def ids(*tokens: int) -> bytes:
        return np.array(tokens, dtype=np.int32).tobytes()

    assert pool.arrive(0, ids(1, 2, 3, 4, 5)) == 0
    assert pool.in_use == 3
    pool.finish(0)
    assert (pool.in_use, len(pool.cached)) == (0, 2)
    assert pool.arrive(1, ids(1, 2, 9, 9, 9)) == 2  # shares a chunk, takes two more
    assert pool.counts.forgotten == 0
    pool.grow(1, ids(9, 9))  # needs the room of (3, 4), the only one nobody uses
    assert pool.counts.forgotten == 1
    pool.finish(1)
    assert pool.arrive(2, ids(1, 2, 3, 4, 5)) == 2  # (3, 4) is gone


def test_the_reference_forgets_the_end_of_a_chain_first() -> None:
    pool = ReferencePool(pool_chunks=3, chunk_tokens=1)
    pool.arrive(0, np.array([1, 2, 3], dtype=np.int32).tobytes())
    pool.finish(0)
    pool.arrive(1, np.array([7], dtype=np.int32).tobytes())
    pool.finish(1)
    assert pool.arrive(2, np.array([1, 2, 3], dtype=np.int32).tobytes()) == 2


def test_our_replay_finds_and_forgets_what_the_reference_does(trace: Trace) -> None:
    pager = bookkeeping.trace_pager(SMALL)
    replay = bookkeeping.Replay(trace, pager)
    replay.run()
    pager.core.check_invariants()
    stats = pager.stats()
    bookkeeping.require_same_work("kvpager", trace, replay.found.tolist(), stats["cached_records"])
    assert stats["chunks_forgotten"] == trace.operations.forgotten
    assert stats["chunks_sealed"] == trace.operations.sealed
    assert stats["chunks_shared"] == 0
    assert stats["sequences"] == 0
    assert all(seconds > 0 for seconds in replay.seconds.values())


def test_work_that_differs_is_no_comparison(trace: Trace) -> None:
    kept = trace.operations.sealed - trace.operations.forgotten
    found = trace.found.tolist()
    bookkeeping.require_same_work("same", trace, found, kept)
    found[int(np.flatnonzero(trace.found)[0])] += SMALL.chunk_tokens
    with pytest.raises(RuntimeError, match=r"1 of .* events found other tokens"):
        bookkeeping.require_same_work("finds more", trace, found, kept)
    with pytest.raises(RuntimeError, match="can be found at the end"):
        bookkeeping.require_same_work("forgets less", trace, trace.found.tolist(), kept + 1)


def test_a_missing_peer_is_said_and_is_no_number(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = bookkeeping.peers.Missing("vLLM", "not installed")
    monkeypatch.setattr(bookkeeping.peers, "find", lambda name: missing)
    report = Report("bookkeeping-quick", "?", bookkeeping.COLUMNS, {}, {})
    bookkeeping.compare(report, trace, runs=1)
    assert [skipped.reason for skipped in report.skipped] == ["not installed"]
    assert not report.comparisons
    assert [row["subject"] for row in report.rows] == ["kvpager"]


def test_a_pager_without_bytes_refuses_what_needs_them(trace: Trace) -> None:
    pager = bookkeeping.trace_pager(SMALL)
    sequence = pager.sequence()
    ids = np.arange(70, dtype=np.int32)
    with (
        pager.begin(
            np.full(70, sequence.uid), np.arange(70), ids, np.zeros(70, dtype=np.uint8)
        ) as forward,
        pytest.raises(InvalidArgumentError, match="device is meta"),
    ):
        forward.write(0, np.zeros((70, 1, 16), np.float32), np.zeros((70, 1, 16), np.float32))
    assert sequence.length == 0  # the forward was aborted
    with pager.begin(
        np.full(70, sequence.uid), np.arange(70), ids, np.zeros(70, dtype=np.uint8)
    ) as forward:
        forward.replayed(pager.generation)
        forward.commit()
    assert sequence.length == 70
    with pytest.raises(InvalidArgumentError, match="device is meta"):
        sequence.read_kv(0, 0, 70)
    with pytest.raises(InvalidArgumentError, match="device is meta"):
        sequence.freeze()
    pager.core.check_invariants()
    assert pager.stats()["pool_bytes"] == 0


def test_an_engine_needs_bytes() -> None:
    model = subjects.load_model(subjects.SHIPPED)
    with pytest.raises(InvalidArgumentError, match='"meta", which has no bytes'):
        Engine(model, PagerConfig(device="meta", pool_tokens=4096))


def test_rows_may_be_named_by_an_array_of_uids() -> None:
    pager = bookkeeping.trace_pager(SMALL)
    sequence = pager.sequence()
    with pytest.raises(TypeError):
        pager.begin(np.array([0.5]), [0], [1], [0])
    uids = np.array([sequence.uid, -1])
    with pager.begin(uids, [0, 0], [5, 0], [0, 2]) as forward:
        forward.replayed(0)
        forward.commit()
    assert sequence.tokens.tolist() == [5]
