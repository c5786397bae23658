"""Where chunks live never changes a bit: pools, tiers, policies, placement and eviction storms.

Every configuration sees the same tokens, queries, keys and values and must give the same raw bytes,
which are also held against softmax attention in binary64 over the chunks that were chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits2_oracle import bits2_score

from kvpager.config import Dense, PagerConfig, TopK, Window
from kvpager.pager import ROW_COMMIT, ROW_PADDING, Layout, Pager

LAYERS, KV_HEADS, GROUP, DIM, C, M = 2, 2, 2, 32, 16, 16
LENGTH = 30 * C + 7
CHUNK_BYTES = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C).chunk_bytes
SELECTIONS = {
    "dense": Dense(),
    "topk": TopK(chunks=3, sinks=C, recent=2 * C, always=((5 * C, 6 * C),)),
    "window": Window(recent=2 * C, sinks=C),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 100},
    "sinks": {"sinks": np.array([0.5, -1.0, 0.0, 2.0], dtype=np.float32)},
}


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {
        "tokens": random.integers(0, 1000, LENGTH, dtype=np.int32),
        "q": random.standard_normal((LAYERS, LENGTH, KV_HEADS * GROUP, DIM), dtype=np.float32),
        "k": random.standard_normal((LAYERS, LENGTH, KV_HEADS, DIM), dtype=np.float32),
        "v": random.standard_normal((LAYERS, LENGTH, KV_HEADS, DIM), dtype=np.float32),
    }


def run(
    rows: dict[str, np.ndarray],
    config: PagerConfig,
    *,
    storm: bool = False,
    threads: int = 1,
    dtype: str = "float32",
    steps: tuple[int, ...] = (M,),
    offset: int = 0,
    **attention: Any,
) -> np.ndarray:
    """Outputs [layers, LENGTH, heads, DIM]; `steps` are the rows per forward, in turn."""
    layout = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C, k_dtype=dtype, v_dtype=dtype)
    pager = Pager(layout, config, rows=M, threads=threads)
    sequence = pager.sequence()
    outputs = np.empty((LAYERS, LENGTH, KV_HEADS * GROUP, DIM), dtype=np.float32)
    start = turn = 0
    while start < LENGTH:
        n = min(steps[turn % len(steps)], LENGTH - start)
        first = min(offset, M - n)
        here = slice(first, first + n)
        kinds = np.full(M, ROW_PADDING)
        kinds[here] = ROW_COMMIT
        positions, tokens = np.zeros(M, dtype=int), np.zeros(M, dtype=int)
        positions[here] = range(start, start + n)
        tokens[here] = rows["tokens"][start : start + n]
        owners = [sequence if kind == ROW_COMMIT else None for kind in kinds]
        if storm:
            pager.evict_all()
        with pager.begin(owners, positions, tokens, kinds) as forward:
            for layer in range(LAYERS):
                padded = {}
                for name in "qkv":
                    # Rows that are not the sequence's hold what would poison any sum they entered.
                    full = np.full((M, *rows[name].shape[2:]), np.nan, dtype=np.float32)
                    full[here] = rows[name][layer, start : start + n]
                    padded[name] = full
                out = forward.attend(
                    layer, padded["q"], padded["k"], padded["v"], scaling=DIM**-0.5, **attention
                )
                assert not np.any(out[kinds == ROW_PADDING])
                outputs[layer, start : start + n] = out[here]
            forward.commit()
        start += n
        turn += 1
    pager.check_invariants()
    assert pager.stats()["resident_bytes"] <= pager.stats()["pool_bytes"]
    for layer in range(LAYERS):
        k, v = sequence.read_kv(layer, 0, LENGTH)
        if dtype == "float32":
            assert k.numpy().tobytes() == rows["k"][layer].tobytes()
            assert v.numpy().tobytes() == rows["v"][layer].tobytes()
    return outputs


def config(tmp_path: Path, selection: Any, pool: int = 64, **options: Any) -> PagerConfig:
    options.setdefault("host_bytes", 64 * CHUNK_BYTES)
    if options.get("disk_bytes"):
        options["disk_path"] = tmp_path
    return PagerConfig(pool * C, chunk_tokens=C, selection=selection, **options)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: object) -> None:
    differ = found.view(np.uint32) != expected.view(np.uint32)
    if differ.any():
        first = tuple(int(i[0]) for i in np.nonzero(differ))
        pytest.fail(f"{what}: {differ.sum()} differ, first at (layer, position, head, d) {first}")


SMALL = {
    "host": {},
    "host, shuffled and poisoned": {"debug_shuffle_seed": 3, "debug_poison": True},
    "host, another shuffle, recalls": {"debug_shuffle_seed": 4, "recall_chunks": 4},
    "host, no recalls, LRU": {"recall_chunks": 0, "policy": "lru", "debug_poison": True},
    "host and disk": {"host_bytes": 5 * CHUNK_BYTES, "disk_bytes": 64 * CHUNK_BYTES},
    "host and disk, LRU": {
        "host_bytes": 3 * CHUNK_BYTES,
        "disk_bytes": 64 * CHUNK_BYTES,
        "policy": "lru",
        "debug_shuffle_seed": 5,
        "debug_poison": True,
    },
    "disk only": {"host_bytes": 0, "disk_bytes": 64 * CHUNK_BYTES, "debug_poison": True},
    "disk only, no recalls": {"host_bytes": 0, "disk_bytes": 64 * CHUNK_BYTES, "recall_chunks": 0},
    "no hysteresis": {"hysteresis": 0.0, "recall_chunks": 16},
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("attention", ["plain", "window"])
def test_an_eighth_of_the_pool_gives_the_same_bits_as_all_of_it(
    rows: dict[str, np.ndarray], tmp_path: Path, selection: str, attention: str
) -> None:
    chosen = SELECTIONS[selection]
    everything = run(rows, config(tmp_path, chosen, recall_chunks=0), **ATTENTION[attention])
    assert np.isfinite(everything).all()
    for name, options in SMALL.items():
        for storm in (False, True):
            small = config(tmp_path, chosen, pool=4, **options)
            found = run(rows, small, storm=storm, **ATTENTION[attention])
            assert_same_bits(found, everything, (name, storm))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_threads_packing_and_padding_change_no_bit(
    rows: dict[str, np.ndarray], tmp_path: Path, selection: str
) -> None:
    chosen = SELECTIONS[selection]
    everything = run(rows, config(tmp_path, chosen))
    for options in (
        {"threads": 3},
        {"steps": (1,), "offset": 5},
        {"steps": (16, 1, 7, 3), "offset": 9},
        {"steps": (5,), "storm": True, "threads": 2},
    ):
        found = run(rows, config(tmp_path, chosen, pool=4), **options)
        assert_same_bits(found, everything, options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_chunks_are_placed_as_freely(
    rows: dict[str, np.ndarray], tmp_path: Path, dtype: str
) -> None:
    chosen = SELECTIONS["topk"]
    everything = run(rows, config(tmp_path, chosen), dtype=dtype)
    small = config(tmp_path, chosen, pool=4, debug_poison=True, debug_shuffle_seed=9)
    assert_same_bits(run(rows, small, dtype=dtype, storm=True), everything, dtype)


def reference(
    rows: dict[str, np.ndarray],
    layer: int,
    position: int,
    chunks: list[list[int]],
    **attention: Any,
) -> np.ndarray:
    """One row in binary64: softmax over the chosen chunks' visible keys."""
    out = np.empty((KV_HEADS * GROUP, DIM))
    for head in range(KV_HEADS * GROUP):
        kv = head // GROUP
        keys = [p for c in chunks[kv] for p in range(c * C, min((c + 1) * C, position + 1))]
        if window := attention.get("window"):
            keys = [p for p in keys if p > position - window]
        q = rows["q"][layer, position, head].astype(np.float64)
        score = rows["k"][layer, keys, kv].astype(np.float64) @ q * DIM**-0.5
        if cap := attention.get("softcap"):
            score = cap * np.tanh(score / cap)
        top = score.max()
        weight = np.exp(score - top)
        total = weight.sum()
        if "sinks" in attention:
            total += np.exp(attention["sinks"][head] - top)
        out[head] = weight @ rows["v"][layer, keys, kv].astype(np.float64) / total
    return out


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_outputs_are_attention_over_the_chosen_chunks(
    rows: dict[str, np.ndarray], tmp_path: Path, selection: str, attention: str
) -> None:
    chosen = SELECTIONS[selection]
    outputs = run(rows, config(tmp_path, chosen, pool=4), **ATTENTION[attention])
    layout = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C)
    pager = Pager(layout, config(tmp_path, chosen), rows=M, threads=1)
    sequence = pager.sequence()
    sequence.append(rows["tokens"], rows["k"], rows["v"])
    window = ATTENTION[attention].get("window")
    for layer in range(LAYERS):
        for position in (0, 1, 15, 16, 63, 200, 255, 383, 384, LENGTH - 1):
            chunks = sequence.select(
                layer, rows["q"][layer, position], position=position, window=window
            )
            expected = reference(rows, layer, position, chunks, **ATTENTION[attention])
            np.testing.assert_allclose(outputs[layer, position], expected, rtol=2e-5, atol=2e-6)


def naive_top_k(
    rows: dict[str, np.ndarray], layer: int, position: int, kv: int, picks: TopK
) -> list[int]:
    """TopK by the oracle's scores: of the best key of a chunk for any query head."""
    recent = max(0, (position + 1 - picks.recent) // C)
    always = {c for a, b in picks.always for c in range(a // C, -(-b // C))}
    sinks = -(-picks.sinks // C)
    fixed = {c for c in range(position // C + 1) if c < sinks or c >= recent or c in always}
    q = rows["q"][layer, position, kv * GROUP : (kv + 1) * GROUP]
    candidates = [c for c in range(recent) if c not in fixed]
    best = [bits2_score(rows["k"][layer, c * C : (c + 1) * C, kv], q) for c in candidates]
    order = sorted(range(len(candidates)), key=lambda i: (-best[i], candidates[i]))
    return sorted(fixed | {candidates[i] for i in order[: picks.chunks]})


def test_top_k_takes_the_sinks_the_recent_window_always_and_the_best_of_the_rest(
    rows: dict[str, np.ndarray], tmp_path: Path
) -> None:
    picks = TopK(chunks=3, sinks=C, recent=2 * C, always=((5 * C, 6 * C),))
    layout = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C)
    pager = Pager(layout, config(tmp_path, picks, pool=4), rows=M, threads=1)
    sequence = pager.sequence()
    sequence.append(rows["tokens"], rows["k"], rows["v"])
    for layer in range(LAYERS):
        for position in (0, 40, 47, 48, 200, 333, LENGTH - 1):
            found = sequence.select(layer, rows["q"][layer, position], position=position)
            assert found == [
                naive_top_k(rows, layer, position, kv, picks) for kv in range(KV_HEADS)
            ]
