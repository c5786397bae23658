"""Recorded forwards: on a CPU a decode step runs without the Python of the model's modules.

Between the matrix products of a decode step of a 0.6B model are some 1,900 small operations, which
take a few microseconds each, and as long again in the Python that calls them. So the decoder's
operations are recorded once for each small number of rows, and later forwards of as many run them
one after the other (torch.fx): torch's own, linear layers that are kvpager's products, and
attention, which is the running forward's.

A recording counts only if it has the bits of the model itself, which is tried on other tokens and
positions than those it was made with. Where it has others, or the model does what cannot be
recorded (it reads a number of a tensor, say), forwards of as many rows stay as they were.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import fx
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from kvpager import _core
from kvpager._model.identity.description import additions_of
from kvpager._model.identity.reading import READS, has_shape_by_numbers, is_made_of_others, unfit
from kvpager._model.seam.attention import RowAttention
from kvpager._model.seam.causal_lm import vocab_size
from kvpager._model.seam.linear import LinearLayers, computing, product, product_of_experts
from kvpager._model.seam.observe import Recorder
from kvpager._model.seam.rows import same_bits
from kvpager._model.watch.looks import active_modes, is_known_to_look
from kvpager._runtime.execution.graphs import Decode
from kvpager._runtime.execution.operations import storage
from kvpager._runtime.execution.programs import with_programs

MOST_ROWS = 16  # with more, products take nearly all of a forward
WORTH = 8  # forwards of as many rows before one is recorded, which takes what some 25 later save

_log = logging.getLogger(__name__)

# Whose modules do nothing in a forward but compute, so that their Python need not run each time.
_KNOWN = ("torch", "transformers", "peft")
# Of all modules.
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)  # noqa: SLF001  # no public name
_OF_CACHES = "kvpager.transformers_cache.hooks"  # which look for a Cache among the arguments
_METHODS = (MethodDescriptorType, WrapperDescriptorType)
_WRITTEN_IN_PYTHON = "torch._tensor"  # where the other methods of torch.Tensor are
_PLAIN = (
    *(bool, int, float, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class NotRecordableError(Exception):
    """The model does something that a recording cannot repeat; the message names it."""


class Recordings:
    """The recordings of one model, by their number of rows.

    Attributes:
        replays: forwards that were run by a recording.
    """

    def __init__(
        self,
        model: Any,
        decode: Decode,
        linear: LinearLayers | None,
        before: Recordings | None = None,
    ) -> None:
        """linear: layers that are kvpager's own products; None: torch computes all.

        before: of the same model with other values of its weights. They are tried again.
        """
        self._decode = decode
        self._linear = linear
        # Replacing one of these changes the model, which the engine detects.
        self._hooks = [*_GLOBAL_HOOKS]
        for module in model.modules():
            self._hooks += module._forward_hooks, module._forward_pre_hooks  # noqa: SLF001  # no public name
        self._vocab = vocab_size(model)  # adapters have no other
        config = model.config.get_text_config()
        self._positions = getattr(config, "max_position_embeddings", None) or 1024
        self._seen: Counter[int] = Counter()
        self._made: dict[int, Recording | None] = {}  # None: not to be had
        reads_weights = linear is None or linear.compressed is None
        self._before: dict[int, Recording] = (
            before.all() if before is not None and reads_weights else {}
        )
        self.replays = 0

    def prepare(self, rows: int, check: Callable[[], None]) -> None:
        """Records forwards of so many rows, if there have been a few and none is recorded.

        check: raises where the model has changed; then nothing is kept of it.
        """
        if rows > MOST_ROWS or rows in self._made or self._watched():
            return
        before = self._before.pop(rows, None)
        if before is None:
            self._seen[rows] += 1
            if self._seen[rows] <= WORTH:
                return
        made = None
        try:
            made = self._tried(rows, before)
        except Exception as error:
            _log.info(
                "forwards of %d rows are not recorded, and run module by module: %s: %s",
                rows,
                type(error).__name__,
                error,
            )
        check()
        self._made[rows] = made

    def run(
        self, attention: RowAttention, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | None:
        """The decoder's output [rows, hidden_size], by a recording; None: there is none to run.

        tokens, positions: [rows] int64.
        """
        recording = self._made.get(len(tokens))
        if recording is None or self._watched() or not recording.is_readable():
            return None
        hidden = recording(attention, tokens, positions)
        self.replays += 1
        return hidden

    def _watched(self) -> bool:
        """Whether a module has a hook, or the thread a mode, which expects to be called."""
        if active_modes():
            return True
        if not any(self._hooks):  # a thousand of them, before each forward
            return False
        return any(not _concerns_others(hook) for hooks in self._hooks for hook in hooks.values())

    def all(self) -> dict[int, Recording]:
        """All recordings by their number of rows, and those of before that were not tried yet."""
        made = {rows: one for rows, one in self._made.items() if one is not None}
        return {**self._before, **made}

    def _tried(self, rows: int, before: Recording | None) -> Recording | None:
        if before is not None and before.is_readable() and self._agrees(before, rows):
            return before
        generator = torch.Generator(device="cpu").manual_seed(rows)
        tokens = torch.randint(self._vocab, (rows,), generator=generator, device="cpu")
        recording = recorded(self._decode, self._linear, tokens, torch.arange(rows, device="cpu"))
        if self._agrees(recording, rows):
            return recording
        _log.warning(
            "a recording of %d rows has other bits than the model; forwards of as many rows are "
            "not recorded",
            rows,
        )
        return None

    def _agrees(self, recording: Recording, rows: int) -> bool:
        """Whether a recording has the bits of the model, on tokens and positions of chance."""
        generator = torch.Generator(device="cpu").manual_seed(MOST_ROWS + rows)
        for _ in range(2):
            tokens = torch.randint(self._vocab, (rows,), generator=generator, device="cpu")
            positions = torch.randint(self._positions, (rows,), generator=generator, device="cpu")
            expected, found = Recorder(), _Copies()
            pairs = [
                (self._decode(expected, tokens, positions), recording(found, tokens, positions)),
                *(pair for layer in expected.calls for pair in zip(*_of(layer, expected, found))),
            ]
            if expected.windows != found.windows or not all(same_bits(a, b) for a, b in pairs):
                return False
        return True


def _concerns_others(hook: Any) -> bool:
    """Whether a hook is for calls of the model that are none of an engine's."""
    return is_known_to_look(hook) or getattr(hook, "__module__", None) == _OF_CACHES


def _of(layer: int, *recorders: Recorder) -> list[tuple[torch.Tensor, ...]]:
    return [recorder.calls[layer] for recorder in recorders]


class _Copies(Recorder):
    """Copies what it is given, which a replay writes again."""

    def attend(self, layer: int, *tensors: torch.Tensor, **call: Any) -> torch.Tensor:
        return super().attend(layer, *(each.clone() for each in tensors), **call)


def recordable(model: Any) -> bool:
    """Whether a model does nothing in a forward but compute, as far as is known.

    Its classes and the functions that its modules hold are torch's, transformers' or peft's, and
    nothing is hooked in: no Python of others expects to run each time.
    """
    kinds = {type(module) for module in model.modules()}
    homes = {kind.__module__ for kind in kinds} | {kind.forward.__module__ for kind in kinds}
    homes |= {
        _home(value)
        for module in model.modules()
        for value in vars(module).values()
        if callable(value) and not isinstance(value, (torch.nn.Module, type))
    }
    packages = {home.partition(".")[0] for home in homes}
    return packages <= {*_KNOWN} and not additions_of(model).hooked


def _home(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, BuiltinFunctionType):  # no Python
        return _KNOWN[0]
    return getattr(function, "__module__", None) or type(function).__module__


class Recording:
    """A recorded forward, as a function of attention, tokens and positions.

    It computes what `Decode` does, without the model.

    Attributes:
        graph: its calls.
    """

    def __init__(self, graph: fx.Graph, held: Mapping[str, Any], read: list[torch.Tensor]) -> None:
        """held: the objects that the graph refers to. read: tensors whose memory the core reads."""
        self.graph = graph
        code = graph.python_code("self")
        names = dict(code.globals)
        # As torch.fx does, which keeps the source of every module for ever.
        exec(compile(code.src, "<recording>", "exec"), names)
        self._forward = names["forward"]
        self._held = SimpleNamespace(**held)
        self._read = read
        self._addresses = self._places()

    def __call__(
        self, attention: RowAttention, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The decoder's output [rows, hidden_size]; tokens and positions are [rows] int64."""
        hidden: torch.Tensor = self._forward(self._held, attention, tokens, positions)
        return hidden

    def is_readable(self) -> bool:
        """Whether what the core reads is where it was: a tensor may get other memory."""
        return self._places() == self._addresses

    def _places(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._read))


def recorded(
    decode: Decode, linear: LinearLayers | None, tokens: torch.Tensor, positions: torch.Tensor
) -> Recording:
    """Records a forward of these tokens and positions as a function of them.

    Attention that the function is called with has to take `out`, as `Forward.attend` does, and to
    write there.

    Raises:
        NotRecordableError: it does something that may differ next time.
    """
    compressed = None if linear is None else linear.compressed
    tape = _Tape(tokens, positions, linear.workers if linear else _core.Workers(1), compressed)
    layers = None if linear is None else _RecordedLayers(linear, tape)
    try:
        with computing(layers), _Functions(tape), _Operations(tape):
            hidden = decode(_RecordedAttention(tape), tokens, positions)
    finally:
        tape.idle = True  # a mode that an interrupt has left active does nothing
    return tape.function(hidden)


class _Tape:
    """The operations so far, as a graph of torch.fx."""

    def __init__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        workers: _core.Workers,
        compressed: _core.CompressedWeights | None,
    ) -> None:
        self._workers = workers
        self._compressed = compressed
        self.graph = fx.Graph()
        self.attention = self.graph.placeholder("attention")
        self.idle = False  # what is done meanwhile is no operation of the model's
        self.called = False  # a function of torch runs
        self.wrote = False  # it has written to a tensor
        self._held: dict[str, Any] = {}
        self._held_nodes: dict[int, fx.Node] = {}
        self._lasting: set[int] = set()  # storage of tensors that no operation has made
        self._nodes: dict[int, fx.Node] = {}
        self._parts: set[int] = set()  # tensors that an operation has made
        self._tensors: list[Any] = [tokens, positions]  # keeps ids from being used again
        for name, tensor in (("tokens", tokens), ("positions", positions)):
            self._nodes[id(tensor)] = self.graph.placeholder(name)
            self._nodes[id(tensor)].meta["made"] = tensor
            self._lasting.add(storage(tensor))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, nothing is recorded."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Within, operations are parts of a function of torch."""
        before, self.called, self.wrote = self.called, True, False
        try:
            yield
        finally:
            self.called = before

    def held(self, value: Any) -> fx.Node:
        """An object that is the same in every forward."""
        node = self._held_nodes.get(id(value))
        if node is None:
            name = f"held_{len(self._held)}"
            self._held[name] = value
            node = self._held_nodes[id(value)] = self.graph.get_attr(name)
            node.meta["made"] = value
        return node

    def call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        *,
        acts: bool = False,
    ) -> None:
        """Adds a call that has made a tensor, or several. acts: it has written to others, too."""
        with self.apart():
            given = self._given(args), self._given(kwargs)
            if isinstance(function, MethodWrapperType):  # a property, such as Tensor.T
                name = getattr(function.__self__, "__name__")  # noqa: B009  # untyped
                node = self.graph.call_function(getattr, (*given[0], name))
            elif isinstance(function, _METHODS) or function.__module__ == _WRITTEN_IN_PYTHON:
                node = self.graph.call_method(function.__name__, *given)
            else:
                node = self.graph.call_function(function, *given)
            self._bind(node, made, acts=acts)

    def attend(self, args: tuple[Any, ...], kwargs: dict[str, Any], made: torch.Tensor) -> None:
        """Adds a call of the running forward's attention."""
        with self.apart():
            given = (self.attention, *self._given(args)), self._given(kwargs)
            self._bind(self.graph.call_method("attend", *given), made, acts=True)

    def note(self, made: Any) -> None:
        """Records tensors that an operation has made; a recorded function has to return them."""
        for tensor in made if isinstance(made, (list, tuple)) else (made,):
            self._parts.add(id(tensor))
            self._tensors.append(tensor)

    def lasts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or what it is a view of, outlives this forward."""
        with self.apart():
            known = id(tensor) in self._nodes or id(tensor) in self._parts
            return not known or storage(tensor) in self._lasting

    def function(self, hidden: torch.Tensor) -> Recording:
        """The recording, a function of attention, tokens and positions."""
        self.graph.output(self._given(hidden))
        written = with_programs(self.graph, self._held, self._workers, self._compressed)
        return Recording(*written)

    def _given(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            if node is None:
                if id(value) in self._parts:
                    raise NotRecordableError("a tensor was made that no function of torch returned")
                self._lasting.add(storage(value))
                self._tensors.append(value)
                node = self._nodes[id(value)] = self.held(value)
            return node
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(map(self._given, value))
        if isinstance(value, slice):
            return slice(*map(self._given, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._given(each) for key, each in value.items()}
        if isinstance(value, fx.Node) or type(value) in _PLAIN:
            return value
        raise NotRecordableError(f"an operation is given a {type(value).__name__}")

    def _bind(self, node: fx.Node, made: Any, *, acts: bool) -> None:
        """acts: the call does more than make it."""
        node.meta.update(made=made, acts=acts)
        if isinstance(made, torch.Tensor):
            self._tensors.append(made)
            if id(made) not in self._nodes or not self.lasts(made):
                self._nodes[id(made)] = node
        elif isinstance(made, (list, tuple)):
            for place, each in enumerate(made):
                self._bind(
                    self.graph.call_function(operator.getitem, (node, place)), each, acts=False
                )


class _Functions(TorchFunctionMode):
    """Records every function and method of torch that is called, as it is called."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tape, kwargs = self._tape, dict(kwargs or {})
        if tape.idle:
            return func(*args, **kwargs)
        if func in READS:
            raise NotRecordableError(f"{resolve_name(func)} reads the numbers of a tensor")
        with tape.calling():
            made = func(*args, **kwargs)
        if tape.wrote or _tensors(made):  # not of a shape, a dtype
            tape.call(func, args, kwargs, made, acts=tape.wrote)
        return made


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation that such a function is made of, and refuses what is not fit."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tape, kwargs = self._tape, dict(kwargs or {})
        if tape.idle:
            return func(*args, **kwargs)
        if not tape.called:
            raise NotRecordableError(f"{func} is called by no function of torch")
        if is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        _check(func, args, kwargs, tape)
        made = func(*args, **kwargs)
        tape.note(made)
        return made


class _RecordedAttention:
    """Stands in for a forward: every row attends to itself, as in `Recorder`."""

    def __init__(self, tape: _Tape) -> None:
        self._tape = tape
        self._recorder = Recorder()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        with self._tape.apart():
            # In memory of its own, as the running forward's is: that of v would be read for it.
            made = self._recorder.attend(layer, q, k, v, **call).clone()
        self._tape.attend((layer, q, k, v), call, made)
        return made


class _RecordedLayers(LinearLayers):
    """Layers that are computed as they are, each of which is recorded as one call."""

    def __init__(self, layers: LinearLayers, tape: _Tape) -> None:
        self.workers = layers.workers
        self.compressed = layers.compressed
        self.known = layers.known
        self.experts = layers.experts
        self.callers = layers.callers
        self._tape = tape

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        tape = self._tape
        given = (x, weight, bias) if chosen is None else (x, weight, bias, chosen)
        function: Callable[..., torch.Tensor | None] = (
            product if chosen is None else product_of_experts
        )
        with tape.apart():
            made = function(self.workers, *given, compressed=self.compressed)
        if made is not None:
            copies = None if self.compressed is None else tape.held(self.compressed)
            args = (tape.held(self.workers), *given)
            tape.call(function, args, {"compressed": copies}, made)
        return made


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """The arguments that an operation writes to: places and names."""
    return [
        (place, each.name)
        for place, each in enumerate(func._schema.arguments)  # noqa: SLF001  # no public name
        if each.alias_info is not None and each.alias_info.is_write
    ]


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tape: _Tape) -> None:
    if why := unfit(func):
        raise NotRecordableError(f"{func} {why}")
    if has_shape_by_numbers(func, args, kwargs):
        raise NotRecordableError(f"the shape of what {func} makes depends on numbers of a tensor")
    for place, name in _written(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor) and tape.lasts(value):
            raise NotRecordableError(f"{func} writes to a tensor that lasts")
        tape.wrote = True


def _tensors(made: Any) -> bool:
    return isinstance(made, torch.Tensor) or (
        isinstance(made, (list, tuple)) and any(map(_tensors, made))
    )
