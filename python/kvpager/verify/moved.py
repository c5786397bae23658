"""A second pass: calls in another order, other tokens, memory elsewhere.

A fault that hangs on what was called before, on what a freed block held or on where a tensor lies
shows in one of many calls, and always the same ones where calls come in one order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvpager.verify.relations import RELATIONS, Relation

LABEL = "calls moved"
_TENSORS, _MOST_BYTES = 64, 1 << 16


def moved_order(seed: int) -> list[Relation]:
    """The relations that a second pass checks, in an order of its own.

    Those that start fresh processes are left out: there all is new each time.
    """
    again = [
        relation
        for relation in RELATIONS
        if not (relation.processes or relation.of_kernels or relation.up_to_rounding)
    ]
    order = again[1:]
    random.Random(seed).shuffle(order)
    if order == again[1:]:
        order.reverse()
    return [again[0], *order]


@contextmanager
def memory_moved(seed: int) -> Iterator[Sequence[torch.Tensor]]:
    """While open, tensors of odd sizes lie between others, and holes where some were let go."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, _MOST_BYTES) for _ in range(_TENSORS)]
    held = [torch.full((size,), 0xA5, dtype=torch.uint8, device="cpu") for size in sizes]
    draw.shuffle(held)
    del held[_TENSORS // 2 :]
    yield held
