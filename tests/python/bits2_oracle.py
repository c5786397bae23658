"""The scores of chunks in numpy, as csrc/kernels/bits2.cc has them: the tests' oracle of TopK."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def bits2_score(keys: Floats, queries: Floats) -> float:
    """The best score of a chunk's keys [tokens, dim] for any of a kv head's queries [heads, dim].

    To the bit: every step is one IEEE operation, on integers or in an order that does not matter.
    """
    low = keys.min(0).astype(np.float64)
    step = (keys.max(0).astype(np.float64) - low) / 3
    low_scale, step_scale = _short_scale(np.abs(low).max(), 32767), _short_scale(step.max(), 255)
    lows, steps = np.rint(low / low_scale), np.rint(step / step_scale)
    base = (lows * low_scale).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(steps, 1 / (steps * step_scale), 0).astype(np.float32)
    levels = np.clip((keys - base) * inverse, np.float32(0), np.float32(3))
    codes = np.floor(levels + np.float32(0.5)).astype(np.int64)
    largest = np.abs(queries).max()
    query = np.rint(queries * (np.float32(127) / largest)).astype(np.int64)
    weights = (query * steps.astype(np.int64) + 128) >> 8
    of_low = query @ lows.astype(np.int64)
    of_codes = weights @ codes.T
    return float((low_scale * of_low[:, None] + 256 * step_scale * of_codes).max())


def _short_scale(largest: np.floating, levels: int) -> float:
    """The least float with 16 significant bits that is at least `largest` / `levels`."""
    bits = int(np.float32(largest / levels).view(np.uint32)) + 0xFF & ~0xFF
    scale = float(np.uint32(bits).view(np.float32))
    if scale * levels < largest:
        scale = float(np.uint32(bits + 0x100).view(np.float32))
    return scale
