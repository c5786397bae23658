"""Detects changed bytes of a model's weights, by reading a little of them at a time.

Writes through `.data`, as in training loops and weight synchronisation, change no counter, only the
bytes. Weights on the CPU are read natively: some bytes of every tensor at each call, the rest in
turns. On a GPU some elements are gathered there, at longer intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvpager import _core
from kvpager._model.weights.digests import checksum_seed

ROUND = 1024  # calls after which every byte on the CPU was read again
_GPU_EVERY = 64  # calls between two looks at a GPU's tensors
_GPU_ELEMENTS = 256  # compared in each tensor
_THOROUGH = 4  # as much as an ordinary call reads of each tensor
_EXPERTS_USED = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


class Contents:
    """Remembers what tensors held when this was made. Keeps their memory alive."""

    def __init__(self, model: Any, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        tensors = [tensor.detach().as_subclass(torch.Tensor) for _, tensor in named]
        self._names = [name for name, _ in named]
        self._kept = [tensor.untyped_storage() for tensor in tensors]
        self._on_cpu = [i for i, one in enumerate(tensors) if one.device.type == "cpu"]
        ranges = [_extent(tensors[i]) for i in self._on_cpu]
        self._seed = checksum_seed()
        self._ranges = {extent: number for number, extent in enumerate(ranges)}
        self._watch = _core.ByteWatch(ranges, torch.get_num_threads(), self._seed or 0)
        active = sum(
            bytes_ * _share_used(model, tensors[i]) for i, (_, bytes_) in zip(self._on_cpu, ranges)
        )
        self._bytes = int(active / ROUND) + 1
        self._elsewhere = [i for i, one in enumerate(tensors) if one.device.type == "cuda"]
        self._gathered = _Gathered([tensors[i] for i in self._elsewhere])
        self._calls = 0

    def digests(self, tensor: torch.Tensor, seed: int) -> bytes | None:
        """Of the bytes that a tensor held; None: these were not read, or with another seed."""
        plain = tensor.detach().as_subclass(torch.Tensor)
        extent = (plain.data_ptr(), plain.nbytes)
        number = self._ranges.get(extent) if plain.is_contiguous() else None
        if number is None or plain.device.type != "cpu" or seed != self._seed:
            return None
        return self._watch.digests(number)

    def changed(self, *, thorough: bool = False) -> str | None:
        """The name of a tensor that was found changed; None if none was."""
        self._calls += 1
        found = self._watch.sample(_THOROUGH if thorough else 1)
        if found < 0:
            found = self._watch.sweep(self._bytes)
        if found >= 0:
            return self._names[self._on_cpu[found]]
        if self._elsewhere and (thorough or self._calls % _GPU_EVERY == 0):
            other = self._gathered.changed()
            return None if other is None else self._names[self._elsewhere[other]]
        return None


class _Gathered:
    """Elements of tensors on a GPU, at random places that stay."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        # Not every operation knows numbers of a byte.
        self._tensors = [x.view(torch.uint8) if x.itemsize == 1 else x for x in tensors]
        self._places = [
            torch.randint(
                max(1, tensor.numel()),
                (min(tensor.numel(), _GPU_ELEMENTS),),
                generator=generator,
                device="cpu",
            ).to(tensor.device)
            for tensor in tensors
        ]
        self._before = self._read()

    def changed(self) -> int | None:
        """The number of a tensor that was found changed."""
        now = self._read()
        if not now or torch.equal(torch.cat(now), torch.cat(self._before)):
            return None
        return next(i for i, (a, b) in enumerate(zip(now, self._before)) if not torch.equal(a, b))

    def _read(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [
                torch.take(tensor, places).view(torch.uint8)
                for tensor, places in zip(self._tensors, self._places)
            ]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the memory that a tensor's elements lie in."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _share_used(model: Any, tensor: torch.Tensor) -> float:
    """The share of a tensor that a forward of one row reads: of experts, the few it chooses."""
    if tensor.ndim != 3:
        return 1.0
    used = max((getattr(model.config, name, None) or 0 for name in _EXPERTS_USED), default=0)
    return min(1.0, used / tensor.shape[0]) if used else 1.0
