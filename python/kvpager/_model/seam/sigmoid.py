"""Sigmoid in float32 on a CPU, of which every element has the bits of torch's vectors.

torch computes what fills two vectors with one approximation of the exponential and the elements
left over with another (aten/src/ATen/native/cpu/Loops.h, `vectorized_loop`); one result in twenty
differs. So a gate of one number for a row has other bits for few rows than for many. Here torch
computes whole vectors alone, in one thread each, so that no element is left over.
"""

from __future__ import annotations

import torch

# Elements that torch computes at once, in every dtype and on every processor, and the most that it
# does not share out among threads (at::internal::GRAIN_SIZE).
TORCH_STEP = 64
TORCH_SHARE = 32768


def takes_sigmoid(x: torch.Tensor) -> bool:
    """Whether that of x is computed here: in float32, on the CPU, of a plain tensor.

    Of 16-bit dtypes both ways of torch give the same.
    """
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return plain and x.device.type == "cpu" and x.dtype == torch.float32


def sigmoid(x: torch.Tensor) -> torch.Tensor | None:
    """1 / (1 + e^-x) of each element of x, in x's shape and contiguous; None: it is not taken."""
    if not takes_sigmoid(x):
        return None
    elements = x.reshape(-1)
    padded = torch.nn.functional.pad(elements, (0, -len(elements) % TORCH_STEP))
    shares = [torch.sigmoid(share) for share in torch.split(padded, TORCH_SHARE)]
    return torch.cat(shares)[: len(elements)].view(x.shape)
