"""Digests of a model's weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
import xxhash
from blake3 import blake3

_BLOCK = 64 << 20  # bytes per task, so that one large embedding keeps all threads busy

Progress = Callable[[int, int], object]


def weights_digest(model: Any, progress: Progress | None = None) -> str:
    """BLAKE3 over name, shape, dtype and bytes of every live parameter and buffer, in hex.

    Live tensors, not files: an adapter that is active in memory is part of it. A gigabyte or more
    per second and thread, and nobody can make other weights that have the same digest.

    Args:
        model: the model.
        progress: called with (bytes hashed, bytes in all), from this thread.
    """
    return _digest(model, progress, blake3, lambda block: blake3(block).digest())


def old_weights_digest(model: Any) -> str:
    """What snapshots of 1.0 and 1.1 have: XXH3-128, which whoever makes weights can collide."""
    return _digest(model, None, xxhash.xxh3_128, xxhash.xxh3_128_digest)


def _digest(
    model: Any,
    progress: Progress | None,
    hasher: Callable[[], Any],
    of_block: Callable[[Any], bytes],
) -> str:
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    total = sum(tensor.nbytes for _, tensor in tensors)
    report = progress or (lambda done, total: None)
    summary = hasher()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        hashed = [
            (name, tensor, [pool.submit(_of_block, part, of_block) for part in _blocks(tensor)])
            for name, tensor in tensors
        ]
        done = 0
        report(done, total)
        for part in as_completed([part for _, _, parts in hashed for part in parts]):
            done += part.result()[1]
            report(done, total)
        for name, tensor, parts in hashed:
            summary.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
            for part in parts:
                summary.update(part.result()[0])
    return str(summary.hexdigest())


def _of_block(block: torch.Tensor, digest: Callable[[Any], bytes]) -> tuple[bytes, int]:
    if block.is_cuda:
        host = torch.empty(len(block), dtype=torch.uint8, device="cpu", pin_memory=True)
        block = host.copy_(block)
    raw: Any = block.numpy()
    return digest(raw), len(block)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's bytes in logical order, in blocks; copied only if it is not contiguous."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, max(1, len(raw)), _BLOCK):
        yield raw[start : start + _BLOCK]
