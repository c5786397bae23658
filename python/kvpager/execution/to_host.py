"""Copies logits from the model's device to the CPU, where tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable

import torch


class ToHost:
    """Copies tensors to the CPU: starts the copy at once and waits when the result is read.

    Copies from a GPU go through one pinned buffer and run while the host goes on. The caller has to
    read each result before the next copy starts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts a copy; returns a function that waits for it. May be called more than once."""
        if self._device.type == "cpu":
            return lambda: tensor
        if not tensor.numel():
            return tensor.cpu
        pinned = self._buffer(tensor.nbytes)[: tensor.nbytes]
        arriving = pinned.view(tensor.dtype).view(tensor.shape)
        arriving.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        arrived: list[torch.Tensor] = []

        def wait() -> torch.Tensor:
            if not arrived:
                done.synchronize()
                arrived.append(arriving.clone())
            return arrived[0]

        return wait

    def _buffer(self, size: int) -> torch.Tensor:
        if self._pinned is None or len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._pinned
