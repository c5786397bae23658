"""What attention keeps beside its budgets is in `stats`, and goes when a forward ends."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpager import _core
from kvpager.config import Dense, PagerConfig, TopK
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, Layout, Pager

HEADS, KV_HEADS, DIM, ROWS = 32, 4, 64, 2048
LAYOUT = Layout(1, KV_HEADS, DIM, DIM, chunk_tokens=64)
KEPT = 32 << 20


def resident_bytes():
    """Of the process, without what its allocator keeps of memory that was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def pager_of(selection):
    config = PagerConfig(8 * ROWS, chunk_tokens=64, selection=selection, host_bytes=0)
    return Pager(LAYOUT, config, rows=ROWS, fingerprint={"model": "test"}, threads=2)


def forward(pager, sequence, rows):
    """A forward of so many rows; returns scratch_bytes while it is under way."""
    random = np.random.default_rng(sequence.length)
    q = random.standard_normal((rows, HEADS, DIM), dtype=np.float32).astype(np.float16)
    k = random.standard_normal((rows, KV_HEADS, DIM), dtype=np.float32).astype(np.float16)
    tokens = np.arange(rows, dtype=np.int32)
    with pager.begin_spans([(sequence, sequence.length, rows, ROW_COMMIT)], tokens) as running:
        running.attend(0, q, k, k, scaling=0.125)
        scratch = pager.stats()["scratch_bytes"]
        running.commit()
    return scratch


@pytest.mark.parametrize("selection", [Dense(), TopK(chunks=8, recent=ROWS)], ids=["dense", "topk"])
def test_scratch_of_many_rows_is_told_and_given_back_when_the_forward_ends(selection):
    pager = pager_of(selection)
    sequence = pager.sequence()
    for _ in range(4):
        scratch = forward(pager, sequence, ROWS)
        assert scratch >= ROWS * HEADS * DIM * 4  # the queries in float32, whatever else
        assert scratch > KEPT
        assert pager.stats()["scratch_bytes"] <= KEPT


def test_nothing_is_kept_of_a_forward_over_the_budget():
    pager = pager_of(TopK(chunks=8, recent=ROWS))
    assert forward(pager, pager.sequence(), ROWS) > KEPT
    assert pager.stats()["scratch_bytes"] == 0


def test_chunk_tables_of_many_long_sequences_are_given_back():
    """Of each chunk that a forward may see, whatever its rows: here more than all else."""
    chunks, forks, dim = 4000, 600, 16
    layout = Layout(1, 1, dim, dim, chunk_tokens=16)
    config = PagerConfig(16 * (chunks + 2 * forks), chunk_tokens=16, host_bytes=0)
    pager = Pager(layout, config, rows=forks, fingerprint={"model": "test"}, threads=2)
    first = pager.sequence()
    count = 16 * chunks
    given = [(first, 0, count, ROW_GIVEN)]
    with pager.begin_spans(given, (), given=np.arange(count, dtype=np.int32)) as running:
        rows = np.ones((count, 1, dim), dtype=np.float16)
        running.give([rows], [rows])
        running.commit()
    sequences = [first.fork() for _ in range(forks)]
    spans = [(sequence, count, 1, ROW_COMMIT) for sequence in sequences]
    with pager.begin_spans(spans, np.zeros(forks, dtype=np.int32)):
        assert pager.stats()["scratch_bytes"] > KEPT
    assert pager.stats()["scratch_bytes"] <= KEPT


def test_scratch_of_few_rows_is_kept_for_the_next_step():
    pager = pager_of(Dense())
    sequence = pager.sequence()
    forward(pager, sequence, ROWS)
    scratch = forward(pager, sequence, 4)
    assert 0 < scratch <= KEPT
    assert pager.stats()["scratch_bytes"] == scratch


def test_scratch_of_a_forward_that_was_abandoned_is_given_back():
    pager = pager_of(Dense())
    sequence = pager.sequence()
    tokens = np.arange(ROWS, dtype=np.int32)
    q = np.ones((ROWS, HEADS, DIM), dtype=np.float16)
    with pager.begin_spans([(sequence, 0, ROWS, ROW_COMMIT)], tokens) as running:
        running.attend(0, q, q[:, :KV_HEADS], q[:, :KV_HEADS], scaling=0.125)
        assert pager.stats()["scratch_bytes"] > KEPT / 2
    assert pager.stats()["scratch_bytes"] <= KEPT


def test_what_products_keep_is_in_stats_and_bounded_for_all_threads_together():
    workers = _core.Workers(2)
    config = PagerConfig(256, chunk_tokens=64, host_bytes=0)
    pager = Pager(LAYOUT, config, rows=64, workers=workers)
    assert pager.stats()["workspace_bytes"] == 0
    x, out = torch.ones(600, 8192), torch.empty(600, 8)
    weight, chosen = torch.ones(2, 8, 8192), torch.zeros(600, dtype=torch.int64)

    def multiply():
        assert _core.linear_of_experts(workers, x, weight, None, chosen, out)

    for _ in range(2):
        threads = [threading.Thread(target=multiply) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert x.nbytes <= pager.stats()["workspace_bytes"] <= KEPT
    assert out.eq(8192).all()


def test_memory_that_no_figure_shows_is_small():
    """Of the process, beside what stats says and what the caller holds."""
    pager = pager_of(Dense())
    sequence = pager.sequence()
    forward(pager, sequence, 64)
    before = resident_bytes() - pager.stats()["resident_bytes"]
    for _ in range(4):
        forward(pager, sequence, ROWS)
    stats = pager.stats()
    unseen = resident_bytes() - stats["resident_bytes"] - stats["scratch_bytes"] - before
    assert unseen < KEPT
