"""Chunks on disk: what comes back is verified, and nothing that is being read makes room for it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from test_defects_pool import CHUNK, LAYERS, C, Text, make, resident, same_bits

from kvpager.config import Dense, TopK
from kvpager.errors import StorageError
from kvpager.pager import ROW_READ


def spill_file(folder):
    """The descriptor of the open file without a name in `folder`."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if target.startswith(str(folder)):
            return int(link.name)
    raise AssertionError(f"no open file in {folder}")


@pytest.mark.parametrize("selection", [Dense(), TopK(chunks=2, sinks=C, recent=2 * C)], ids=str)
@pytest.mark.parametrize("pool", [4, 24])  # streamed slice by slice; brought in whole
def test_a_flipped_bit_on_disk_is_named_with_its_chunk_and_layer(tmp_path, selection, pool):
    pager = make(pool, host=0, selection=selection, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    text = Text(12 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 12 * C)
    pager.evict_all()
    expected = text.probe(pager, sequence, 12 * C - 1)
    pager.evict_all()
    file = spill_file(tmp_path)
    byte = os.pread(file, 1, 5)
    os.pwrite(file, bytes([byte[0] ^ 4]), 5)
    with pytest.raises(StorageError, match=r"chunk \d+ layer 0 came back with other bytes"):
        text.probe(pager, sequence, 12 * C - 1)
    pager.check_invariants()
    assert sequence.length == 12 * C
    os.pwrite(file, byte, 5)
    assert same_bits(text.probe(pager, sequence, 12 * C - 1), expected)


def test_bytes_paged_out_are_those_that_host_memory_sent_to_disk(tmp_path):
    pager = make(6, host=4, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    text = Text(12 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 12 * C)
    pager.evict_all()
    stats = pager.stats()
    assert stats["chunks_spilled"] == 8
    assert stats["bytes_paged_out"] == 8 * CHUNK
    assert stats["disk_bytes_used"] == 8 * CHUNK


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_what_a_call_reads_is_not_evicted_for_what_else_it_reads(tmp_path, policy):
    """Eight chunks through six blocks: the missing ones would fit only in the place of others."""
    pager = make(6, 0, policy=policy, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    text = Text(8 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 8 * C)
    before, held = pager.stats(), resident(sequence)
    assert len(held) >= 4
    text.probe(pager, sequence, 8 * C - 1)
    after = pager.stats()
    assert resident(sequence) == held
    assert after["chunks_evicted"] == before["chunks_evicted"]
    assert after["slices_streamed"] - before["slices_streamed"] == (8 - len(held)) * LAYERS


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_what_one_layer_read_gives_way_to_what_the_next_reads(tmp_path, policy):
    """In one forward: what a layer brought in is held while it attends, and no longer."""
    pager = make(8, 0, policy=policy, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    text = Text(16 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 16 * C)
    pager.evict_all()
    sequence.pin(0, 5 * C).release()  # blocks that are others' when the forward begins
    at = 16 * C - 1
    row = [np.ascontiguousarray(rows[0, at : at + 1]) for rows in (text.q, text.k, text.v)]
    before = pager.stats()["chunks_evicted"]
    with pager.begin_spans([(sequence, at, 1, ROW_READ)], text.tokens[at : at + 1]) as forward:
        forward.attend(0, *row, scaling=0.25, window=6 * C)
        assert pager.stats()["chunks_evicted"] > before
        pager.check_invariants()  # who may leave is noted, those it has just read among them
        forward.attend(1, *row, scaling=0.25, window=7 * C)
        pager.check_invariants()
    sequence.pin(0, 4 * C).release()
