"""Linear layers of an engine's forwards through kvpager's own products.

A row has the same bits among any number of rows there, by one stated order of operations
(csrc/include/kvpager/linear.h). While an engine runs its model, and only in its thread (context),
`torch.nn.Linear` computes with it: the method of the class asks, and nothing is written to a model.
So `model()` and `model.generate` compute as before in every thread, also while an engine is open.

On a GPU, 16-bit dtypes are multiplied by tensor cores, in an order of operations of their own
(csrc/cuda/linear_tensor.cuh); float32 has the CPU's bits there too.

Experts of a mixture are products of the same order (expert_products.py), and so are those that
modules of transformers compute by a function (functions.py), as routers do. Sigmoids of theirs in
float32 have one path for every number of rows (sigmoid.py).

A layer whose weight is no plain tensor on the engine's device (quantised, of a library's own kind),
or of another dtype than its input, and every class with a forward of its own stay torch's. So does
every other model that is run within such a forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: F401, N812  # named by the method that is wrapped: TorchScript asks here
from torch import Tensor

from kvpager import _core
from kvpager._model.seam.sigmoid import sigmoid, takes_sigmoid

if TYPE_CHECKING:
    from kvpager.pager.device import PoolDevice

_PLAIN = (Tensor, torch.nn.Parameter)
_AVX2 = 3  # its level of x86-64


class Callers(NamedTuple):
    """Modules of a model that call functions which are computed here (functions.py).

    Attributes:
        modules: their ids.
        multiply: one of the functions is torch.nn.functional.linear.
    """

    modules: frozenset[int] = frozenset()
    multiply: bool = False


_NO_CALLERS = Callers()


class LinearLayers:
    """The linear layers of a model on the CPU, and the threads that compute them.

    Attributes:
        workers: the threads.
        known: ids of the layers.
        experts: ids of the configurations whose experts are computed here too.
        callers: modules whose calls of functions are.
        compressed: copies of weights that are read in place of them; None: there are none.
        device_type: torch's, of the weights.
        version: whose products they are, and of which order of operations.
    """

    device_type = "cpu"
    version = f"kvpager {_core.LINEAR_VERSION}"
    experts: frozenset[int] = frozenset()
    callers: Callers = _NO_CALLERS
    compressed: _core.CompressedWeights | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        workers: _core.Workers,
        *,
        experts: frozenset[int] = frozenset(),
        callers: Callers = _NO_CALLERS,
    ) -> None:
        self.workers = workers
        self.experts = experts
        self.callers = callers
        if experts:
            self.version += ", experts"
        if callers.multiply:
            self.version += ", functional"
        exchange()
        # By identity: a hook may run another model within a forward, which computes as it is.
        self.known = frozenset(
            id(module)
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and type(module).forward is _exchanged
        )

    def weights(self, model: torch.nn.Module) -> Iterator[Tensor]:
        """Weights of layers and experts whose products are computed here, each once.

        model: the one that these layers were made of.
        """
        seen = set()
        for module in model.modules():
            known = id(module) in self.known
            experts = id(getattr(module, "config", None)) in self.experts
            for weight in module.parameters(recurse=False):
                wanted = (known and weight.ndim == 2) or (experts and weight.ndim == 3)
                if wanted and type(weight) in _PLAIN and id(weight) not in seen:
                    seen.add(id(weight))
                    yield weight

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor | None:
        """As `product` of this module, or of the matrices `chosen` as `product_of_experts`."""
        if chosen is None:
            return product(self.workers, x, weight, bias, self.compressed)
        return product_of_experts(self.workers, x, weight, bias, chosen, self.compressed)

    def sigmoid(self, x: Tensor) -> Tensor | None:
        """As `sigmoid` of sigmoid.py."""
        return sigmoid(x)


class LinearLayersOnDevice(LinearLayers):
    """The same of a model on a device of a pager, which computes them."""

    version = f"{LinearLayers.version}, tensor cores {_core.TENSOR_LINEAR_VERSION}"

    def __init__(
        self,
        model: torch.nn.Module,
        workers: _core.Workers,
        place: PoolDevice,
        *,
        callers: Callers = _NO_CALLERS,
    ) -> None:
        super().__init__(model, workers, callers=callers)
        self.device_type = place.tensors.type
        self._place = place
        self._device = _core.Device(place.name)

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor | None:
        """As `product` of this module, on the device and torch's current stream there."""
        if chosen is not None:
            return None
        multiply = functools.partial(self._device.linear, stream=self._place.stream)
        return _product(multiply, x, weight, bias)


_running: ContextVar[LinearLayers | None] = ContextVar("kvpager_linear", default=None)


def computing(layers: LinearLayers | None) -> _core.ContextValue:
    """Sets the layers that are computed here, in this context, within a `with`; None: none."""
    return _core.ContextValue(_running, layers)


def running_layers() -> LinearLayers | None:
    """The layers that are computed here, in this context."""
    return _running.get()


def computes_products() -> bool:
    """Whether linear layers of a model are computed here, in this context."""
    return _running.get() is not None


def takes(module: torch.nn.Module, *args: Tensor, **kwargs: Tensor) -> bool:
    """Whether what a module makes of a tensor is its product, computed here, in this context.

    It is tried, with the arguments of a call. A hook, a forward or a `__call__` of a module's own,
    or a weight of which no product is made here, leave it to torch.
    """
    layers = _running.get()
    if layers is None or id(module) not in layers.known:
        return False
    noting = Noting(layers)
    with torch.inference_mode(), computing(noting):
        made = module(*args, **kwargs)
    given = (*args, *kwargs.values())
    return any(made is out and any(x is each for each in given) for x, out in noting.products)


class StandIn(LinearLayers):
    """Stands in for other layers, with the same modules; None: for none."""

    def __init__(self, layers: LinearLayers | None) -> None:
        self.known = frozenset()
        vars(self).update({} if layers is None else vars(layers))
        self._layers = layers


class WithoutProducts(StandIn):
    """Stands in for the running ones where operations beside products are looked at.

    Linear layers are torch's, whose products the caller leaves out; those of experts and what is
    computed here of functions are zeros.
    """

    def __init__(self) -> None:
        super().__init__(_running.get())
        self.known = frozenset()

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor | None:
        """Zeros of the shape that a product has, where it is computed here."""
        if chosen is not None:
            return x.new_zeros((chosen.numel(), weight.shape[1]))
        assert self._layers is not None
        made = self._layers.product(x, weight, bias)
        return None if made is None else made.zero_()

    def sigmoid(self, x: Tensor) -> Tensor | None:
        """Zeros, where it is computed here."""
        return x.new_zeros(x.shape) if takes_sigmoid(x) else None


class Noting(StandIn):
    """Layers that are computed as they are, each product of which is noted with what it is of.

    Attributes:
        products: of linear layers, as pairs of what was multiplied and what came out.
        of_expert_rows: how many products of experts there were.
    """

    def __init__(self, layers: LinearLayers) -> None:
        super().__init__(layers)
        self.products: list[tuple[Tensor, Tensor]] = []
        self.of_expert_rows = 0

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor | None:
        """As the layers it stands in for; notes it."""
        assert self._layers is not None
        made = self._layers.product(x, weight, bias, chosen)
        if made is not None and chosen is None:
            self.products.append((x, made))
        self.of_expert_rows += made is not None and chosen is not None
        return made


def product(
    workers: _core.Workers,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    compressed: _core.CompressedWeights | None = None,
) -> Tensor | None:
    """X [..., k] times weight [n, k] transposed, plus bias [n]: [..., n] in x's dtype, on the CPU.

    Args:
        workers: the threads.
        x: [..., k].
        weight: [n, k].
        bias: [n]; None: none.
        compressed: copies of weights, read in place of these where they have them; change no bit.

    Returns:
        None: a tensor is not on the CPU or not a plain one, dtypes differ or are none of float32,
        float16 and bfloat16, or shapes do not fit.
    """
    multiply = functools.partial(_core.linear, workers, compressed=compressed)
    return _product(multiply, x, weight, bias)


def product_of_experts(
    workers: _core.Workers,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Tensor,
    compressed: _core.CompressedWeights | None = None,
) -> Tensor | None:
    """Each row of x times the matrices that it chose, transposed: [M * c, n] in x's dtype.

    Args:
        workers: the threads.
        x: [M, k], or [M * c, k] with a row for each choice.
        weight: [experts, n, k].
        bias: [experts, n]; None: none.
        chosen: [M, c] int64, the matrix of each row of the result.
        compressed: as `product` takes it.

    Returns:
        None: as `product`.

    Raises:
        InvalidArgumentError: there is no such matrix.
    """
    tensors = [x, weight, chosen] if bias is None else [x, weight, chosen, bias]
    if any(type(each) not in _PLAIN for each in tensors) or weight.ndim != 3 or x.ndim != 2:
        return None
    out = x.new_empty((chosen.numel(), weight.shape[1]))
    x, chosen = x.contiguous(), chosen.contiguous()
    made = _core.linear_of_experts(workers, x, weight, bias, chosen, out, compressed=compressed)
    return out if made else None


def _product(
    multiply: Callable[..., bool], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """The same by `multiply`, which takes x, weight, bias and where the product is written."""
    if type(weight) not in _PLAIN or type(x) not in _PLAIN or x.ndim == 0:
        return None
    if bias is not None and type(bias) not in _PLAIN:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out if multiply(x, weight, bias, out) else None


def has_products() -> bool:
    """Whether kvpager has products of linear layers for this processor: from AVX2 on."""
    return _core.processor()["level"] >= _AVX2


def has_fast_products(dtype: torch.dtype, processor: dict[str, int] | None = None) -> bool:
    """Whether kvpager's products are faster than torch's, by a measured rule (docs/design/04).

    processor: as `_core.processor()` tells it, which is asked for None.
    """
    processor = _core.processor() if processor is None else processor
    if dtype == torch.bfloat16 and processor["level"] > _AVX2:
        # Without the instruction whose order they keep they take several, where torch's library has
        # kernels of its own; AMX tiles, which it uses, are faster than the instruction.
        return bool(processor["bf16"] and not processor["amx"])
    # With AVX2 alone torch has bfloat16 and float16 in plain loops.
    known = (torch.float32, torch.bfloat16, torch.float16)
    return dtype in known and processor["level"] >= _AVX2


def exchange() -> str:
    """Patches `torch.nn.Linear.forward` to dispatch to kvpager, if it is torch's.

    Somebody else may have put that back since, or something of their own in its place, which then
    computes all layers.

    Returns:
        Whose forward it is, if neither torch's nor kvpager's; empty otherwise.
    """
    global _exchanged  # the state of the class, which every engine shares
    own: Any = torch.nn.Linear.forward
    if own is _exchanged:
        return ""
    if _file_of(own) != _TORCHS:
        return (
            f"{getattr(own, '__module__', '')}.{getattr(own, '__qualname__', type(own).__name__)}"
        )
    if _exchanged is None or _exchanged.__wrapped__ is not own:
        _exchanged = _asking(own)
    torch.nn.Linear.forward = _exchanged  # type: ignore[method-assign]
    return ""


_TORCHS = inspect.getsourcefile(torch.nn.Linear)
_exchanged: Any = None  # what this module has put in the place of torch's


def _file_of(function: Any) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def _asking(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(own)
    def forward(self: torch.nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
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

    return forward


exchange()
