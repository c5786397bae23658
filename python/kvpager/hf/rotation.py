"""Rotary position embedding as what it does to a key: pairs of elements turn with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 1 << 16  # elements turned at a time: what is made on the way stays in a processor's cache


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turns pairs of a key's elements, each by position times frequency (Su et al., RoFormer).

    A factor on cosine and sine, as YaRN has, is the same at all positions and needs no word here.

    Attributes:
        frequencies: [pairs] float32 on the CPU, radians per position; negative ones turn backwards.
        start: the first element that turns. Those before it, and behind the last pair, do not.
        interleaved: whether the elements of a pair are neighbours (GPT-J); otherwise they are half
            of all turning elements apart (GPT-NeoX, Llama).
    """

    frequencies: torch.Tensor
    start: int
    interleaved: bool

    def between(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine that take keys from positions `old` to `new`.

        A model rounds its angles to float32, at position 100 000 by up to 0.004. The difference
        is taken of angles rounded in the same way, so that such errors are turned back with the
        rest.

        Args:
            old: [n] int64 on the CPU.
            new: [n] int64 on the CPU.

        Returns:
            Two tensors [n, pairs], float32 on the CPU.
        """
        angles = self._angles(new) - self._angles(old)
        return angles.cos().float(), angles.sin().float()

    def apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Keys turned in float32 and rounded once to their dtype; a new tensor.

        A key's bits do not depend on the keys beside it.

        Args:
            keys: [n, kv_heads, k_dim], of any strides.
            cos: [n, pairs] float32, on the device of the keys.
            sin: as `cos`.
        """
        turned = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        for still in (slice(self.start), slice(self.start + 2 * len(self.frequencies), None)):
            turned[..., still] = keys[..., still]
        block = max(1, _BLOCK // max(1, keys[:1].numel()))
        for begin in range(0, len(keys), block):
            part = slice(begin, begin + block)
            c, s = cos[part].unsqueeze(1), sin[part].unsqueeze(1)
            x, y = (half.float() for half in self._pairs(keys[part]))
            to_x, to_y = self._pairs(turned[part])
            to_x.copy_((x * c).sub_(y * s))
            to_y.copy_((x * s).add_(y * c))
        return turned

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions.float().unsqueeze(1) * self.frequencies).double()

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and of the second elements of all pairs, [n, kv_heads, pairs]."""
        pairs = len(self.frequencies)
        turning = keys[..., self.start : self.start + 2 * pairs]
        if self.interleaved:
            return turning[..., 0::2], turning[..., 1::2]
        return turning[..., :pairs], turning[..., pairs:]
