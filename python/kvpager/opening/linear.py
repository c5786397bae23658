"""Whose products the linear layers of an engine are: kvpager's, or torch's."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvpager import _core, numerics
from kvpager._version import __version__
from kvpager.errors import UnsupportedModelError
from kvpager.hf.linear import product
from kvpager.remembered import recall, remember

_log = logging.getLogger(__name__)

# A layer of the shape that many models of hidden size 1024 have. More matrices than caches hold, so
# that weights come from memory, as they do in a decode step.
_OUTPUTS, _DEPTH = 3072, 1024
_BYTES = 96 << 20
_MANY = 256
_STEPS = 32  # forwards of one row for each of 256: an answer is about as long as its prompt
_RUNS = 3
_CLEARLY = 1.1  # torch's are taken where they are so many times as fast: nearly equal times vary


def use_own_products(asked: str, model: Any, workers: _core.Workers) -> bool:
    """Whether an engine's linear layers are kvpager's own products.

    Args:
        asked: `PagerConfig.linear`.
        model: whose they are.
        workers: the threads that would compute them.

    Raises:
        UnsupportedModelError: "kvpager" for a model on a GPU.
    """
    on_cpu = model.device.type == "cpu"
    if asked == "kvpager" and not on_cpu:
        raise UnsupportedModelError(
            f'PagerConfig.linear is "kvpager" and the model is on {model.device}; those products '
            'run on the CPU alone: expected "auto" or "torch"'
        )
    if asked != "auto" or not on_cpu:
        return asked == "kvpager"
    return model.dtype in (torch.float32, torch.float16, torch.bfloat16) and _faster(
        model.dtype, workers
    )


def _faster(dtype: torch.dtype, workers: _core.Workers) -> bool:
    """What was found on this machine before, or is found now: about a tenth of a second."""
    key = {
        "kvpager": __version__,
        "linear": _core.LINEAR_VERSION,
        "isa": _core.isa_name(),
        "torch": torch.__version__,
        "processor": numerics.describe_processor(torch.device("cpu")),
        "threads": [workers.threads, torch.get_num_threads()],
        "dtype": str(dtype),
    }
    known = recall("linear", key)
    if isinstance(known, bool):
        return known
    with torch.inference_mode():
        own, torchs = measured(dtype, workers)
    _log.info(
        "linear layers in %s: %.1f ms with kvpager's products, %.1f ms with torch's, for %d "
        "forwards of one row and one of %d",
        dtype,
        own * 1e3,
        torchs * 1e3,
        _STEPS,
        _MANY,
    )
    return bool(remember("linear", key, own <= _CLEARLY * torchs))


def measured(dtype: torch.dtype, workers: _core.Workers) -> tuple[float, float]:
    """Seconds of a layer in 32 forwards of one row and one of 256: kvpager's and torch's."""
    bytes_each = _OUTPUTS * _DEPTH * dtype.itemsize
    copies = max(2, _BYTES // bytes_each)
    weights = torch.randn(copies, _OUTPUTS, _DEPTH, device="cpu").to(dtype)
    x = torch.randn(_MANY, _DEPTH, device="cpu").to(dtype)

    def own(rows: int, weight: torch.Tensor) -> None:
        product(workers, x[:rows], weight)

    def torchs(rows: int, weight: torch.Tensor) -> None:
        torch.nn.functional.linear(x[:rows], weight)

    ways: list[Callable[[int, torch.Tensor], None]] = [own, torchs]
    seconds = [[0.0] * _RUNS, [0.0] * _RUNS]
    for run in range(_RUNS):  # one after the other, so that both meet what else the machine does
        for way, found in zip(ways, seconds):
            one = [_timed(way, 1, weight) for weight in weights]
            found[run] = _STEPS * statistics.median(one) + _timed(way, _MANY, weights[0])
    return min(seconds[0]), min(seconds[1])


def _timed(way: Callable[[int, torch.Tensor], None], rows: int, weight: torch.Tensor) -> float:
    start = time.perf_counter()
    way(rows, weight)
    return time.perf_counter() - start
