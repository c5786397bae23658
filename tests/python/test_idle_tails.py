"""Open chunks of idle sequences leave the pool where others need their blocks, and come back."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require

from kvpager import _core
from kvpager.config import PagerConfig, TopK
from kvpager.errors import CapacityError, StorageError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Layout, Pager, Sequence
from kvpager.stores import DirectoryStore

LAYERS, KV_HEADS, Q_HEADS, DIM, C, M = 2, 2, 4, 32, 16, 16
FORMATS = ["float32", "bfloat16", "float16", "q8", "q4", "k8v4"]
POOL, MANY = 6, 16  # blocks, idle sequences


@pytest.fixture(autouse=True)
def _no_fault_is_left_armed() -> Iterator[None]:
    yield
    _core.disarm_faults()


def layout_of(kind: str) -> Layout:
    k, v = ("q8", "q4") if kind == "k8v4" else (kind, kind)
    return Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C, k_dtype=k, v_dtype=v)


def make(
    layout: Layout, pool: int = POOL, host: int = 4 * MANY, device: str = "cpu", **options: object
) -> Pager:
    settings = {
        "chunk_tokens": C,
        "host_bytes": host * layout.chunk_bytes,
        "selection": TopK(chunks=2, sinks=C, recent=2 * C),
        "debug_poison": True,
        **options,
    }
    config = PagerConfig(pool * C, **settings)
    return Pager(layout, config, rows=M, threads=1, device=device, q_heads=Q_HEADS)


class Text:
    """Tokens with queries, keys and values [layers, n, heads, DIM] of each position."""

    def __init__(self, layout: Layout, seed: int, tokens: int = 8 * C) -> None:
        random = np.random.default_rng(seed)
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(layout.k_dtype)
        self.tokens = random.integers(0, 1000, tokens, dtype=np.int32)

        def drawn(heads: int) -> torch.Tensor:
            rows = random.standard_normal((LAYERS, tokens, heads, DIM), dtype=np.float32)
            return torch.from_numpy(rows).to(kind or torch.float32)

        self.q, self.k, self.v = drawn(Q_HEADS), drawn(KV_HEADS), drawn(KV_HEADS)

    def go(
        self, pager: Pager, sequence: Sequence, count: int, *, kind: int = ROW_COMMIT
    ) -> list[bytes]:
        """One forward; the bits of attention of each layer. Read rows repeat the last positions."""
        padding, start = M - count, sequence.length - (count if kind == ROW_READ else 0)
        outputs = []
        with pager.begin(
            [sequence] * count + [None] * padding,
            [*range(start, start + count), *[0] * padding],
            [*self.tokens[start : start + count].tolist(), *[0] * padding],
            [kind] * count + [ROW_PADDING] * padding,
        ) as forward:
            for layer in range(LAYERS):
                rows = []
                for source in (self.q, self.k, self.v):
                    part = source.new_zeros((M, *source.shape[2:]))
                    part[:count] = source[layer, start : start + count]
                    rows.append(part)
                out = forward.attend(layer, *rows, scaling=DIM**-0.5)
                outputs.append(out[:count].cpu().contiguous().view(torch.uint8).numpy().tobytes())
            forward.commit()
        return outputs


def bits(sequence: Sequence) -> list[bytes]:
    """Keys and values of all positions."""
    rows = [sequence.read_kv(layer, 0, sequence.length) for layer in range(LAYERS)]
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for pair in rows for part in pair]


def tiers(sequence: Sequence) -> tuple[bool, bool, bool]:
    """Of the open chunk: in the pool, on the host, on disk."""
    tail = sequence.ledger()[-1]
    assert not tail.sealed
    return tail.resident, tail.on_host, tail.on_disk


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", FORMATS)
def test_many_idle_sequences_share_a_small_pool_and_every_bit_is_as_in_a_large_one(
    kind: str, tier: str, device: str, tmp_path: Path
) -> None:
    layout, where = layout_of(kind), device if device == "cpu" else require(device)
    disk = {"disk_path": str(tmp_path), "disk_bytes": 4 * MANY * layout.chunk_bytes}
    options = disk if tier == "disk" else {}
    small = make(layout, host=2 if tier == "disk" else 4 * MANY, device=where, **options)
    large = make(layout, pool=8 * MANY, device=where)
    texts = [Text(layout, seed) for seed in range(MANY)]
    ours = [small.sequence() for _ in texts]
    theirs = [large.sequence() for _ in texts]
    for counts in ((7, 3, 5), (4, 12), (16, 2)):  # some turns begin or end in an open chunk
        for text, one, other in zip(texts, ours, theirs):
            for count in counts:
                assert text.go(small, one, count) == text.go(large, other, count)
    assert small.stats()["tails_paged_out"] > MANY
    assert large.stats()["tails_paged_out"] == 0
    out = [tiers(one) for one in ours if one.length % C and not tiers(one)[0]]
    assert len(out) >= MANY - POOL
    assert any(on_disk if tier == "disk" else on_host for _, on_host, on_disk in out)
    assert all(on_host != on_disk for _, on_host, on_disk in out)
    for text, one, other in zip(texts, ours, theirs):
        assert bits(one) == bits(other)
        assert text.go(small, one, 1, kind=ROW_READ) == text.go(large, other, 1, kind=ROW_READ)
    small.check_invariants()
    for one in ours:
        one.close()
    stats = small.stats()
    assert (stats["open_blocks"], stats["sequences"]) == (0, 0)
    small.check_invariants()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_done_with_a_sequence_needs_no_tail_in_the_pool(tier: str, tmp_path: Path) -> None:
    layout = layout_of("q8")
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 * layout.chunk_bytes}
    pager = make(layout, host=1 if tier == "disk" else 64, **(disk if tier == "disk" else {}))
    text, store = Text(layout, 1), DirectoryStore(tmp_path / "store")
    one, other = pager.sequence(), make(layout, pool=64).sequence()
    for sequence in (one, other):
        text.go(sequence.pager, sequence, 16)
        text.go(sequence.pager, sequence, 9)
    for _ in range(2):  # something is on the host already
        Text(layout, 2).go(pager, pager.sequence(), 3)

    def paged_out() -> Sequence:
        pager.evict_all()
        assert not tiers(one)[0]
        return one

    assert bits(paged_out()) == bits(other)
    assert not tiers(one)[0]  # which was read where it is
    twin = paged_out().fork()
    assert bits(twin) == bits(other)
    twin.close()
    saved = [each.freeze() for each in (paged_out(), other)]
    assert saved[0].chain_hashes == saved[1].chain_hashes
    for place, each in enumerate(saved):  # the tail's own bytes are in the file
        store.save(f"s{place}", each, fingerprint="{}", session="{}")
    digests = [entry.logical_digest for entry in store.entries()]
    assert digests[0] == digests[1]
    with paged_out().pin(20, 25):
        assert tiers(one) == (True, False, False)
        pager.evict_all()
        assert tiers(one)[0]
    for sequence in (paged_out(), other):
        sequence.trim(20)
    assert bits(paged_out()) == bits(other)
    for sequence in (paged_out(), other):
        sequence.trim(10)  # in a sealed chunk: its first rows are copied, the open one goes
    assert bits(paged_out()) == bits(other)
    assert text.go(pager, paged_out(), 12) == text.go(other.pager, other, 12)
    paged_out().close()
    pager.check_invariants()


def test_tails_of_the_running_forward_and_pinned_ones_stay_in_the_pool() -> None:
    layout = layout_of("float32")
    pager = make(layout, pool=4)
    texts = [Text(layout, seed) for seed in range(5)]
    sequences = [pager.sequence() for _ in texts]
    for text, sequence in zip(texts[:2], sequences):
        text.go(pager, sequence, 3)
    idle = sequences[0].fork()
    with pager.begin(
        [*sequences[:2], None], [3, 3, 0], [1, 2, 0], [ROW_COMMIT, ROW_COMMIT, ROW_PADDING]
    ):
        assert pager.stats()["open_blocks"] == 3
        pager.evict_all()
        assert pager.stats()["open_blocks"] == 2
        twins = [idle.fork() for _ in range(9)]  # they leave for one another
        assert all(tiers(one)[0] for one in sequences[:2])
    with sequences[0].pin(0, 3):
        for text, sequence in zip(texts[2:], sequences[2:]):
            text.go(pager, sequence, 5)
        assert tiers(sequences[0])[0]
        assert not tiers(sequences[1])[0]
    for twin in twins:
        assert bits(twin) == bits(idle)


def test_the_tail_that_was_used_longest_ago_leaves_first() -> None:
    layout = layout_of("float32")
    pager = make(layout, pool=5)
    texts = [Text(layout, seed) for seed in range(6)]
    sequences = [pager.sequence() for _ in texts]
    for each in (0, 1, 2, 3, 0, 1, 4, 5):  # the fifth block is for what a forward needs beside
        texts[each].go(pager, sequences[each], 2)
    assert [tiers(one)[0] for one in sequences] == [True, True, False, True, True, True]


def test_without_room_below_the_pool_a_tail_stays_and_the_message_counts_it() -> None:
    layout = layout_of("float32")
    for host in (0, 6):
        pager = make(layout, pool=4, host=host)
        text, sequences = Text(layout, 0), [pager.sequence() for _ in range(6)]
        if host:
            sequences[5].reserve(6 * C)  # takes every home
        for sequence in sequences[:4]:
            text.go(pager, sequence, 2)
        with pytest.raises(CapacityError, match=r"0 can be had \(pool 4 blocks, 4 hold unsealed"):
            text.go(pager, sequences[4], 2)
        assert all(tiers(one)[0] for one in sequences[:4])
        if host:
            sequences[5].close()
            text.go(pager, sequences[4], 2)
        pager.check_invariants()


def test_homes_that_a_forward_needs_are_not_given_to_tails() -> None:
    layout = layout_of("float32")
    for host in (1, 2):  # one is for the chunk that seals
        pager = make(layout, pool=4, host=host)
        text, idle, busy = Text(layout, 0), [pager.sequence() for _ in range(3)], pager.sequence()
        for sequence in idle:
            text.go(pager, sequence, 2)
        text.go(pager, busy, 15)
        if host == 1:
            with pytest.raises(CapacityError, match="needs 1 blocks of the pool, 0 can be had"):
                text.go(pager, busy, 2)
        else:
            text.go(pager, busy, 2)
        assert sum(not tiers(one)[0] for one in idle) == host - 1
        pager.check_invariants()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tail_that_cannot_be_written_or_read_stays_where_it_is(tier: str, tmp_path: Path) -> None:
    layout = layout_of("float32")
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 * layout.chunk_bytes}
    options = disk if tier == "disk" else {}
    pager = make(layout, pool=3, host=0 if tier == "disk" else 64, **options)
    texts = [Text(layout, seed) for seed in range(4)]
    sequences = [pager.sequence() for _ in texts]
    for each in range(3):
        texts[each].go(pager, sequences[each], 2)
    before = [bits(one) for one in sequences[:3]]
    _core.arm_fault(f"{tier}.write", 0, errno.EIO)
    with pytest.raises(StorageError):
        texts[3].go(pager, sequences[3], 2)
    _core.disarm_faults()
    assert all(tiers(one)[0] for one in sequences[:3])
    assert [bits(one) for one in sequences[:3]] == before
    pager.check_invariants()
    texts[3].go(pager, sequences[3], 2)
    assert [bits(one) for one in sequences[:3]] == before
    (out,) = [one for one in sequences[:3] if not tiers(one)[0]]
    if tier == "host":
        return
    _core.arm_fault("disk.read", 0, errno.EIO)
    with pytest.raises(StorageError):
        texts[0].go(pager, out, 2)
    _core.disarm_faults()
    assert [bits(one) for one in sequences[:3]] == before
    pager.check_invariants()
