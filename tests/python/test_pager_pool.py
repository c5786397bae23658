"""The pool of a pager, what is resident in it, and the key summaries that choose from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager import _core
from kvpager.config import Dense, PagerConfig, TopK
from kvpager.errors import CapacityError, InvalidArgumentError, NonFiniteError, StorageError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Layout, Pager, Sequence

LAYERS, KV_HEADS, HEADS, DIM, C, M = 2, 2, 4, 32, 16, 16
LAYOUT = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C)
CHUNK = LAYOUT.chunk_bytes
TOP_K = TopK(chunks=2, sinks=C, recent=2 * C)
FINGERPRINT = {"model": "test"}


@pytest.fixture(autouse=True)
def _no_fault_is_left_armed() -> Iterator[None]:
    yield
    _core.disarm_faults()


def make(pool: int = 6, host: int = 64, **options: Any) -> Pager:
    config = PagerConfig(
        pool * C,
        chunk_tokens=C,
        **{
            "selection": Dense(),
            "host_bytes": host * CHUNK,
            "recall_chunks": 0,
            "debug_poison": True,
            "debug_shuffle_seed": 5,
            **options,
        },
    )
    return Pager(LAYOUT, config, rows=M, fingerprint=FINGERPRINT, threads=1)


class Text:
    """Tokens with the q, k, v rows of each position: q and k [layers, n, heads, DIM]."""

    def __init__(self, length: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, 1000, length, dtype=np.int32)
        self.q = random.standard_normal((LAYERS, length, HEADS, DIM), dtype=np.float32)
        self.k = random.standard_normal((LAYERS, length, KV_HEADS, DIM), dtype=np.float32)
        self.v = random.standard_normal((LAYERS, length, KV_HEADS, DIM), dtype=np.float32)

    def forward(
        self,
        pager: Pager,
        sequence: Sequence,
        start: int,
        count: int,
        *,
        kind: int = ROW_COMMIT,
        accept: int | None = None,
        change: Callable[[int, np.ndarray, np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """One forward of M rows: `count` positions, then padding. Outputs [layers, count, ...]."""
        padding = M - count
        outputs = np.empty((LAYERS, count, HEADS, DIM), dtype=np.float32)
        with pager.begin(
            [sequence] * count + [None] * padding,
            [*range(start, start + count), *[0] * padding],
            [*self.tokens[start : start + count].tolist(), *[0] * padding],
            [kind] * count + [ROW_PADDING] * padding,
        ) as forward:
            for layer in range(LAYERS):
                rows = [
                    np.full((M, heads, DIM), np.nan, dtype=np.float32)
                    for heads in (HEADS, KV_HEADS, KV_HEADS)
                ]
                sources = (self.q, self.k, self.v) if kind == ROW_COMMIT else (self.q,)
                for target, source in zip(rows, sources):
                    target[:count] = source[layer, start : start + count]
                if change is not None:
                    change(layer, rows[1], rows[2])
                outputs[layer] = forward.attend(layer, *rows, scaling=DIM**-0.5)[:count]
            forward.commit(None if accept is None else {sequence: accept})
        return outputs

    def prefill(
        self, pager: Pager, sequence: Sequence, stop: int, start: int | None = None
    ) -> np.ndarray:
        first = sequence.length if start is None else start
        parts = [
            self.forward(pager, sequence, at, min(M, stop - at)) for at in range(first, stop, M)
        ]
        return np.concatenate(parts, axis=1)

    def probe(self, pager: Pager, sequence: Sequence, position: int) -> np.ndarray:
        return self.forward(pager, sequence, position, 1, kind=ROW_READ)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.size > 0 and a.tobytes() == b.tobytes()


def resident(sequence: Sequence) -> list[int]:
    return [info.chunk for info in sequence.ledger() if info.resident]


# Pool, paging, residency


@pytest.mark.parametrize("selection", [Dense(), TOP_K], ids=["dense", "topk"])
def test_block_placement_and_history_permute_nothing(selection: Any) -> None:
    text = Text(40 * C)
    expected: np.ndarray | None = None
    for pool, seed, storms in ((64, None, False), (4, 1, True), (5, 2, True), (9, 3, False)):
        pager = make(pool, selection=selection, debug_shuffle_seed=seed)
        sequence = pager.sequence()
        outputs = []
        for at in range(0, 40 * C, M):
            if storms:
                pager.evict_all()
                if at:
                    sequence.pin(at // 2, at // 2 + 1).release()
            outputs.append(text.forward(pager, sequence, at, M))
        found = np.concatenate(outputs, axis=1)
        expected = found if expected is None else expected
        assert same_bits(found, expected)


def test_a_chunk_comes_back_in_one_copy_of_all_its_layers_and_heads() -> None:
    pager, text = make(), Text(20 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 20 * C)
    pager.evict_all()
    sequence.pin(0, 3 * C)
    stats = pager.stats()
    assert stats["chunks_recalled"] == 3
    assert stats["bytes_paged_in"] == stats["chunks_recalled"] * stats["chunk_bytes"] == 3 * CHUNK


def test_evicting_a_clean_chunk_moves_no_bytes() -> None:
    pager, text = make(), Text(20 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 20 * C)
    for _ in range(3):
        sequence.pin(0, 3 * C).release()
        pager.evict_all()
    stats = pager.stats()
    assert stats["chunks_evicted"] >= 20
    assert stats["bytes_written_through"] == 20 * CHUNK  # once, when it was sealed


def test_a_block_that_is_reused_never_shows_what_it_held_or_loses_what_it_holds() -> None:
    pager, texts = make(4), [Text(10 * C, seed) for seed in range(3)]
    sequences = [pager.sequence() for _ in texts]
    for at in range(0, 10 * C, 5):
        for text, sequence in zip(texts, sequences):
            if pager.stats()["open_blocks"] < 3 or sequence.length % C:
                text.forward(pager, sequence, sequence.length, 5 if at + 5 <= 10 * C else 1)
    for text, sequence in zip(texts, sequences):
        for layer in range(LAYERS):
            k, v = sequence.read_kv(layer, 0, sequence.length)
            assert k.numpy().tobytes() == text.k[layer, : sequence.length].tobytes()
            assert v.numpy().tobytes() == text.v[layer, : sequence.length].tobytes()


def test_allocating_a_span_cannot_evict_the_spans_own_unwritten_chunks_nor_stop_halfway() -> None:
    pager, text = make(3), Text(8 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 15)
    text.prefill(pager, sequence, 47)  # each of these forwards needs two of the three blocks
    blocked = [pager.sequence() for _ in range(2)]
    Text(3, 9).prefill(pager, blocked[0], 3)
    blocked[1].reserve(61 * C)  # leaves a home for the chunk that seals, and none for a tail
    before = pager.stats()
    assert before["open_blocks"] == 2
    with pytest.raises(CapacityError, match=r"needs 2 blocks of the pool, 1 can be had"):
        pager.begin(
            [sequence] * 2 + [blocked[1]],
            [47, 48, 0],
            [1, 1, 1],
            [ROW_COMMIT] * 3,
        )
    after = pager.stats()
    for field in ("open_blocks", "free_blocks", "reserved_chunks", "records", "forwards"):
        assert after[field] == before[field]
    pager.check_invariants()
    for each in blocked:
        each.close()
    text.prefill(pager, sequence, 8 * C)
    assert sequence.length == 8 * C


def test_nothing_is_allocated_on_the_paging_path_and_what_does_not_fit_is_refused_up_front() -> (
    None
):
    pager, text = make(4, host=10), Text(10 * C)
    mapped = _core.total_mapped_bytes()
    sequence = pager.sequence()
    with pytest.raises(CapacityError, match=rf"{11 * CHUNK} bytes"):
        sequence.reserve(11 * C)
    sequence.reserve(10 * C)
    text.prefill(pager, sequence, 10 * C)
    pager.evict_all()
    text.probe(pager, sequence, 10 * C - 1)
    assert _core.total_mapped_bytes() == mapped
    assert pager.stats()["pool_bytes"] == 4 * CHUNK


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "1",
    reason="this system maps any size",
)
@pytest.mark.parametrize("option", ["host_bytes", "summary_bytes"])
def test_a_budget_beyond_all_memory_is_refused_by_its_name(option: str) -> None:
    mapped = _core.total_mapped_bytes()
    with pytest.raises(CapacityError, match=rf"^{option}: cannot map \d+ bytes of memory"):
        make(**{option: 1 << 44})
    assert _core.total_mapped_bytes() == mapped


@pytest.mark.parametrize("length", [1, 5, 15, 17, 30])
def test_rows_after_the_committed_length_are_never_read(length: int) -> None:
    # The pool is poisoned: what was not written is NaN, in keys and in values.
    pager, text = make(4), Text(2 * C)
    sequence = pager.sequence()
    assert np.isfinite(text.prefill(pager, sequence, length)).all()
    assert np.isfinite(text.probe(pager, sequence, length - 1)).all()


def test_rejected_drafts_are_invisible_for_ever() -> None:
    text, draft = Text(3 * C), Text(3 * C, 1)
    with_drafts, plain = make(), make()
    a, b = with_drafts.sequence(), plain.sequence()
    for at in range(0, 40, 2):
        draft.tokens[at], draft.q[:, at] = text.tokens[at], text.q[:, at]
        draft.k[:, at], draft.v[:, at] = text.k[:, at], text.v[:, at]
        draft.forward(with_drafts, a, at, 8, accept=1)  # seven tokens nobody wanted
        text.forward(with_drafts, a, at + 1, 1)
        text.forward(plain, b, at, 2)
        probes = [text.probe(p, s, at + 1) for p, s in ((with_drafts, a), (plain, b))]
        assert same_bits(*probes)
    for layer in range(LAYERS):
        assert a.read_kv(layer, 0, 40)[0].numpy().tobytes() == text.k[layer, :40].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_keys_or_values_that_are_not_finite_abort_the_forward_with_layer_and_position(
    bad: float, which: str
) -> None:
    pager, text = make(), Text(3 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 20)

    def poison(layer: int, k: np.ndarray, v: np.ndarray) -> None:
        if layer == 1:
            (k if which == "key" else v)[3, 1, 7] = bad

    with pytest.raises(NonFiniteError, match=r"layer 1: .* position 23 "):
        text.forward(pager, sequence, 20, 8, change=poison)
    assert sequence.length == 20
    assert not pager.core.forward_running()
    pager.check_invariants()
    text.prefill(pager, sequence, 3 * C)
    assert sequence.length == 3 * C


def test_ties_are_broken_by_chunk_id_every_time() -> None:
    text = Text(12 * C)
    text.k[:] = np.tile(text.k[:, :C], (1, 12, 1, 1))  # every chunk has the same keys
    pager = make(selection=TOP_K)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 12 * C)
    expected = [
        [0, 1, 2, 10, 11]
    ] * KV_HEADS  # the sink, the first two candidates, the recent window
    for _ in range(3):
        pager.evict_all()
        for layer in range(LAYERS):
            found = sequence.select(layer, text.q[layer, -1], position=12 * C - 1)
            assert found == expected


@pytest.mark.parametrize("policy", ["lru", "qk"])
def test_pins_hold_under_every_policy_and_only_for_the_half_open_range(policy: str) -> None:
    pager, text = make(6, policy=policy, recall_chunks=4), Text(20 * C)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 10 * C)
    with sequence.pin(2 * C, 4 * C):
        assert [info.chunk for info in sequence.ledger() if info.pins] == [2, 3]
        for at in range(10 * C, 20 * C, M):
            pager.evict_all()
            assert resident(sequence) == [2, 3]
            text.forward(pager, sequence, at, M)
            assert {2, 3} <= set(resident(sequence))
    pager.evict_all()
    assert resident(sequence) == []
    with pytest.raises(CapacityError, match="4 of the pool's 6 are free to pin"):
        sequence.pin(0, 5 * C)


def test_a_previous_sequences_scores_do_not_steer_the_next_ones_eviction() -> None:
    text, other = Text(12 * C), Text(5 * C, 1)

    def residency(with_history: bool) -> list[list[int]]:
        pager = make(8, policy="qk", debug_shuffle_seed=None)
        if with_history:
            old = pager.sequence()
            other.prefill(pager, old, 5 * C)
            for _ in range(10):
                other.probe(pager, old, 5 * C - 1)  # its scores are as high as they get
            old.close()
        sequence = pager.sequence()
        seen = []
        for at in range(0, 12 * C, M):
            text.forward(pager, sequence, at, M)
            seen.append(resident(sequence))
        return seen

    assert residency(with_history=True) == residency(with_history=False)


def test_an_adopted_chunk_starts_without_the_scores_of_those_before() -> None:
    pager, text = make(), Text(8 * C)
    first = pager.sequence()
    text.prefill(pager, first, 8 * C)
    text.probe(pager, first, 8 * C - 1)
    assert max(info.qk_score for info in first.ledger()) > 0
    second = pager.sequence()
    assert second.adopt_prefix(text.tokens) == 8 * C
    assert [info.qk_score for info in second.ledger()] == [0] * 8


def test_selection_happens_in_every_forward_from_the_first_token_on() -> None:
    """Prefill, decode and speculation choose alike: outputs are one function of the position."""
    text = Text(20 * C)
    prefilled, decoded, speculated = (make(selection=TOP_K) for _ in range(3))
    a, b, c = prefilled.sequence(), decoded.sequence(), speculated.sequence()
    expected = text.prefill(prefilled, a, 20 * C)
    for at in range(20 * C):
        assert same_bits(text.forward(decoded, b, at, 1), expected[:, at : at + 1])
    at, step = 0, 0
    while at < 20 * C:
        count = min(9, 20 * C - at)
        accept = min(1 + step % 9, count)
        found = text.forward(speculated, c, at, count, accept=accept)
        assert same_bits(found, expected[:, at : at + count])
        at, step = at + accept, step + 1
    # And it is a choice: what was left out is not what dense attention sees.
    dense = make()
    everything = text.prefill(dense, dense.sequence(), 20 * C)
    assert same_bits(everything[:, : 3 * C], expected[:, : 3 * C])
    assert not same_bits(everything[:, 10 * C :], expected[:, 10 * C :])


def test_what_is_resident_is_not_what_is_attended_to() -> None:
    text = Text(20 * C)
    pager = make(10, selection=TOP_K)
    sequence = pager.sequence()
    text.prefill(pager, sequence, 20 * C)
    chosen = sequence.select(0, text.q[0, -1], position=20 * C - 1)
    expected = text.probe(pager, sequence, 20 * C - 1)
    others = [c for c in range(20) if c not in {c for head in chosen for c in head}][:6]
    pager.evict_all()
    pins = [sequence.pin(c * C, (c + 1) * C) for c in others]
    assert resident(sequence) == others
    assert sequence.select(0, text.q[0, -1], position=20 * C - 1) == chosen
    assert same_bits(text.probe(pager, sequence, 20 * C - 1), expected)
    for pin in pins:
        pin.release()


def test_a_pool_smaller_than_the_frontiers_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(InvalidArgumentError, match=r"pool_tokens.* 32.*at least 48"):
        make(2)
    least, text = make(3), Text(10 * C)
    text.prefill(least, least.sequence(), 10 * C)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_tokens": 0}, r"pool_tokens is 0; expected an integer from 1 to"),
        ({"pool_tokens": 100}, r"pool_tokens is 100; expected a multiple of chunk_tokens \(16\)"),
        ({"pool_tokens": "many"}, r"pool_tokens is 'many'; expected an integer"),
        ({"chunk_tokens": 48}, r"chunk_tokens is 48; expected one of 16, 32, 64, 128, 256"),
        ({"host_bytes": "4 gigs"}, r"host_bytes is '4 gigs'; expected .*4GiB"),
        ({"host_bytes": -1}, r"host_bytes is -1; expected"),
        ({"disk_bytes": 100}, r"disk_path is None; expected a folder, because disk_bytes is 100"),
        ({"disk_path": "/nowhere/at/all"}, r"disk_path is '/nowhere/at/all'; expected the path"),
        ({"policy": "fifo"}, r"policy is 'fifo'; expected one of 'qk', 'lru'"),
        ({"recall_chunks": -1}, r"recall_chunks is -1; expected an integer from 0 to 4096"),
        ({"hysteresis": float("nan")}, r"hysteresis is nan; expected a number from 0.0 to 10.0"),
        ({"rows": 0}, r"rows is 0; expected an integer from 1 to 4096"),
        ({"rows": "64"}, r"rows is '64'; expected an integer"),
    ],
)
def test_a_wrong_option_is_refused_by_name_value_and_range(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PagerConfig(**{"pool_tokens": 64 * C, "chunk_tokens": C, **options})


def test_a_recent_window_shorter_than_a_forward_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"recent is 15; expected at least rows = 16"):
        make(selection=TopK(chunks=1, sinks=C, recent=15))


# Key summaries and scores


def save_and_restore(text: Text, tmp_path: Path, length: int, **options: Any) -> tuple[Any, ...]:
    first = make(**options)
    saved = first.sequence()
    text.prefill(first, saved, length)
    saved.save(tmp_path / "turn.kvp")
    second = make(**options)
    restored = second.restore(second.open_snapshot(tmp_path / "turn.kvp"))
    return first, saved, second, restored


def test_restored_chunks_score_as_they_did(tmp_path: Path) -> None:
    text = Text(24 * C)
    picks = TopK(chunks=2, sinks=C, recent=2 * C)
    _, saved, _, restored = save_and_restore(text, tmp_path, 23 * C + 5, selection=picks)
    for layer in range(LAYERS):
        for position in (100, 200, 300, 23 * C + 4):
            chosen = saved.select(layer, text.q[layer, position], position=position)
            assert restored.select(layer, text.q[layer, position], position=position) == chosen
            recent = range((position + 1 - picks.recent) // C, position // C + 1)
            assert [len(chunks) for chunks in chosen] == [1 + 2 + len(recent)] * KV_HEADS


def test_scores_are_populated_by_decoding_saved_finite_and_used_after_a_restore(
    tmp_path: Path,
) -> None:
    text = Text(24 * C)
    first, saved, second, restored = save_and_restore(
        text, tmp_path, 23 * C, selection=TOP_K, recall_chunks=4, policy="qk"
    )
    scores = saved.residency()["qk_score"]
    assert np.isfinite(scores).all()
    assert (scores >= 0).all()
    assert scores.sum() > 0.5
    assert (restored.residency()["qk_score"] == scores).all()
    for pager, sequence in ((first, saved), (second, restored)):
        text.forward(pager, sequence, 23 * C, 1)
    again = restored.residency()["qk_score"]
    assert (again == saved.residency()["qk_score"]).all()
    assert (again != np.append(scores, 0)).any()
    assert second.stats()["chunks_recalled"] > 0  # ahead of need, by those scores


def test_a_sequence_in_reused_records_has_its_own_summaries(tmp_path: Path) -> None:
    pager, fresh = make(host=20, selection=TOP_K), make(host=20, selection=TOP_K)
    for seed in range(4):
        sequence = pager.sequence(salt=str(seed))
        Text(15 * C, seed).prefill(pager, sequence, 15 * C)
        sequence.close()
    text = Text(20 * C, 9)
    a, b = pager.sequence(), fresh.sequence()
    assert same_bits(text.prefill(pager, a, 20 * C), text.prefill(fresh, b, 20 * C))
    assert pager.stats()["cached_records"] == 0


def test_a_sealed_chunk_always_has_a_summary_and_there_is_one_record_per_chunk() -> None:
    pager, text = make(), Text(20 * C)
    sequence = pager.sequence()
    for stop in range(1, 20 * C, 37):
        text.prefill(pager, sequence, stop)
        stats = pager.stats()
        sealed = stop // C
        assert stats["summary_bytes_used"] == sealed * stats["summary_bytes_per_chunk"]
        assert stats["records"] == len(sequence.ledger()) == -(-stop // C)
        columns = sequence.residency()
        assert {len(column) for column in columns.values()} == {len(sequence.ledger())}


def test_token_history_comes_back_whole(tmp_path: Path) -> None:
    text = Text(5 * C + 3)
    _, saved, _, restored = save_and_restore(text, tmp_path, 5 * C + 3)
    assert restored.tokens.tolist() == saved.tokens.tolist() == text.tokens.tolist()


def test_a_failed_page_in_aborts_the_forward_and_the_next_one_has_the_same_bits(
    tmp_path: Path,
) -> None:
    text = Text(12 * C)
    plain = make(64)
    expected = text.prefill(plain, plain.sequence(), 12 * C)
    pager = make(4, host=0, disk_bytes=64 * CHUNK, disk_path=tmp_path)
    sequence = pager.sequence()
    for at in range(0, 12 * C, M):
        if at:
            pager.evict_all()
            _core.arm_fault("disk.read", at // M // 2, 5)
            with pytest.raises(StorageError, match="cannot read"):
                text.forward(pager, sequence, at, M)
            assert sequence.length == at
            pager.check_invariants()
        assert same_bits(text.forward(pager, sequence, at, M), expected[:, at : at + M])


def test_positions_that_are_given_in_parts_are_added_or_none_is() -> None:
    pager = make(pool=8, host=0)
    text, tenant = Text(300), Text(300, seed=1)
    first = pager.sequence()
    first.append(text.tokens[:46], text.k[:, :46], text.v[:, :46], provenance="exact")
    cut = pager.sequence()
    assert cut.adopt_prefix(text.tokens[:25]) == C
    cut.trim(2)  # within a chunk that `first` has too: a block of its own
    last = pager.sequence()
    last.append(tenant.tokens[:31], tenant.k[:, :31], tenant.v[:, :31], provenance="exact")
    before = pager.stats()
    with pytest.raises(CapacityError, match="needs 1 blocks"):  # of its third forward
        last.append(tenant.tokens[31:79], tenant.k[:, 31:79], tenant.v[:, 31:79])
    assert last.length == 31
    assert np.array_equal(last.tokens, tenant.tokens[:31])
    assert pager.stats()["open_blocks"] == before["open_blocks"]
    k, v = last.read_kv(1, 0, 31)
    assert np.array_equal(k, tenant.k[1, :31])
    assert np.array_equal(v, tenant.v[1, :31])
    pager.check_invariants()
