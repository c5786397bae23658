"""Pagers whose layers look back a bounded number of tokens, and texts to feed them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager.config import PagerConfig
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Layout, Pager, Sequence

LAYERS, KV_HEADS, HEADS, DIM, C, M = 2, 1, 2, 16, 16, 16
LAYOUT = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C)
CHUNK = LAYOUT.chunk_bytes
WINDOW = 40
WINDOWS = (WINDOW, 24)  # of the layers
LENGTH = 20 * C + 5
SCALING = 0.25


def make(
    window: int = WINDOW, pool: int = 6, host: int = 64, rewind: int = 0, **options: Any
) -> Pager:
    """`pool` and `host` in chunks; window 0: one that keeps everything."""
    device = options.pop("device", None)
    config = PagerConfig(
        **{
            "pool_tokens": pool * C,
            "chunk_tokens": C,
            "host_bytes": host * CHUNK,
            "rewind_tokens": rewind,
            "debug_poison": True,
            "debug_shuffle_seed": 3,
            **options,
        }
    )
    return Pager(
        LAYOUT,
        config,
        rows=M,
        window=window,
        fingerprint={"model": "windowed"},
        threads=1,
        device=device,
        q_heads=HEADS,
    )


class Text:
    """Token ids, and queries, keys and values that are a function of layer and position."""

    def __init__(self, seed: int = 0, length: int = LENGTH) -> None:
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, 1000, length)
        shape = (LAYERS, length, HEADS + 2 * KV_HEADS, DIM)
        self.qkv = random.standard_normal(shape, dtype=np.float32)

    def rows(self, layer: int, positions: list[int]) -> list[np.ndarray[Any, Any]]:
        """q, k and v of these positions, and NaN up to M rows."""
        taken = np.full((M, HEADS + 2 * KV_HEADS, DIM), np.nan, dtype=np.float32)
        taken[: len(positions)] = self.qkv[layer, positions]
        return np.split(taken, (HEADS, HEADS + KV_HEADS), axis=1)

    def naive(self, layer: int, position: int) -> np.ndarray[Any, Any]:
        """[HEADS, DIM] attention over the keys that the layer's window shows, in float64."""
        first = max(0, position - WINDOWS[layer] + 1)
        seen = self.qkv[layer, first : position + 1].astype(np.float64)
        q, k, v = np.split(seen, (HEADS, HEADS + KV_HEADS), axis=1)
        scores = np.einsum("hd,td->ht", q[-1], k[:, 0]) * SCALING
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(weights @ v[:, 0] / weights.sum(axis=1, keepdims=True))


def run(sequence: Sequence, text: Text, positions: list[int], kind: int) -> np.ndarray[Any, Any]:
    """[layers, rows, HEADS, DIM]: one forward of these rows, committed if they are to be."""
    pager = sequence.pager
    padding = M - len(positions)
    with pager.begin(
        [sequence] * len(positions) + [None] * padding,
        [*positions, *[0] * padding],
        [*text.tokens[positions], *[0] * padding],
        [kind] * len(positions) + [ROW_PADDING] * padding,
    ) as forward:
        outputs = np.zeros((LAYERS, M, HEADS, DIM), dtype=np.float32)
        for layer in range(LAYERS):
            q, k, v = text.rows(layer, positions)
            outputs[layer] = forward.attend(layer, q, k, v, scaling=SCALING, window=WINDOWS[layer])
        forward.commit()
    return outputs[:, : len(positions)]


def grow(sequence: Sequence, text: Text, stop: int, rows: int = M) -> np.ndarray[Any, Any]:
    """Outputs of all positions up to `stop` that the sequence does not hold yet."""
    outputs = [np.zeros((LAYERS, 0, HEADS, DIM), dtype=np.float32)]
    while sequence.length < stop:
        start = sequence.length
        positions = list(range(start, min(start + rows, stop)))
        outputs.append(run(sequence, text, positions, ROW_COMMIT))
    sequence.pager.check_invariants()
    return np.concatenate(outputs, axis=1)


def read(sequence: Sequence, text: Text, positions: list[int]) -> np.ndarray[Any, Any]:
    """Outputs of rows that only read."""
    return run(sequence, text, positions, ROW_READ)


def kv(sequence: Sequence, start: int | None = None) -> list[bytes]:
    """Raw bits of all K/V from `start` on, by default of all that is held."""
    first = sequence.released if start is None else start
    return [
        part.numpy().tobytes()
        for layer in range(LAYERS)
        for part in sequence.read_kv(layer, first, sequence.length)
    ]


def state(sequence: Sequence) -> list[Any]:
    """All that can be seen of a sequence and its pager, times apart."""
    stats = sequence.pager.stats()
    return [
        [str(info) + str((info.references, info.pins, info.block)) for info in sequence.ledger()],
        {name: value for name, value in stats.items() if not name.startswith("seconds")},
        sequence.tokens.tolist(),
        sequence.length,
        sequence.released,
        sequence.earliest_trim,
        kv(sequence),
    ]
