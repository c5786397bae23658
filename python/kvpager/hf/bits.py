"""Raw bits of tensors."""

from __future__ import annotations

import torch

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, of x's shape."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and raw bits are the same; NaN equals NaN, -0 differs from +0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))
