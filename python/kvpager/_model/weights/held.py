"""What the weights of a model consist of: tensors of bytes, and the settings they are read with.

Libraries of quantisation keep a weight as a tensor that is made of others (torchao, quanto), as
bytes with an object beside them (bitsandbytes), as buffers (GPTQ, AWQ) or in attributes of a module
(HQQ). Nothing here knows a library: whatever a weight or its module refers to is followed, down to
tensors that lie in memory as they say, and to plain values. What is neither is reported.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Whose modules keep what they compute with in parameters and buffers.
_KNOWN = ("torch.nn.modules", "torch.nn.utils", "transformers.models", "transformers.activations")
_PACKED_MODULES = "torch.ao."  # which keep their weights in objects of C++
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # torch's own, that each module has
_SKIPPED = ("_is_", "_hf_", "_old_forward", "_kvpager")  # flags and hooks of loading
_DEPTH = 8  # of objects in one another


class _Bare:
    """An object that has a dictionary and nothing else."""


@dataclass
class Held:
    """Tensors and settings that modules compute with.

    Attributes:
        tensors: parameters and buffers by their names, and the tensors that quantised ones are made
            of, by the way that leads to them. All of them lie in memory as they say.
        settings: of quantised weights, by the way that leads to them: JSON-able, the same in every
            process.
        containers: dictionaries and lists that tensors and settings were found in.
        made_of_others: tensors that are made of others; their `__dict__` may be exchanged.
        opaque: names of weights, each with what cannot be followed in it.
    """

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    settings: list[tuple[str, Any]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    made_of_others: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    opaque: list[tuple[str, str]] = field(default_factory=list)


def held_by(model: torch.nn.Module, *, alone: bool = False) -> Held:
    """Everything that a model computes with: of all its modules, or of the outermost alone."""
    held = Held()
    walk = _Walk(held, {id(module) for module in model.modules()})
    weights = _own(model) if alone else [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in weights:
        walk.weight(name, tensor)
    for name, module in [("", model)] if alone else model.named_modules():
        if is_quantised(module):
            walk.attributes(name, module)
    return held


def hold_too(held: Held, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Adds further tensors, by their names; leaves out those that cannot be followed."""
    more = Held()
    for name, tensor in tensors:
        _Walk(more, set()).weight(name, tensor)
    held.tensors += [(name, one) for name, one in more.tensors if one.device.type != "meta"]


def is_quantised(module: torch.nn.Module) -> bool:
    """Whether a module's own weights are kept otherwise than as numbers that it multiplies by."""
    if not all(is_plain(tensor) for _, tensor in _own(module)):
        return True
    if _is_known(module):
        return False
    if type(module).__module__.startswith(_PACKED_MODULES):
        return True
    return any(_is_packed(tensor) for _, tensor in _own(module))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its numbers and nothing else."""
    return (
        type(tensor) in _PLAIN
        and type(tensor.data) is torch.Tensor
        and not _problem(tensor)
        and not any(isinstance(value, torch.Tensor) for value in vars(tensor).values())
    )


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers of a byte or less, or several of them in a word."""
    dtype = tensor.dtype
    if not tensor.ndim or dtype == torch.bool:
        return False
    return dtype.itemsize == 1 or (tensor.ndim > 1 and dtype in (torch.int16, torch.int32))


def _is_known(module: torch.nn.Module) -> bool:
    """Whether a module is torch's or an architecture's, and runs as its class says."""
    home = type(module).__module__
    return home.startswith(_KNOWN) and "forward" not in vars(module)


def _own(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    # As module.named_parameters(recurse=False) and named_buffers, which take ten times as long.
    kinds = (vars(module)["_parameters"], vars(module)["_buffers"])
    return [(name, one) for kind in kinds for name, one in kind.items() if one is not None]


def _problem(tensor: torch.Tensor) -> str:
    """Why the bytes of a tensor that is made of no others cannot be read; empty if they can."""
    if tensor.layout != torch.strided:
        return f"is laid out as {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"is {str(tensor.dtype).removeprefix('torch.')}, torch's own quantised tensor"
    if tensor.device.type != "meta" and tensor.numel() and not tensor.data_ptr():
        return f"is a {type(tensor).__name__} that does not say what it is made of"
    return ""


class _Walk:
    """Follows what weights refer to.

    What two refer to is held by both: whether they share it may differ between processes.
    """

    def __init__(self, held: Held, modules: set[int]) -> None:
        self._held = held
        self._modules = modules  # by id: each is visited in its own right
        self._way: set[int] = set()  # ids of the objects that lead to where the walk is

    def weight(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter or buffer, or a tensor that one is made of."""
        held = self._held
        if is_plain(tensor):
            held.tensors.append((name, tensor))
            return
        held.settings.append((name, ["tensor", name_of(type(tensor)), *_shape(tensor)]))
        parts, context = _parts(tensor)
        if parts:
            held.made_of_others.append((name, tensor))
        elif problem := _problem(tensor):
            held.opaque.append((name, problem))
        else:
            held.tensors.append((name, tensor))
        own = vars(tensor)
        for part in parts:
            if part not in own:
                self.value(f"{name}.{part}", getattr(tensor, part), _DEPTH)
        self.value(f"{name}()", context, _DEPTH)
        held.containers.append((name, own))
        self._members(name, own, _DEPTH)

    def attributes(self, name: str, module: torch.nn.Module) -> None:
        """What a quantised module keeps beside its parameters and buffers.

        Methods of its class that it replaces are additions to the model (`additions_of`).
        """
        given = {
            key: value
            for key, value in vars(module).items()
            if key not in _OF_MODULES and not (callable(value) and hasattr(type(module), key))
        }
        self._held.settings.append((name, ["module", name_of(type(module))]))
        self._members(name, given, _DEPTH)

    def value(self, name: str, value: Any, depth: int) -> None:
        """Whatever else a weight refers to."""
        if (setting := _as_setting(value)) is not None:
            self._held.settings.append((name, setting))
        elif id(value) in self._way or id(value) in self._modules:
            return
        elif depth == 0:
            self._held.opaque.append((name, f"refers to a {name_of(type(value))}, far away"))
        else:
            self._way.add(id(value))
            self._follow(name, value, depth)
            self._way.discard(id(value))

    def _follow(self, name: str, value: Any, depth: int) -> None:
        held = self._held
        if isinstance(value, torch.Tensor):
            self.weight(name, value)
        elif isinstance(value, dict):
            held.containers.append((name, value))
            self._members(name, value, depth)
        elif isinstance(value, (list, tuple)):
            self._items(name, value, depth)
        elif isinstance(value, (set, frozenset)):
            self._items(name, sorted(value, key=repr), depth)
        elif _has_members_only(value) and not isinstance(value, torch.nn.Module):
            held.settings.append((name, ["object", name_of(type(value))]))
            held.containers.append((name, vars(value)))
            self._members(name, vars(value), depth)
        else:
            held.opaque.append((name, f"is a {name_of(type(value))}"))

    def _members(self, name: str, members: Mapping[Any, Any], depth: int) -> None:
        for key, value in members.items():
            if not str(key).startswith(_SKIPPED):
                self.value(f"{name}.{key}" if name else str(key), value, depth - 1)

    def _items(self, name: str, items: Any, depth: int) -> None:
        if isinstance(items, list):
            self._held.containers.append((name, items))
        self._held.settings.append((name, ["items", len(items)]))
        for index, item in enumerate(items):
            self.value(f"{name}[{index}]", item, depth - 1)


def _parts(tensor: torch.Tensor) -> tuple[list[str], Any]:
    """Names of the tensors that one is made of, and what it says of itself beside them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in _PLAIN:
        return [], None
    names, context = flatten()
    return list(names), context


def _as_setting(value: Any) -> Any:
    """A plain value in JSON's types; None for what is to be followed or cannot be."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, enum.Enum):
        return ["enum", f"{name_of(type(value))}.{value.name}"]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device"]  # the fingerprint has it
    if isinstance(value, type) or (callable(value) and _is_function(value)):
        return ["name", name_of(value)]
    return None


def _is_function(value: Any) -> bool:
    """A function whose name says which it is: none with values bound to it but a method's."""
    if isinstance(value, torch.nn.Module) or not hasattr(value, "__qualname__"):
        return False
    return not getattr(getattr(value, "__func__", value), "__closure__", None)


def _has_members_only(value: Any) -> bool:
    """Whether an object is of a class of Python's with a dictionary, and no memory beside it."""
    slots = [slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ())]
    only_dictionary = type(value).__basicsize__ <= _Bare.__basicsize__ and not slots
    return hasattr(value, "__dict__") and only_dictionary


def _shape(tensor: torch.Tensor) -> Iterator[str]:
    yield str(tuple(tensor.shape))
    yield str(tensor.dtype)


def name_of(value: Any) -> str:
    """The name of a function, a class or another object's class, the same in every process."""
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return f"a {type(value).__qualname__}"
    return f"{getattr(function, '__module__', '') or ''}.{name}".lstrip(".")
