"""Digests of a model's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from blake3 import blake3

from kvpager.held import held_by

_BLOCK = 64 << 20  # bytes hashed at a time
_SHARE = 2 << 20  # bytes of a block for each thread, with which starting it pays

Progress = Callable[[int, int], object]


def weights_digest(model: Any, progress: Progress | None = None) -> str:
    """BLAKE3 over name, shape, dtype and bytes of every live parameter and buffer, in hex.

    Of a quantised weight it covers all tensors that the weight is made of, and the settings they
    are read with. It hashes live tensors, not files, so it covers an adapter that is active in
    memory. Hashes a gigabyte or more per second and thread; resistant to collisions.

    Args:
        model: the model.
        progress: called with (bytes hashed, bytes in all), from this thread.
    """
    return _digest(model, progress, blake3, _blake3)


def old_weights_digest(model: Any) -> str:
    """The digest in snapshots of 1.0 and 1.1: XXH3-128, not resistant to collisions."""
    return _digest(model, None, xxhash.xxh3_128, xxhash.xxh3_128_digest)


def _digest(
    model: Any,
    progress: Progress | None,
    hasher: Callable[[], Any],
    of_block: Callable[[Any], bytes],
) -> str:
    held = held_by(model)
    tensors = sorted(held.tensors, key=lambda item: item[0])
    total = sum(tensor.nbytes for _, tensor in tensors)
    report = progress or (lambda done, total: None)
    summary = hasher()
    done = 0
    report(done, total)
    for name, tensor in tensors:
        summary.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        for block in _blocks(tensor):
            summary.update(of_block(_on_host(block).numpy()))
            done += len(block)
            report(done, total)
    if held.settings:
        settings = sorted(held.settings, key=lambda item: item[0])
        summary.update(json.dumps(settings, separators=(",", ":")).encode())
    return str(summary.hexdigest())


def _blake3(block: Any) -> bytes:
    # Threads of its own: an interrupt can make a Python executor wait forever, and a shared pool
    # has no threads in a forked child.
    threads = max(1, min(8, os.cpu_count() or 1, len(block) // _SHARE))
    return blake3(block, max_threads=threads).digest()


def _on_host(block: torch.Tensor) -> torch.Tensor:
    if not block.is_cuda:
        return block
    host = torch.empty(len(block), dtype=torch.uint8, device="cpu", pin_memory=True)
    return host.copy_(block)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's bytes in logical order, in blocks; copied only if it is not contiguous."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    raw = plain.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, max(1, len(raw)), _BLOCK):
        yield raw[start : start + _BLOCK]
