"""Digests of a model's weights."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from blake3 import blake3

from kvpager import __version__, _core
from kvpager._model.weights.held import held_by
from kvpager._support.remembered import own_number, recall, remember

_BLOCK = 64 << 20  # bytes hashed at a time; whole MiB, of which each has its checksum
_SHARE = 2 << 20  # bytes of a block for each thread, with which starting it pays

_KIND = "weights"  # of what is remembered
_DIGEST_CHARACTERS = 64

Progress = Callable[[int, int], object]
Read = Callable[[torch.Tensor, int], bytes | None]


@dataclass(frozen=True)
class _Hash:
    """A hash of weights: `summary()` takes names, shapes, dtypes and the hashes of blocks."""

    summary: Callable[[], Any]
    of_block: Callable[[Any], bytes]


def weights_digest(model: Any, progress: Progress | None = None) -> str:
    """BLAKE3 over name, shape, dtype and bytes of every live parameter and buffer, in hex.

    Of a quantised weight it covers all tensors that the weight is made of, and the settings they
    are read with. It hashes live tensors, not files, so it covers an adapter that is active in
    memory. Hashes a gigabyte or more per second and thread; resistant to collisions.

    Args:
        model: the model.
        progress: called with (bytes hashed, bytes in all), from this thread.
    """
    (digest,) = _digests(model, [_BLAKE3], progress)
    return digest


def checksum_seed() -> int | None:
    """Of checksums of weights, the user's own; None: nothing can be remembered."""
    return own_number("checksums of weights")


def known_weights_digest(
    model: Any, progress: Progress | None = None, read: Read | None = None
) -> str:
    """`weights_digest`, taken from disk where the same weights have been hashed before.

    It is kept under a checksum of all that it is of: XXH3-128 of each KiB and of these hashes, with
    a seed of the user's own. That is several times as fast as BLAKE3. Other weights of one checksum
    cannot be made without the seed.

    Args:
        model: the model.
        progress: as in `weights_digest`; the bytes in all double where weights are not known.
        read: `ModelWatch.digests` of a watch that has read the model as it is.
    """
    seed = checksum_seed()
    if seed is None:
        return weights_digest(model, progress)
    report = progress or _nothing
    checksum = _seeded(seed)
    taken = None if read is None else lambda tensor: read(tensor, seed)
    (before,) = _digests(model, [checksum], report, taken)
    digest = recall(_KIND, _key(before))
    if _is_digest(digest):
        return str(digest)

    def report_on(done: int, total: int) -> None:
        report(total + done, 2 * total)

    # Not under the checksum from before: the same blocks are read for both.
    now, digest = _digests(model, [checksum, _BLAKE3], report_on)
    remember(_KIND, _key(now), digest)
    return digest


def _digests(
    model: Any,
    hashes: Sequence[_Hash],
    progress: Progress | None = None,
    taken: Callable[[torch.Tensor], bytes | None] | None = None,
) -> list[str]:
    """Digests, in hex, of everything that a model computes with, one for each hash.

    Args:
        model: the model.
        hashes: what hashes it.
        progress: as in `weights_digest`.
        taken: gives what the only hash is of a tensor's blocks; None: read them.
    """
    held = held_by(model)
    tensors = sorted(held.tensors, key=lambda item: item[0])
    total = sum(tensor.nbytes for _, tensor in tensors)
    report = progress or _nothing
    summaries = [one.summary() for one in hashes]
    done = 0
    report(done, total)
    for name, tensor in tensors:
        head = f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode()
        for summary in summaries:
            summary.update(head)
        known = None if taken is None else taken(tensor)
        if known is not None:
            summaries[0].update(known)
            done += tensor.nbytes
            report(done, total)
            continue
        for block in _blocks(tensor):
            # Not block.numpy(), after which the weight's memory could never be resized.
            read = np.from_dlpack(_on_host(block))
            for one, summary in zip(hashes, summaries):
                summary.update(one.of_block(read))
            done += len(block)
            report(done, total)
    if held.settings:
        settings = sorted(held.settings, key=lambda item: item[0])
        encoded = json.dumps(settings, separators=(",", ":")).encode()
        for summary in summaries:
            summary.update(encoded)
    return [str(summary.hexdigest()) for summary in summaries]


def _nothing(done: int, total: int) -> None:
    pass


def _threads(block: Any) -> int:
    # Threads of its own: an interrupt can make a Python executor wait forever, and a shared pool
    # has no threads in a forked child.
    return max(1, min(8, os.cpu_count() or 1, len(block) // _SHARE))


def _blake3(block: Any) -> bytes:
    return blake3(block, max_threads=_threads(block)).digest()


_BLAKE3 = _Hash(blake3, _blake3)


def _seeded(seed: int) -> _Hash:
    def of_block(block: Any) -> bytes:
        range_ = (block.ctypes.data, len(block))
        return _core.ByteWatch([range_], _threads(block), seed).digests(0)

    return _Hash(functools.partial(xxhash.xxh3_128, seed=seed), of_block)


def _key(checksum: str) -> dict[str, str]:
    return {"kvpager": __version__, "checksum": checksum}


def _is_digest(found: object) -> bool:
    return (
        isinstance(found, str)
        and len(found) == _DIGEST_CHARACTERS
        and set(found) <= set("0123456789abcdef")
    )


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
