"""Which operations of torch a forward consists of: below modules, where kernels are chosen.

A forward is recorded without its matrix products, which cost nearly all of its time: they give
zeros of their shape. What follows are then zeros too, but of the shapes, strides and dtypes of a
real forward, and nothing else decides a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvpager import _core
from kvpager._model.seam.hooks import Watch
from kvpager._model.seam.linear import WithoutProducts, computing
from kvpager.errors import UnsupportedModelError

_ALIGNMENT = 64  # bytes: a processor's cache line, to which torch aligns what it allocates
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"})
# Copies, places and selects numbers. None of these computes one.
_MOVES = frozenset(
    {"_unsafe_view", "arange", "cat", "clone", "constant_pad_nd", "contiguous", "detach"}
    | {"embedding", "empty", "empty_like", "fill", "flip", "full", "full_like", "gather"}
    | {"index", "index_put", "index_select", "lift_fresh", "masked_fill", "new_empty"}
    | {"new_empty_strided", "empty_strided", "new_full", "new_ones", "new_zeros", "ones"}
    | {"ones_like", "repeat", "roll", "scalar_tensor", "scatter", "stack", "zero", "zeros"}
    | {"zeros_like", "_local_scalar_dense", "_assert_async", "nonzero", "slice_scatter"}
    | {"select_scatter", "tril", "triu", "is_nonzero", "where", "item", "eye"}
)
# Of each element alone, as torch's own tag says of most.
_BY_ELEMENT = frozenset({"polar", "complex"})
# Of each row alone, by what they are defined to be; whether they are is tried.
_BY_ROW = frozenset(
    {"_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "cumsum", "cumprod"}
    | {"topk", "sort", "argsort", "kthvalue", "linalg_vector_norm", "norm", "var_mean"}
    | {"std_mean", "logcumsumexp", "_fused_rms_norm", "cummax"}
    | {"_to_copy", "copy", "max", "min", "bucketize", "searchsorted"}
)

POINTWISE, BY_ROW, PRODUCT, MOVE, UNKNOWN = "pointwise", "by row", "product", "move", "unknown"


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor but its content: what a kernel is chosen by.

    Attributes:
        offset: bytes from the last aligned address.
        tried: it is a weight whose product was tried as a part of the model.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    tried: bool

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Operation:
    """One call.

    Attributes:
        op: the function.
        arguments: positional ones, then pairs of name and value; tensors are TensorSpec.
        results: its tensors.
        in_part: within a module that is tried alone, with the weights it has.
    """

    op: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    results: tuple[TensorSpec, ...]
    in_part: bool = False

    @property
    def name(self) -> str:
        """Without overload and the underscore of one that writes to its argument."""
        return base_name(self.op)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Its tensor arguments, in order."""
        return specs_in((self.arguments, self.named))

    @property
    def kind(self) -> str:
        """How it is tried: POINTWISE, BY_ROW, PRODUCT; MOVE and UNKNOWN are not."""
        return kind_of(self.op)

    @property
    def settings(self) -> tuple[Any, ...]:
        """All but the tensors: equal for two calls that do the same to other tensors."""
        given = (self.arguments, self.named)
        settings: tuple[Any, ...] = tree_map_only(TensorSpec, lambda spec: spec.dtype, given)
        return settings

    def __str__(self) -> str:
        return f"{self.name} of {' and '.join(map(str, self.tensors))}"


def base_name(op: Any) -> str:
    """`add` of aten.add_.Tensor."""
    name: str = op.overloadpacket.__name__
    return name if name.startswith("_") else name.removesuffix("_")


def kind_of(op: Any) -> str:
    """One of the kinds above."""
    name = base_name(op)
    if op.namespace not in ("aten", "prims"):
        return UNKNOWN
    if op.is_view or name in _MOVES:
        return MOVE
    if name in _PRODUCTS:
        return PRODUCT
    if name in _BY_ROW or torch.Tag.reduction in op.tags:
        return BY_ROW
    by_element = name in _BY_ELEMENT or torch.Tag.pointwise in op.tags
    return POINTWISE if by_element else UNKNOWN


def specs_in(value: Any) -> tuple[TensorSpec, ...]:
    """The tensors of recorded arguments, in order."""
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorSpec))


def rebuilt(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Recorded arguments, with their TensorSpecs replaced by tensors."""
    return tree_map_only(TensorSpec, lambda _: next(tensors), value)


def recorded(
    call: Callable[[], object],
    tried: frozenset[int] = frozenset(),
    parts: Sequence[torch.nn.Module] = (),
) -> list[Operation]:
    """Every operation of a call that computes something, in order. Products give zeros meanwhile.

    Args:
        call: what to run, in this thread.
        tried: addresses of weights whose products were tried otherwise.
        parts: modules that were tried alone, with the weights they have.
    """
    recorder = _OperationRecorder(tried)
    try:
        # Entered and left natively, so that an interrupt cannot strike in between: torch enters and
        # leaves a mode in several steps of Python, and a mode left active would zero all products.
        with (
            recorder.inside(parts),
            computing(WithoutProducts()),  # so that whose they are does not matter
            _core.ContextValue(_active, recorder),
            recorder,
        ):
            call()
    finally:
        _take_left_behind()
    return recorder.operations


_active: ContextVar[_OperationRecorder | None] = ContextVar("kvpager_recording", default=None)


def _take_left_behind() -> None:
    """Takes away modes that an interrupt has kept torch from taking away."""
    stack = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # no public way
    while stack() and isinstance(torch._C._get_dispatch_stack_at(stack() - 1), _OperationRecorder):  # noqa: SLF001
        torch._C._pop_torch_dispatch_stack(None)  # noqa: SLF001


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is the active one, notes every operation; otherwise does nothing to any."""

    def __init__(self, tried: frozenset[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._tried = tried
        self._whole: set[Any] = set()  # functions that call no others
        self._part: torch.nn.Module | None = None  # that runs

    def inside(self, parts: Sequence[torch.nn.Module]) -> AbstractContextManager[object]:
        """While entered, notes which operations are of these modules."""

        def begin(module: torch.nn.Module, *_: Any) -> None:
            self._part = self._part or module

        def end(module: torch.nn.Module, *_: Any) -> None:
            self._part = None if self._part is module else self._part

        return Watch(parts[0], lambda *_: None, parts, begin, end) if parts else nullcontext()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`, or gives zeros for it."""
        kwargs = kwargs or {}
        if _active.get() is not self:
            return func(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it calls functions of the tensors that it is made of
        if func not in self._whole:
            with self:  # what a composite function calls comes here too
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
            self._whole.add(func)
        kind = kind_of(func)
        if kind == MOVE:
            return _gathered(func, args) if base_name(func) == "index" else func(*args, **kwargs)
        arguments, named = self._noted(args), self._noted(tuple(kwargs.items()))
        made = _zeros(base_name(func), args) if kind == PRODUCT else func(*args, **kwargs)
        results = specs_in(self._noted((made,)))
        part = self._part is not None
        self.operations.append(Operation(func, arguments, named, results, part))
        return made

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                layout = str(value.layout).removeprefix("torch.")
                raise UnsupportedModelError(
                    f"an operation of a forward takes a {layout} tensor, and its rows cannot be "
                    "tried alone; call to_dense() on it once, or set exact=False"
                )
            offset = int(value.storage_offset()) * value.element_size() % _ALIGNMENT
            tried = value.data_ptr() in self._tried
            return TensorSpec(tuple(value.shape), value.stride(), value.dtype, offset, tried)
        return tuple(map(self._noted, value)) if isinstance(value, (tuple, list)) else value


def _zeros(name: str, args: tuple[Any, ...]) -> torch.Tensor:
    """The product, if one of its factors is zero."""
    first, second = args[1:3] if name.startswith(("add", "badd")) else args[:2]
    shape = (*first.shape[:-1], *second.shape[-1:]) if second.ndim > 1 else first.shape[:-1]
    zeros: torch.Tensor = first.new_zeros(shape)
    return zeros


def _gathered(func: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Rows of a tensor; of matrices, room alone, as one per row takes long."""
    x, index = args[:2]
    if x.ndim < 3 or len(index) != 1 or index[0] is None or index[0].is_floating_point():
        rows: torch.Tensor = func(*args)
        return rows
    unwritten: torch.Tensor = x.new_empty((*index[0].shape, *x.shape[1:]))
    return unwritten  # and unread: the product that it is for is not computed
