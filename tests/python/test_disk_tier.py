"""Chunks on disk: what comes back is verified, and nothing that is being read makes room for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from test_pager_pool import CHUNK, LAYERS, C, Text, make, resident, same_bits

from kvpager import _core, open_snapshot
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


def spilled(folder, pool=24, chunks=6):
    """A pager whose sequence is all on disk, with one byte of the file's first slot flipped."""
    pager = make(pool, host=0, disk_path=folder, disk_bytes=64 * CHUNK)
    text = Text(chunks * C + C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, chunks * C)
    whole = text.probe(pager, sequence, chunks * C - 1)
    pager.evict_all()
    file = spill_file(folder)
    os.pwrite(file, bytes([os.pread(file, 1, 5)[0] ^ 4]), 5)
    with pytest.raises(StorageError, match="other bytes"):
        text.probe(pager, sequence, chunks * C - 1)
    (damaged,) = [info.chunk for info in sequence.ledger() if info.damaged]
    return pager, text, sequence, whole, damaged


@pytest.mark.parametrize("pool", [4, 24])  # streamed slice by slice; brought in whole
def test_nobody_adopts_a_chunk_that_came_back_damaged(tmp_path, pool):
    pager, text, sequence, _, damaged = spilled(tmp_path, pool)
    other = pager.sequence()
    assert other.adopt_prefix(text.tokens[: sequence.length]) == damaged * C
    pager.check_invariants()


def test_computing_a_damaged_chunk_again_heals_it_for_all_who_use_it(tmp_path):
    pager, text, sequence, whole, _ = spilled(tmp_path)
    assert pager.stats()["chunks_healed"] == 0
    other = pager.sequence()
    other.adopt_prefix(text.tokens[: sequence.length])
    text.prefill(pager, other, sequence.length)
    pager.check_invariants()
    assert pager.stats()["chunks_healed"] == 1
    assert not any(info.damaged for info in sequence.ledger())
    pager.evict_all()  # what is read next is what was written to the file again
    last = sequence.length - 1
    assert same_bits(text.probe(pager, sequence, last), whole)
    pager.evict_all()
    assert same_bits(text.probe(pager, other, last), whole)
    third = pager.sequence()
    assert third.adopt_prefix(text.tokens[: sequence.length]) == sequence.length


def test_other_bytes_under_a_damaged_chunks_name_heal_nothing(tmp_path):
    pager, text, sequence, _, damaged = spilled(tmp_path)
    other = pager.sequence()
    while other.length < sequence.length:
        at = other.length
        text.forward(pager, other, at, C, change=lambda _, k, v: np.add(k, 1, out=k))
    assert pager.stats()["chunks_healed"] == 0
    assert sequence.ledger()[damaged].damaged
    pager.check_invariants()


def test_a_heal_that_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    pager, text, sequence, whole, damaged = spilled(tmp_path)
    other = pager.sequence()
    other.adopt_prefix(text.tokens[: sequence.length])
    start = other.length
    _core.arm_fault("disk.write", 0, errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        text.prefill(pager, other, sequence.length)
    _core.disarm_faults()
    assert other.length == start
    assert sequence.ledger()[damaged].damaged
    pager.check_invariants()
    text.prefill(pager, other, sequence.length)
    assert same_bits(text.probe(pager, sequence, sequence.length - 1), whole)


def test_a_snapshot_of_the_same_bytes_takes_the_place_of_a_damaged_chunk(tmp_path):
    sound = make(24)
    text = Text(7 * C)
    saved = sound.sequence()
    text.prefill(sound, saved, 6 * C)
    saved.save(tmp_path / "text.kvsnap")
    pager, text, sequence, whole, damaged = spilled(tmp_path)
    used = pager.stats()["disk_bytes_used"]
    pager.restore(open_snapshot(tmp_path / "text.kvsnap"))
    pager.check_invariants()
    assert not sequence.ledger()[damaged].damaged
    pager.evict_all()
    assert same_bits(text.probe(pager, sequence, sequence.length - 1), whole)
    assert pager.stats()["disk_bytes_used"] == used - CHUNK


def test_the_spill_files_room_is_taken_when_the_pager_is_made(tmp_path):
    pager = make(6, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    taken = os.fstat(spill_file(tmp_path))
    assert taken.st_blocks * 512 >= 64 * CHUNK
    pager.close()


def test_a_full_disk_is_refused_when_the_pager_is_made(tmp_path):
    _core.arm_fault("disk.reserve", 0, errno.ENOSPC)
    with pytest.raises(StorageError, match=rf"reserve {64 * CHUNK} bytes: No space left"):
        make(6, disk_path=tmp_path, disk_bytes=64 * CHUNK)
    with pytest.raises(AssertionError, match="no open file"):
        spill_file(tmp_path)


def test_more_room_than_any_disk_has_is_refused_when_the_pager_is_made(tmp_path):
    with pytest.raises(StorageError, match=r"cannot reserve \d+ bytes"):
        make(6, disk_path=tmp_path, disk_bytes=1 << 44)
