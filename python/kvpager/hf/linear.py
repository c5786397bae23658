"""Linear layers of an engine's forwards through kvpager's own products.

A row has the same bits among any number of rows there, by one stated order of operations
(csrc/include/kvpager/linear.h). While an engine runs its model, and only in its thread (context),
`torch.nn.Linear` computes with it: the method of the class asks, and nothing is written to a model.
So `model()` and `model.generate` compute as before in every thread, also while an engine is open.

On a GPU, 16-bit dtypes are multiplied by tensor cores, in an order of operations of their own
(csrc/cuda/linear_tensor.cuh); float32 has the CPU's bits there too.

A layer whose weight is no plain tensor on the engine's device (quantised, of a library's own kind),
or of another dtype than its input, and every class with a forward of its own stay torch's. So does
every other model that is run within such a forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # as the method that is wrapped calls it: TorchScript asks here

from kvpager import _core

if TYPE_CHECKING:
    from kvpager.pager.device import Place

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LinearLayers:
    """The linear layers of a model on the CPU, and the threads that compute them.

    Attributes:
        workers: the threads.
        known: ids of the layers.
        device_type: torch's, of the weights.
        version: whose products they are, and of which order of operations.
    """

    device_type = "cpu"
    version = f"kvpager {_core.LINEAR_VERSION}"

    def __init__(self, model: torch.nn.Module, workers: _core.Workers) -> None:
        self.workers = workers
        # By identity: a hook may run another model within a forward, which computes as it is.
        self.known = frozenset(
            id(module)
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
            and type(module).forward is torch.nn.Linear.forward
        )

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `product` of this module, in these threads."""
        return product(self.workers, x, weight, bias)


class LinearLayersOnDevice(LinearLayers):
    """The same of a model on a device of a pager, which computes them."""

    version = f"{LinearLayers.version}, tensor cores {_core.TENSOR_LINEAR_VERSION}"

    def __init__(self, model: torch.nn.Module, workers: _core.Workers, place: Place) -> None:
        super().__init__(model, workers)
        self.device_type = place.tensors.type
        self._place = place
        self._device = _core.Device(place.name)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `product` of this module, on the device and torch's current stream there."""
        multiply = functools.partial(self._device.linear, stream=self._place.stream)
        return _product(multiply, x, weight, bias)


_running: ContextVar[LinearLayers | None] = ContextVar("kvpager_linear", default=None)


def computing(layers: LinearLayers | None) -> _core.ContextValue:
    """Has these layers computed here, in this context, within a `with`; None: none."""
    return _core.ContextValue(_running, layers)


def computes_products() -> bool:
    """Whether linear layers of a model are computed here, in this context."""
    return _running.get() is not None


def takes(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module's product with rows of a dtype is computed here, in this context."""
    layers = _running.get()
    if layers is None or id(module) not in layers.known or dtype not in _DTYPES:
        return False
    parameters = (x for x in (module.weight, module.bias) if x is not None)
    return all(_suits(x, dtype, layers.device_type) for x in parameters)


def _suits(x: object, dtype: torch.dtype, device_type: str) -> bool:
    return (
        type(x) in _PLAIN
        and isinstance(x, torch.Tensor)
        and x.dtype == dtype
        and x.device.type == device_type
        and x.stride(-1) == 1
    )


def product(
    workers: _core.Workers,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """X [..., k] times weight [n, k] transposed, plus bias [n]: [..., n] in x's dtype, on the CPU.

    Returns:
        None: a tensor is not on the CPU or not a plain one, dtypes differ or are none of float32,
        float16 and bfloat16, or shapes do not fit.
    """
    return _product(functools.partial(_core.linear, workers), x, weight, bias)


def _product(
    multiply: Callable[..., bool],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """The same by `multiply`, which takes x, weight, bias and where the product is written."""
    if type(weight) not in _PLAIN or type(x) not in _PLAIN or x.ndim == 0:
        return None
    if bias is not None and type(bias) not in _PLAIN:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out if multiply(x, weight, bias, out) else None


def _exchange(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(own)
    def forward(self: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if torch.compiler.is_compiling():  # the caller's own graph, which no engine runs
            return own(self, input)
        layers = _running.get()
        if (
            layers is not None
            and id(self) in layers.known
            and not torch.is_autocast_enabled(layers.device_type)
        ):
            out = layers.product(input, self.weight, self.bias)
            if out is not None:
                return out
        return own(self, input)

    forward._of_kvpager = True  # type: ignore[attr-defined]  # noqa: SLF001  # our own function
    return forward


if not hasattr(torch.nn.Linear.forward, "_of_kvpager"):
    torch.nn.Linear.forward = _exchange(torch.nn.Linear.forward)  # type: ignore[method-assign]

__all__ = [
    "F",
    "LinearLayers",
    "LinearLayersOnDevice",
    "computes_products",
    "computing",
    "product",
    "takes",
]
