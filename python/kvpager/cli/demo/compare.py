"""How many bits differ, and where the first of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from kvpager.pager import Sequence

Bytes = npt.NDArray[np.uint8]
_BLOCK_TOKENS = 4096  # compared at a time


@dataclass
class Difference:
    """Of two things that should be equal: bits compared, bits that differ, the first place."""

    compared: int = 0
    differing: int = 0
    first: str | None = None

    def add(self, other: Difference) -> None:
        """Counts another comparison in."""
        self.compared += other.compared
        self.differing += other.differing
        self.first = self.first or other.first


def raw(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, [..., bytes of the last dimension] uint8."""
    return tensor.detach().contiguous().view(torch.uint8).numpy()


def differing_bits(one: Bytes, other: Bytes, what: str) -> Difference:
    """Compares two arrays of bytes; where shapes differ, every bit of what one lacks differs."""
    if one.shape != other.shape:
        bits = 8 * max(one.size, other.size)
        return Difference(bits, bits, f"{what}: shapes {one.shape} and {other.shape}")
    if np.array_equal(one, other):
        return Difference(8 * one.size)
    different = np.bitwise_xor(one, other)
    place = tuple(int(i) for i in np.argwhere(different)[0])
    return Difference(8 * one.size, int(np.unpackbits(different).sum()), f"{what}, byte {place}")


def differing_kv(one: Sequence, other: Sequence, layers: int, what: str) -> Difference:
    """Compares tokens and raw K/V of every position of `one` with those of `other`."""
    ids = [sequence.tokens[: one.length].view(np.uint8) for sequence in (one, other)]
    total = differing_bits(ids[0], ids[1], f"{what}: token ids")
    for start in range(0, one.length, _BLOCK_TOKENS):
        stop = min(start + _BLOCK_TOKENS, one.length)
        for layer in range(layers):
            pairs: Any = zip(
                "KV", one.read_kv(layer, start, stop), other.read_kv(layer, start, stop)
            )
            for name, mine, theirs in pairs:
                place = f"{what}: {name} of layer {layer}, positions [{start}, {stop})"
                total.add(differing_bits(raw(mine), raw(theirs), place))
    return total
