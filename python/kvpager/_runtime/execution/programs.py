"""Recorded calls of torch that the core computes as programs, with one call for many of them.

Most of what a decode step does beside its products and attention is moving and adding a few
thousand numbers: norms, rotations, residuals. Calls that are known (operations.py) become programs
of the core, from one call of torch to the next: of a Llama or Qwen in few rows, that is one program
for all layers. They write to memory that is laid out once, in which tensors that are not needed at
the same time share places; views of it are made once and cost nothing later. Products of one input
are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import fx

from kvpager import _core
from kvpager._model.seam.linear import product
from kvpager._model.seam.observe import tensors_in
from kvpager._runtime.execution.operations import FLOATS, Alike, Memory, Op, lower, step, storage

_LINE = 64  # bytes
_MOST_BYTES = 1 << 20  # of what an operation makes; larger ones are worth torch's threads


def _memory(node: fx.Node) -> set[int]:
    """The storages of what a node of a recording made."""
    return {*map(storage, tensors_in(node.meta.get("made")))}


class _Segment:
    """Operations of the core without one of torch between them."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, ops: list[Op]) -> None:
        """Adds the operations of one call; a product goes beside those of the same input."""
        for op in ops:
            self.ops.insert(self._place(op), op)

    def _place(self, op: Op) -> int:
        if op.name == "linear":
            for place in range(len(self.ops), 0, -1):
                other = self.ops[place - 1]
                if _of_one_input(op, other):
                    return place
                if storage(other.out) in {*map(storage, op.read)}:
                    break
        return len(self.ops)

    def groups(self) -> Iterator[list[Op]]:
        """Operations that run at the same time, in order."""
        group: list[Op] = []
        for op in self.ops:
            if group and not _of_one_input(op, group[-1]):
                yield group
                group = []
            group.append(op)
        if group:
            yield group


def _of_one_input(op: Op, other: Op) -> bool:
    if other.name != "linear":
        return False
    a, b = op.read[0], other.read[0]
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


Action: TypeAlias = "_Segment | fx.Node"


class _RecordingPlan:
    """A recording's calls as programs of the core, and the memory that these write to."""

    def __init__(self, graph: fx.Graph, workers: _core.Workers) -> None:
        self.actions: list[Action] = []
        self.owned: dict[int, int] = {}  # bytes of memory that programs write, by storage
        self.given: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # what torch's calls made
        self._lasting: set[int] = set()
        self._alike = Alike(workers)
        for node in graph.nodes:
            self._add(node)

    def place(self) -> tuple[torch.Tensor, dict[int, int]]:
        """Memory for all that programs write, and where in it each storage is, in bytes.

        Storages that are not needed at the same time share places.
        """
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for moment, tensors in enumerate(self._moments()):
            for key in map(storage, tensors):
                begins.setdefault(key, moment)
                ends[key] = moment
        for action in reversed(self.actions):
            # What torch returns may be what it was given, even if it was a copy when recorded.
            if not isinstance(action, _Segment):
                last = max((ends.get(key, 0) for key in _memory(action)), default=0)
                for each in action.all_input_nodes:
                    for key in _memory(each):
                        ends[key] = max(ends.get(key, 0), last)
        places: dict[int, int] = {}
        live: list[tuple[int, int, int]] = []  # place, end of it, last moment
        total = 0
        for key in sorted(self.owned, key=lambda each: begins[each]):
            size = -(-self.owned[key] // _LINE) * _LINE
            live = [one for one in live if one[2] >= begins[key]]
            at = 0
            for place, end, _ in live:
                if at + size <= place:
                    break
                at = end
            places[key] = at
            live = sorted([*live, (at, at + size, ends[key])])
            total = max(total, at + size)
        return torch.zeros(max(total, _LINE) // 4, dtype=torch.float32, device="cpu"), places

    def _moments(self) -> Iterator[list[torch.Tensor]]:
        """The tensors of one thing after another; products of one input are computed at once."""
        for action in self.actions:
            if isinstance(action, _Segment):
                for group in action.groups():
                    yield [tensor for op in group for tensor in op.tensors]
            else:
                yield tensors_in([node.meta.get("made") for node in action.all_input_nodes])

    def _add(self, node: fx.Node) -> None:
        made = node.meta.get("made")
        keys = _memory(node)
        if node.op == "get_attr":
            self._lasting |= keys
        elif node.op == "placeholder":
            self._note(node, made)
        elif node.op == "output":
            self.actions.append(node)
        elif not node.meta["acts"] and all(map(self._is_known, keys)):
            return  # a view, which costs nothing
        elif (ops := self._lowered(node)) is not None:
            assert isinstance(made, torch.Tensor)
            self.owned[storage(made)] = made.untyped_storage().nbytes()
            if not self.actions or not isinstance(self.actions[-1], _Segment):
                self.actions.append(_Segment())
            segment = self.actions[-1]
            assert isinstance(segment, _Segment)
            segment.add(ops)
        else:
            self.actions.append(node)
            self._note(node, made)

    def _is_known(self, key: int) -> bool:
        return key in self._lasting or key in self.owned or key in self.given

    def _note(self, node: fx.Node, made: Any) -> None:
        """Records that a call of torch made a tensor, if it is the first with that storage."""
        if isinstance(made, torch.Tensor) and not self._is_known(storage(made)):
            self.given[storage(made)] = node, made

    def _lowered(self, node: fx.Node) -> list[Op] | None:
        """A call as operations of the core, if a program can read all their operands."""
        if node.op == "call_method" and node.target == "attend":
            return [self._attention(node)]
        if node.meta["acts"]:
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["made"])
        made = node.meta["made"]
        ops = lower(node.target, args, kwargs, made)
        if ops is None or made.untyped_storage().nbytes() > _MOST_BYTES:
            return None
        if not all(self._readable(each) for op in ops for each in op.read):
            return None
        is_product = node.target is product
        return ops if is_product or self._alike.same(node, args, kwargs) else None

    def _attention(self, node: fx.Node) -> Op:
        """A call of the running forward's attention."""
        _, layer, *given = node.args
        assert isinstance(layer, int)
        call = {**node.kwargs}
        read = [self._readable_copy(each, node) for each in (*given, call.pop("sinks", None))]
        return Op("attend", node.meta["made"], tuple(read), (layer, call))

    def _readable_copy(self, given: Any, user: fx.Node) -> torch.Tensor | None:
        """A tensor that a program can read: this one, or a copy that torch makes first."""
        if given is None:
            return None
        made: torch.Tensor = given.meta["made"]
        if self._readable(made) and made.stride(-1) == 1:
            return made
        layout = torch.contiguous_format
        with user.graph.inserting_before(user):
            copied = user.graph.call_method("clone", (given,), {"memory_format": layout})
        copied.meta.update(made=made.clone(memory_format=layout), acts=True)
        self._add(copied)
        copy: torch.Tensor = copied.meta["made"]
        return copy

    def _readable(self, tensor: torch.Tensor) -> bool:
        given = self.given.get(storage(tensor))
        if storage(tensor) % tensor.itemsize or tensor.data_ptr() % tensor.itemsize:
            return False
        return given is None or (
            given[1].is_contiguous()
            and given[1].dtype in FLOATS
            and given[1].data_ptr() <= tensor.data_ptr()
        )


class _Places:
    """Where a program's tensors are: written by programs, lasting, or given to each run."""

    def __init__(self, plan: _RecordingPlan, arena: torch.Tensor, places: dict[int, int]) -> None:
        self._plan = plan
        self._places = places
        self._fixed = Memory()
        self._fixed(arena)
        self.given: list[fx.Node] = []

    @property
    def fixed(self) -> list[torch.Tensor]:
        """Memory that is the same in each run; that of programs first."""
        return self._fixed.tensors

    def note(self, op: Op) -> None:
        """Gives numbers to the memory of an operation; those that last come first."""
        for tensor in op.tensors:
            if storage(tensor) not in self._places and storage(tensor) not in self._plan.given:
                self._fixed(tensor)

    def __call__(self, tensor: torch.Tensor) -> tuple[int, int]:
        key = storage(tensor)
        if key in self._places:
            return 0, self._places[key] + tensor.data_ptr() - key
        if key not in self._plan.given:
            return self._fixed(tensor)
        node, made = self._plan.given[key]
        if node not in self.given:
            self.given.append(node)
        return len(self.fixed) + self.given.index(node), tensor.data_ptr() - made.data_ptr()


def with_programs(
    graph: fx.Graph,
    held: dict[str, Any],
    workers: _core.Workers,
    compressed: _core.CompressedWeights | None = None,
) -> tuple[fx.Graph, dict[str, Any], list[torch.Tensor]]:
    """A recording whose known operations are computed by programs.

    Returns it, the objects it holds by name, and the tensors whose memory programs read in place.

    graph: every node has what it made when it was recorded (meta "made"), and whether it acts on
    more than that (meta "acts"), such as writes to a tensor. A method `attend` is that of the
    function's first argument.
    compressed: copies of weights that products read.
    """
    return _Writer(graph, held, workers, compressed).written()


class _Writer:
    def __init__(
        self,
        graph: fx.Graph,
        held: dict[str, Any],
        workers: _core.Workers,
        compressed: _core.CompressedWeights | None,
    ) -> None:
        self._workers = workers
        self._compressed = compressed
        self._plan = _RecordingPlan(graph, workers)
        self._arena, self._places = self._plan.place()
        self._nodes = graph.nodes
        self._old = held
        self._held: dict[str, Any] = {}
        self._read: list[torch.Tensor] = []
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}

    def written(self) -> tuple[fx.Graph, dict[str, Any], list[torch.Tensor]]:
        for node in self._nodes:
            if node.op == "placeholder":
                self._new[node] = self._graph.placeholder(node.name)
        for action in self._plan.actions:
            if isinstance(action, _Segment):
                self._program(action)
            elif action.op == "output":
                self._graph.output(self._result(action))
            else:
                self._new[action] = self._graph.node_copy(action, self._value)
        return self._graph, self._held, self._read

    def _program(self, segment: _Segment) -> None:
        places = _Places(self._plan, self._arena, self._places)
        for op in segment.ops:
            places.note(op)
        steps = [
            step(op, places, beside=place > 0)
            for group in segment.groups()
            for place, op in enumerate(group)
        ]
        self._read += places.fixed
        made = [node.meta["made"] for node in places.given]
        inputs = [(FLOATS[each.dtype], list(each.shape)) for each in made]
        program = _core.Program(self._workers, steps, places.fixed, inputs, self._compressed)
        given = [self._value(node) for node in places.given]
        attention = self._new[next(iter(self._nodes))]
        self._graph.call_method("run", (self._hold(program), attention, given))

    def _result(self, node: fx.Node) -> Any:
        """The value that the recording returns; not memory that the next replay writes to."""
        (value,) = node.args
        made = value.meta["made"] if isinstance(value, fx.Node) else None
        given = self._value(value) if isinstance(value, fx.Node) else value
        if isinstance(made, torch.Tensor) and storage(made) in self._places:
            return self._graph.call_method("clone", (given,))
        return given

    def _hold(self, value: Any) -> fx.Node:
        name = f"held_{len(self._held)}"
        self._held[name] = value
        return self._graph.get_attr(name)

    def _value(self, node: fx.Node) -> fx.Node:
        """A node of the recording in the new one; views are made where they are used."""
        if node not in self._new:
            made = node.meta.get("made")
            if node.op == "get_attr":
                self._new[node] = self._hold(self._old[str(node.target)])
            elif isinstance(made, torch.Tensor) and storage(made) in self._places:
                self._new[node] = self._hold(self._view(made))
            else:
                self._new[node] = self._graph.node_copy(node, self._value)
        return self._new[node]

    def _view(self, made: torch.Tensor) -> torch.Tensor:
        at = self._places[storage(made)] + made.data_ptr() - storage(made)
        elements = self._arena.view(made.dtype)
        return elements.as_strided(made.shape, made.stride(), at // made.itemsize)
