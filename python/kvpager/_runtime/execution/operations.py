"""Calls of torch in operations of the core's programs (csrc/include/kvpager/program.h).

These are the operations whose result IEEE 754 states, as each element is computed in float32 and
rounded once, means, which the core sums in torch's order, SiLU and GELU with the exponential and
the tangent of torch's vectors, kvpager's own products, and attention, which is the running
forward's. A call of torch counts as known only if a program of it alone has the bits of torch's
function for many numbers (`Alike`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from kvpager import _core
from kvpager._model.seam.linear import product
from kvpager._model.seam.rows import same_bits
from kvpager._model.seam.sigmoid import TORCH_SHARE, TORCH_STEP
from kvpager._support.arguments import is_number

FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TWO = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), "multiply"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("sub", "__sub__", "subtract"), "subtract"),
}
_COPIES = {"to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "reshape"}
_TRIALS = 16
# The most elements that torch does not share out among threads (aten/src/ATen/native/cpu/
# Activation.cpp): those at the end of a share are computed one by one, by another function.
_TORCH_SHARE = {"silu": TORCH_SHARE, "gelu_tanh": 20000}

Operand: TypeAlias = "torch.Tensor | float | None"
# Of a tensor: its memory, as a key, and the bytes from there to its first element.
Locate: TypeAlias = Callable[[torch.Tensor], tuple[int, int]]


class Op(NamedTuple):
    """One operation of the core: out = name(*operands).

    call: of attention, its layer and keyword arguments; queries, keys, values and sinks are read.
    """

    name: str
    out: torch.Tensor
    operands: tuple[Operand, ...]
    call: tuple[int, dict[str, Any]] | None = None

    @property
    def read(self) -> list[torch.Tensor]:
        """The tensors that it reads."""
        return [each for each in self.operands if isinstance(each, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The one that it writes, and those that it reads."""
        return [self.out, *self.read]

    @property
    def loops(self) -> _Loops | None:
        """How it goes through their elements; None: it cannot."""
        return _loops(self.name, tuple((tuple(x.shape), x.stride()) for x in self.tensors))


def lower(function: Any, args: Any, kwargs: Any, made: Any) -> list[Op] | None:
    """Lowers a call of torch, or of `product`, that made a tensor to operations of the core.

    function: a function, or the name of a method. None: it is none that is known.
    """
    if not isinstance(made, torch.Tensor) or made.dtype not in FLOATS or not made.numel():
        return None
    ops = _lowered(function, args, kwargs, made)
    if ops is None or any(op.loops is None for op in ops):
        return None
    tensors = [each for op in ops for each in op.tensors]
    return (
        ops if all(each.dtype in FLOATS and each.device.type == "cpu" for each in tensors) else None
    )


def _lowered(function: Any, args: Any, kwargs: Any, made: torch.Tensor) -> list[Op] | None:
    if function is product:
        return _product(args[1:], made)
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    first = args[0] if args else None
    if name == "cat":
        return _cat(first, args[1:], kwargs, made)
    if not isinstance(first, torch.Tensor):
        return None
    if name in _COPIES:
        if first.numel() != made.numel():
            return None
        if first.shape == made.shape:
            return [Op("copy", made, (first,))]
        return [Op("copy", made.view(first.shape), (first,))] if made.is_contiguous() else None
    if name == "mean":
        return _mean(first, args[1:], kwargs, made)
    if name == "silu":
        given = dict(zip(("inplace",), args[1:]), **kwargs)
        return None if any(given.values()) else _activation("silu", first, made)
    if name == "gelu":
        return _activation("gelu_tanh", first, made) if kwargs == {"approximate": "tanh"} else None
    if kwargs:
        return None
    if name in _TWO and len(args) == 2:
        return _two(_TWO[name], first, args[1], made)
    if name in ("neg", "__neg__") and first.dtype == made.dtype:
        return [Op("negate", made, (first,))]
    single = first.dtype == made.dtype == torch.float32
    if name in ("pow", "__pow__") and single and len(args) == 2 and _number(args[1]) == 2:
        return [Op("square", made, (first,))]
    if name == "rsqrt" and single:
        return [Op("rsqrt", made, (first,))]
    return None


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _two(name: str, a: torch.Tensor, b: object, made: torch.Tensor) -> list[Op] | None:
    if isinstance(b, torch.Tensor):
        # Tensors of no dimension are rounded to the other's dtype first.
        promoted = a.ndim and b.ndim and torch.promote_types(a.dtype, b.dtype) == made.dtype
        return [Op(name, made, (a, b))] if promoted else None
    number = _number(b)
    if number is None or a.dtype != torch.float32 or made.dtype != torch.float32:
        return None
    return [Op(name, made, (a, number))]


def _mean(a: torch.Tensor, args: Any, kwargs: Any, made: torch.Tensor) -> list[Op] | None:
    given = dict(zip(("dim", "keepdim"), args), **kwargs)
    dim = given.pop("dim", None)
    keep = given.pop("keepdim", False)
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    if given or len(dims) != 1 or dims[0] not in (-1, a.ndim - 1) or a.ndim == 0:
        return None
    if a.dtype != torch.float32 or made.dtype != torch.float32:
        return None
    return [Op("mean", made if keep else made.unsqueeze(-1), (a,))]


def _activation(name: str, a: torch.Tensor, made: torch.Tensor) -> list[Op] | None:
    """Lowers an activation that torch computes in vectors only, and in one thread."""
    whole = a.is_contiguous() and made.is_contiguous() and made.numel() % TORCH_STEP == 0
    alike = a.dtype == made.dtype and whole and made.numel() <= _TORCH_SHARE[name]
    return [Op(name, made, (a,))] if alike else None


def _cat(tensors: Any, args: Any, kwargs: Any, made: torch.Tensor) -> list[Op] | None:
    given = dict(zip(("dim",), args), **kwargs)
    dim = given.pop("dim", 0)
    parts = tensors if isinstance(tensors, (list, tuple)) else ()
    known = all(isinstance(each, torch.Tensor) and each.dtype == made.dtype for each in parts)
    if given or not parts or not known or not all(each.ndim == made.ndim for each in parts):
        return None
    lengths = [each.shape[dim] for each in parts]
    places = torch.split(made, lengths, dim)
    return [Op("copy", place, (each,)) for place, each in zip(places, parts) if each.numel()]


def _product(given: Any, made: torch.Tensor) -> list[Op] | None:
    x, weight, bias = given
    if weight.dtype != made.dtype or not made.is_contiguous() or weight.stride(-1) != 1:
        return None
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:  # they are not equally far apart
        return None
    return [Op("linear", made.view(-1, made.shape[-1]), (rows, weight, bias))]


_Laid: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"  # shape and strides


class _Loops(NamedTuple):
    shape: list[int]
    strides: list[list[int]]  # of out and each tensor


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _loops(name: str, laid: tuple[_Laid, ...]) -> _Loops | None:
    """At most four dimensions, over whose last all elements are side by side, or one.

    laid: of the tensor that is written, and of those that are read.
    """
    shape, written = laid[0]
    if name == "linear":
        strides = [[0, 0, each[0] if len(each) > 1 else 0, 1] for _, each in laid]
        (sizes, steps) = laid[1]
        is_one_row = steps[-1] == 1 or sizes[-1] == 1
        return _Loops([1, 1, *shape], strides) if is_one_row else None
    if name == "attend":
        (rows, q_heads, v_dim), kv_heads = shape, laid[2][0][1]
        strides = [[*[0] * (4 - len(each)), *each] for _, each in laid]
        contiguous = all(each[-1] == 1 for each in strides)
        return _Loops([rows, q_heads, kv_heads, v_dim], strides) if contiguous else None
    if name == "mean":
        read, steps = laid[1]
        if steps[-1] != 1:
            return None
        dims = _joined(read[:-1], [written[:-1], steps[:-1]], 3)
        if dims is None:
            return None
        return _Loops([*dims.shape, read[-1]], [[*dims.strides[0], 0], [*dims.strides[1], 1]])
    wide = [written, *(_widened(*each, shape) for each in laid[1:])]
    loops = _joined(shape, wide, 4)
    if loops is not None and _side_by_side(loops):
        return loops
    apart = _joined(shape, wide, 3)  # one by one
    return apart and _Loops([*apart.shape, 1], [[*at, 1] for at in apart.strides])


def _widened(
    shape: tuple[int, ...], strides: tuple[int, ...], wide: tuple[int, ...]
) -> tuple[int, ...]:
    """The strides of a tensor that is expanded to a shape."""
    missing = len(wide) - len(shape)
    kept = (
        0 if size != whole else step for size, whole, step in zip(shape, wide[missing:], strides)
    )
    return (*[0] * missing, *kept)


def _side_by_side(loops: _Loops) -> bool:
    written, *read = (strides[-1] for strides in loops.strides)
    return (written == 1 or loops.shape[-1] == 1) and all(step in (0, 1) for step in read)


def _joined(shape: Any, strides: list[Any], most: int) -> _Loops | None:
    """Dimensions of one element left out, and those joined that are one behind the other."""
    order = sorted((i for i, size in enumerate(shape) if size != 1), key=lambda i: -strides[0][i])
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for i in order:
        if sizes and all(at[-1] == each[i] * shape[i] for at, each in zip(steps, strides)):
            sizes[-1] *= shape[i]
            for at, each in zip(steps, strides):
                at[-1] = each[i]
        else:
            sizes.append(shape[i])
            for at, each in zip(steps, strides):
                at.append(each[i])
    missing = most - len(sizes)
    if missing < 0:
        return None
    return _Loops([*[1] * missing, *sizes], [[*[0] * missing, *at] for at in steps])


def step(op: Op, locate: Locate, *, beside: bool = False) -> Any:
    """An operation as `_core.Program` takes it. beside: it runs at the same time as the last."""
    loops = op.loops
    assert loops is not None
    strides = iter(loops.strides)
    operands = [
        (*locate(each), FLOATS[each.dtype], next(strides))
        if isinstance(each, torch.Tensor)
        else each
        for each in (op.out, *op.operands)
    ]
    depth = op.read[0].shape[-1] if op.name in ("linear", "attend") else 0
    return op.name, loops.shape, depth, operands, beside, op.call


def storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, which all views of it share."""
    return tensor.untyped_storage().data_ptr()


class Alike:
    """Tries operations alone: whether a program has the bits of torch's function."""

    def __init__(self, workers: _core.Workers) -> None:
        self._workers = workers
        self._known: dict[Any, bool] = {}
        self._generator = torch.Generator(device="cpu").manual_seed(0)

    def same(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Whether they are for a call of a recording, by its kind and the shapes of its tensors."""
        key = repr((str(node.target), fx.node.map_aggregate((args, kwargs), _signature)))
        if key not in self._known:
            self._known[key] = all(
                self._tried(node, args, kwargs, spread) for spread in [0, 6] * (_TRIALS // 2)
            )
        return self._known[key]

    def _tried(self, node: fx.Node, args: Any, kwargs: Any, spread: int) -> bool:
        def fresh(value: Any) -> Any:
            return self._numbers(value, spread) if isinstance(value, torch.Tensor) else value

        args, kwargs = fx.node.map_aggregate((args, kwargs), fresh)
        function = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        expected = function(*args[isinstance(node.target, str) :], **kwargs)
        made = torch.empty_strided(
            expected.shape, expected.stride(), dtype=expected.dtype, device="cpu"
        )
        ops = lower(node.target, args, kwargs, made)
        if ops is None:
            return False
        memory = Memory()
        steps = [step(op, memory) for op in ops]
        _core.Program(self._workers, steps, memory.tensors, []).run(None, [])
        return same_bits(made, expected)

    def _numbers(self, like: torch.Tensor, spread: int) -> torch.Tensor:
        """Positive and negative numbers of many sizes, laid out like a tensor."""
        last = sum((n - 1) * step for n, step in zip(like.shape, like.stride()))
        draw = torch.randn(last + 1, generator=self._generator, device="cpu")
        sizes = torch.randint(
            -spread, spread + 1, (last + 1,), generator=self._generator, device="cpu"
        )
        return (
            (draw * torch.exp2(sizes.float())).to(like.dtype).as_strided(like.shape, like.stride())
        )


def _signature(value: Any) -> Any:
    """Dtype, shape and strides of a tensor; any other value as it is."""
    if isinstance(value, torch.Tensor):
        return str((value.dtype, tuple(value.shape), value.stride()))
    return value


class Memory:
    """The memory that tensors lie in, numbered in order of first use.

    Attributes:
        tensors: all elements of each, as one row.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def __call__(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of a tensor's memory, and the bytes from there to its first element."""
        key = storage(tensor)
        if key not in self._places:
            self._places[key] = len(self.tensors)
            elements = tensor.untyped_storage().nbytes() // tensor.itemsize
            self.tensors.append(tensor.detach().as_strided((elements,), (1,), 0))
        return self._places[key], tensor.data_ptr() - key
