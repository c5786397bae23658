"""Trains the 16 levels of q4 (csrc/include/kvpager/codes.h).

Lloyd's algorithm on normal numbers in groups of 32, each group with the scale, of those that
csrc/kernels/codes_isa.cc tries, whose squared error is least.

    python scripts/q4_levels.py

prints the levels, their mean squared error for numbers of variance 1, and that of 16 equal steps
with one scale, which is llama.cpp's q4_0.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

GROUP = 32
STRETCH = 1.05
ROUNDS = 8
POWERS = (1.1, 1.15, 1.2, 1.25, 1.3)


def _bfloat16(x: Floats) -> Floats:
    bits = x.astype(np.float32).view(np.uint32)
    rounded: Floats = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    return rounded


def _places(levels: NDArray[np.float64]) -> list[float]:
    """Where the number of largest magnitude may fall: on the last level, or a little beyond it."""
    return [end * stretch for end in (levels[0], levels[-1]) for stretch in (1.0, STRETCH)]


def _quantise(x: Floats, levels: NDArray[np.float64]) -> tuple[NDArray[np.intp], Floats]:
    """The codes of groups [n, 32] and their scales [n, 1]."""
    extreme = x[np.arange(len(x)), np.abs(x).argmax(1)]
    ends = _places(levels)
    scales = np.stack([_bfloat16(extreme / np.float32(end)) for end in ends], 1)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = np.searchsorted(middles, x[:, None, :] / scales[:, :, None])
    errors = ((levels[codes] * scales[:, :, None] - x[:, None, :]) ** 2).sum(-1)
    best, each = errors.argmin(1), np.arange(len(x))
    return codes[each, best], scales[each, best][:, None]


def _error(x: Floats, levels: NDArray[np.float64]) -> float:
    codes, scales = _quantise(x, levels)
    return float(((levels[codes] * scales - x) ** 2).mean())


def _train(x: Floats, held_out: Floats) -> NDArray[np.float64]:
    """Levels of least error on `held_out`, of those that rounds on x come to."""
    best, least = np.zeros(16), np.inf
    for power in POWERS:
        at = np.linspace(-1.0, 1.0, 17)[:-1]  # nearer to each other where there are more numbers
        levels = 127 * np.sign(at) * np.abs(at) ** power
        for _ in range(ROUNDS):
            found = _error(held_out, np.round(levels))
            if found < least:
                best, least = np.round(levels), found
            codes, scales = _quantise(x, levels)
            weights = np.broadcast_to(scales**2, x.shape)
            for code in range(16):
                mine = codes == code
                levels[code] = (x * scales)[mine].sum() / weights[mine].sum()
            levels *= 127 / np.abs(levels).max()
    return best


def main() -> None:
    """Trains and prints."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rng = np.random.default_rng(0)
    x, y, z = rng.standard_normal((3, 40_000, GROUP)).astype(np.float32)
    levels = _train(y, z)
    print(", ".join(f"{level:.0f}" for level in levels))
    print(f"mean squared error {_error(x, levels):.6f}")
    extreme = x[np.arange(len(x)), np.abs(x).argmax(1)]
    scale = _bfloat16(extreme / -8)[:, None]
    steps = np.clip(np.round(x / scale), -8, 7) * scale
    print(f"of 16 equal steps  {float(((steps - x) ** 2).mean()):.6f}")


if __name__ == "__main__":
    main()
