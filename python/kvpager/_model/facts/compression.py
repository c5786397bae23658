"""Lossless copies of the weights of an engine's linear layers, which take less time to be read.

A forward of few rows takes as long as its weights take to be read from memory, and 12 bits are
enough for nearly every bfloat16 of a model (csrc/include/kvpager/compressed_weights.h). The bits of
a forward are the same: numbers are unpacked in the processor's registers and multiplied as before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kvpager import _core
from kvpager._model.model_facts import Products
from kvpager._model.seam.linear import LinearLayers
from kvpager.config import PagerConfig, free_memory
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.pager.device import PoolDevice
from kvpager.plan.memory import COPY_BYTES
from kvpager.progress import Progress, reporting_bytes

_log = logging.getLogger(__name__)


def check_compression(config: PagerConfig, products: Products, place: PoolDevice) -> None:
    """Raises InvalidArgumentError: copies are asked for, and no layer could read them."""
    if not config.compress_weights or products == "processor":
        return
    where = "the CPU" if place.tensors.type == "cpu" else place.name
    raise InvalidArgumentError(
        f"compress_weights is True, but linear layers are not kvpager's products on the CPU (linear"
        f" is {config.linear!r}, the engine on {where}); expected False, or "
        'linear="kvpager" on the CPU'
    )


def compress_weights(
    model: torch.nn.Module,
    layers: LinearLayers | None,
    workers: _core.Workers,
    progress: Progress,
) -> None:
    """Copies the weights of a model's linear layers and experts, as far as 12 bits can hold them.

    progress: as in `kvpager.Engine`, in bytes of weights.

    Raises:
        CapacityError: there is not enough memory for them.
    """
    assert layers is not None  # check_compression
    weights = list(layers.weights(model))
    total = sum(weight.nbytes for weight in weights)
    _check_room(weights)
    copies = _core.CompressedWeights()
    done = 0
    with reporting_bytes(progress, "compress weights") as report:
        report(done, total)
        for weight in weights:
            copies.add(workers, weight)
            done += weight.nbytes
            report(done, total)
    layers.compressed = copies
    _log.info(
        "compress_weights: copies of %d bytes stand for %d of %d bytes of weights",
        copies.bytes,
        copies.weight_bytes,
        total,
    )
    if not copies.bytes:
        _log.warning(
            "compress_weights: no weights were compressed, and forwards are as fast as before. "
            "Expected a model in bfloat16, or in float32 with weights of a bfloat16 checkpoint "
            "(this one is in %s), and a processor with AVX2",
            str(model.dtype).removeprefix("torch."),
        )


def _check_room(weights: Sequence[torch.Tensor]) -> None:
    """Raises CapacityError; the system itself may promise memory that it does not have."""
    needed = sum(int(weight.numel() * COPY_BYTES) for weight in weights)
    free = free_memory()
    if needed > free:
        raise CapacityError(
            f"compress_weights is True, and copies of the weights take {needed:,} bytes, of which "
            f"{free:,} are free; leave it out, or free memory"
        )


def compressed_bytes(layers: LinearLayers | None) -> int:
    """Bytes that the copies of the weights of an engine's layers take."""
    copies = None if layers is None else layers.compressed
    return 0 if copies is None else copies.bytes
