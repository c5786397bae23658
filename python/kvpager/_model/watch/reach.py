"""What a model's forward can reach in Python: functions, and the objects that they read.

From the modules of a model to their classes and attributes, from there to the functions that a
forward may call, to what these hold (closures, defaults, bound values) and to the globals that they
load. Code of torch and transformers is followed as far as it is an architecture's own; of other
libraries only which of their functions are called. What a computed name leads to, and what lies
behind an extension in C, isn't found.
"""

from __future__ import annotations

import builtins
import collections
import dis
import enum
import functools
import gc
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from kvpager._model.watch.looks import changes_nothing, hooks_of

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum),
)
# Of a class of modules: what a call of one runs.
RUN = frozenset(
    {"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"}
)
# Packages whose code is known by their releases, and which read numbers or chance for good reasons.
KNOWN = frozenset(
    {"torch", "transformers", "peft", "kvpager", "accelerate", "torchao", "bitsandbytes", "hqq"}
    | {"optimum", "gptqmodel", "auto_gptq", "awq", "numpy", "kernels", "triton", "builtins", ""}
    | {"pybind11_builtins"}
    | set(sys.stdlib_module_names) - {"__main__"}
)
CACHED = type(lru_cache(lambda: None))
WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, CACHED)
_WRAPPED = ("__func__", "fget", "fset", "func", "__wrapped__")  # attributes of theirs
# Names of every class that no forward looks up.
INCIDENTAL = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__"}
    | {"__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"}
    | {"__annotate__", "__annotate_func__", "__annotations_cache__", "__parameters__"}
)
_ARCHITECTURES = (
    *("transformers.models", "transformers.activations", "transformers.masking_utils"),
    *("transformers.modeling_rope_utils", "transformers.modeling_layers"),
    *("transformers.integrations.moe", "torch.nn.modules", "peft.tuners"),
)
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}  # torch's own, that each has
USED = frozenset({"warnings_issued", "generation_config"})  # by whoever calls a model
# Whether and how layers are computed again for gradients; libraries look in training mode alone.
FOR_GRADIENTS = frozenset(
    {"gradient_checkpointing", "_gradient_checkpointing_func"}
    | {"_require_grads_hook", "_require_grads_hooks"}
)
_BY_NAME = frozenset({"globals", "vars", "getattr"})  # which look texts up
ENVIRONMENT = frozenset({"environ", "getenv"})  # what code mentions that reads it
_DEPTH = 12  # of objects in one another
_COMPARED = (set, collections.deque, bytearray)  # by their content
_COLLECTIONS = (tuple, list, frozenset, *_COMPARED[:2])
_SMALL = 1 << 16  # bytes of an array that is compared as a whole
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
# Whose objects change without being read: loggers, locks.
OPAQUE = frozenset({"logging", "threading", "_thread", "weakref", "contextvars", "asyncio", "re"})
# Generators that every program draws from.
_SHARED = (
    getattr(random.random, "__self__", None),
    getattr(np.random.random, "__self__", None),
    torch.default_generator,
)


def package_of(value: Any) -> str:
    """The outermost package that defines a function, class or module."""
    return home_of(value).partition(".")[0]


def home_of(value: Any) -> str:
    """The module that defines a function, class or module."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):  # where it was written: functools.wraps copies names
        return str(value.__globals__.get("__name__") or "__main__")
    return str(getattr(value, "__module__", None) or "")


@cache
def is_installed(package: str) -> bool:
    """Whether a package lies where releases are installed, as opposed to a user's own code."""
    found = sys.modules.get(package)
    places = [getattr(found, "__file__", None), *getattr(found, "__path__", ())]
    parts = {part for place in places if place for part in Path(place).parts}
    return not parts.isdisjoint({"site-packages", "dist-packages"})


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


@lru_cache(maxsize=4096)
def mentioned_by(code: CodeType) -> frozenset[str]:
    """Names that code may look up in objects, those in texts included, as for `getattr`."""
    found: set[str] = set()
    for each in codes_of(code):
        found.update(each.co_names)
        texts = (constant for constant in each.co_consts if isinstance(constant, str))
        found.update(text for text in texts if text.isidentifier())
    return frozenset(found)


@lru_cache(maxsize=4096)
def loaded_by(code: CodeType) -> frozenset[str]:
    """Names of globals that code loads, and does more with than add notes to them."""
    return _arguments_of(code, "LOAD_GLOBAL", "LOAD_NAME") - collected_by(code)


@lru_cache(maxsize=4096)
def imported_by(code: CodeType) -> frozenset[str]:
    """Names of modules that code imports as it runs."""
    return _arguments_of(code, "IMPORT_NAME")


def _arguments_of(code: CodeType, *operations: str) -> frozenset[str]:
    return frozenset(
        str(instruction.argval)
        for each in codes_of(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in operations
    )


@lru_cache(maxsize=4096)
def collected_by(code: CodeType) -> frozenset[str]:
    """Names of closures and globals that code only adds something to: lists of notes."""
    added: set[str] = set()
    read: set[str] = set()
    for each in codes_of(code):
        instructions = [one for one in dis.get_instructions(each) if one.opname not in _FILLING]
        for one, following in zip(instructions, [*instructions[1:], instructions[-1]]):
            if one.opname in _LOADING:
                adds = following.opname in _OF_OBJECTS and following.argval in _ADDING
                (added if adds else read).add(str(one.argval))
    return frozenset(added - read)


_FILLING = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"})
_LOADING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"})
_OF_OBJECTS = frozenset({"LOAD_METHOD", "LOAD_ATTR"})
_ADDING = frozenset({"append", "add"})


def slots_of(value: Any) -> Iterator[str]:
    """Names of attributes that an object keeps in slots rather than in a dictionary."""
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and package_of(kind) not in KNOWN:
                yield name


def class_dictionary(kind: type) -> dict[str, Any]:
    """The dictionary of a class itself, of which `vars` gives a view."""
    found: dict[str, Any] = next(x for x in gc.get_referents(vars(kind)) if isinstance(x, dict))
    return found


def bytes_of(value: Any) -> Callable[[], bytes] | None:
    """Reads the memory that an object shows of itself, as arrays do; None: it shows none."""
    try:
        return memoryview(value).tobytes
    except TypeError:
        return None


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The objects that a collection, a wrapper or a reference leads to, each with a label.

    None for an object that is none of these.
    """
    if isinstance(value, MethodType):
        return [("", value.__func__), (".__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [("", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, WRAPPERS):
        return [("", one) for key in _WRAPPED if (one := getattr(value, key, None)) is not None]
    if isinstance(value, BuiltinFunctionType):
        bound = value.__self__
        return [] if isinstance(bound, (ModuleType, type)) else [(".__self__", bound)]
    if isinstance(value, dict):
        return [(f"[{key!r:.40}]", item) for key, item in [*value.items()]]
    if isinstance(value, _COLLECTIONS):
        return [(f"[{place}]", item) for place, item in enumerate([*value])]
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if isinstance(value, ContextVar):
        return [(".get()", value.get(None))]
    return [] if isinstance(value, bytearray) else None


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of a function's closure, with their cells; none that it only adds notes to."""
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
        if variable not in collected_by(code):
            yield variable, cell


def content_of(cell: Any) -> Any:
    """Value of a closure's variable; None while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def state_of(generator: Any) -> Any:
    """The state of a generator of random numbers, comparable."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state(legacy=False))
    return str(generator.bit_generator.state)


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a sparse tensor keeps its indices and values in; empty for another."""
    if type(tensor) is not torch.Tensor:
        return {}
    names = _SPARSE_PARTS.get(tensor.layout, ())
    # With counters of changes of their own: even `to_dense` bumps those of compressed layouts.
    return {name.strip("_"): getattr(tensor.detach(), name)().data for name in names}


class Reach:
    """Functions and objects that can be reached from a model, each once.

    Attributes:
        names: that code looks up in objects.
        functions: found, each with how it was come by.
        classes: of modules, and of others' objects.
        globals: dictionaries of modules of Python, each with the module's name and the names that
            are looked up in it.
        containers: dictionaries and lists that code may read, as (name, kind, container).
        tensors: that are neither parameters nor buffers of the model; of sparse ones the indices
            and values.
        iterators: names of iterators and generators, each with its type: their state is unreadable.
        compared: (name, function): the function gives what is to stay equal.
        foreign: names of functions and classes that are of no library.
    """

    def __init__(self, model: torch.nn.Module, known: Iterable[int] = ()) -> None:
        """known: ids of objects that are looked at otherwise."""
        modules = dict(model.named_modules())
        self._packages = {
            package_of(kind) for one in modules.values() for kind in type(one).__mro__
        }
        self.names: set[str] = set(RUN)
        self.functions: list[tuple[str, FunctionType]] = []
        self.classes: list[type] = []
        self.globals: dict[int, tuple[str, dict[str, Any], set[str]]] = {}
        self.containers: list[tuple[str, str, Any]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.iterators: list[tuple[str, str]] = []
        self.compared: list[tuple[str, Callable[[], Any]]] = []
        self.foreign: list[str] = []
        self._seen: set[int] = {id(one) for one in (*modules.values(), *_SHARED)} | set(known)
        self._seen.update(map(id, (*model.parameters(), *model.buffers())))
        self._seen.update(id(one) for name, one in vars(torch_module).items() if "hooks" in name)
        self._kept: list[Any] = []  # whose ids are noted
        self._done: set[tuple[int, str]] = set()
        for kind in (*map(type, modules.values()), torch.Tensor):
            self._add_class(kind)
        before = -1
        while before != self._size():
            before = self._size()
            self._follow_classes()
            for name, module in modules.items():
                self._follow_attributes(name, module)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if self.names & vars(tensor).keys():
                self.value(name, vars(tensor))

    def value(self, name: str, value: Any, depth: int = _DEPTH, *, data: bool = True) -> None:
        """Follows an object. data: it is the model's or of foreign code, not a library's own."""
        if isinstance(value, PLAIN) or depth == 0 or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor) and not data:
            return
        way = next((way for kind, way in _WAYS if isinstance(value, kind)), None)
        parts = parts_of(value) if way is None else ()
        if parts is None and not data:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if parts is None:
            self._object(name, value, depth)
        elif way is not None:
            way(self, name, value, depth, data)
        else:
            self._add_container(name, value)
            for label, part in parts:
                self.value(name + label, part, depth - bool(label), data=data)

    def is_known(self, value: Any) -> bool:
        """Whether a function, class or module is of a library, whose release says what it does.

        Of a package that modules of the model are from, this is so only of torch and its like.
        """
        package = package_of(value)
        return package in KNOWN or (package not in self._packages and is_installed(package))

    def looks_up(self, kind: type, name: str) -> bool:
        """Whether a name is looked up in a class: of a library's whole models what runs them."""
        if self.is_known(kind):
            return name in (RUN if _is_whole(kind) else self.names)
        return name in self.names or (name.startswith("__") and name not in INCIDENTAL)

    def _size(self) -> int:
        return len(self.names) + len(self.functions) + len(self.classes) + len(self._done)

    def _once(self, holder: Any, name: str) -> bool:
        if (id(holder), name) in self._done:
            return False
        self._done.add((id(holder), name))
        return True

    def _follow_classes(self) -> None:
        for kind in [*self.classes]:
            for name in [*vars(kind)]:
                if self.looks_up(kind, name) and self._once(kind, name):
                    data = not self.is_known(kind)
                    self.value(f"{kind.__name__}.{name}", vars(kind)[name], data=data)

    def attributes_of(self, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Those that code may read, of a module of no library all; not torch's own."""
        foreign = not self.is_known(type(module))
        others = _OF_MODULES | USED if foreign else _OF_MODULES | USED | FOR_GRADIENTS
        for name, value in [*vars(module).items()]:
            own = name not in others and not name.startswith("_kvpager")
            if own and (foreign or name in self.names):
                yield name, value

    def _follow_attributes(self, where: str, module: torch.nn.Module) -> None:
        for name, value in self.attributes_of(module):
            self.value(f"{where}.{name}" if where else name, value)
        for called in hooks_of(module):
            if not changes_nothing(called):
                self.value(f"hook of {where or 'the model'}", called)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base is not object and base not in self.classes:
                self.classes.append(base)
                if not self.is_known(base):
                    self.foreign.append(f"{base.__module__}.{base.__qualname__}")

    def _look_up(self, values: dict[str, Any], names: Iterable[str]) -> None:
        home = str(values.get("__name__"))
        self.globals.setdefault(id(values), (home, values, set()))[2].update(names)
        self._kept.append(values)

    def _class(self, name: str, value: Any, depth: int, data: bool) -> None:
        if not self.is_known(value):
            self._add_class(value)

    def _add_container(self, name: str, value: Any) -> None:
        if isinstance(value, (list, dict)):
            self.containers.append((name, "value", value))
        elif isinstance(value, _COMPARED):
            self.compared.append((name, lambda: type(value)(value)))
        elif isinstance(value, weakref.ref):
            self.compared.append((name, value))
        elif isinstance(value, ContextVar):
            self.compared.append((name, functools.partial(value.get, None)))

    def _function(self, name: str, function: FunctionType, depth: int, data: bool) -> None:
        if changes_nothing(function):
            return
        known, home = self.is_known(function), home_of(function)
        self.functions.append((name, function))
        for variable, cell in closure_of(function):
            self.value(f"{variable} of {name}", content_of(cell), depth - 1, data=not known)
            if not known:
                self.compared.append((f"{variable} of {name}", functools.partial(content_of, cell)))
        if known and not home.startswith(_ARCHITECTURES):
            return
        if not known:
            self.foreign.append(f"{home}.{function.__qualname__}")
            self._attributes(name, function, depth, data)
        for default in (function.__defaults__, function.__kwdefaults__):
            self.value(f"a default of {name}", default, depth, data=not known)
        self._globals(function, depth, known=known)

    def _globals(self, function: FunctionType, depth: int, *, known: bool) -> None:
        values, mentioned = function.__globals__, mentioned_by(function.__code__)
        self.names |= mentioned
        loaded = loaded_by(function.__code__)
        if not known and loaded & _BY_NAME:
            loaded |= mentioned & values.keys()
        self._look_up(vars(builtins), (loaded - values.keys()) & vars(builtins).keys())
        self._look_up(values, loaded)
        if not known and mentioned & ENVIRONMENT:
            read = functools.partial(_environment, sorted(mentioned))
            self.compared.append((f"the environment that {function.__qualname__} reads", read))
        # A name of a module of Python leads to names in that module.
        waiting: list[tuple[dict[str, Any], list[str], bool]]
        waiting, visited = [(values, sorted(loaded), known)], set()
        if not known:
            imported = imported_by(function.__code__) & sys.modules.keys()
            waiting += [(sys.modules, sorted(imported), False)] if imported else []
        while waiting:
            holder, names, of_library = waiting.pop()
            for name in names:
                value = holder.get(name)
                if not isinstance(value, ModuleType):
                    label = f"{holder.get('__name__')}.{name}"
                    self.value(label, value, depth - 1, data=not of_library)
                elif id(vars(value)) not in visited:
                    visited.add(id(vars(value)))
                    found = sorted(mentioned & vars(value).keys())
                    self._look_up(vars(value), found)
                    inner = self.is_known(value)
                    if inner:
                        found = [one for one in found if isinstance(vars(value)[one], ModuleType)]
                    waiting.append((vars(value), found, inner))

    def _array(self, name: str, value: Any, depth: int, data: bool) -> None:
        if value.dtype == object:
            self.compared.append((name, lambda: value.ravel().tolist()))
            self.value(name, value.ravel().tolist(), depth, data=data)
        elif value.nbytes > _SMALL and value.flags.writeable and value.flags.c_contiguous:
            self.tensors.append((name, torch.from_numpy(value.view(np.uint8))))
        else:
            self.compared.append((name, value.tobytes))

    def _tensor(self, name: str, value: Any, depth: int, data: bool) -> None:
        parts = sparse_parts(value)
        self.tensors += [(f"{name}.{part}", one) for part, one in parts.items()] or [(name, value)]
        if parts:  # changes in place give it other parts
            self.compared.append((name, functools.partial(_sparse_state, value)))
        if not self.is_known(type(value)):
            self._add_class(type(value))
        self._attributes(name, value, depth, data)

    def _attributes(self, name: str, value: Any, depth: int, data: bool) -> None:
        if vars(value):
            self.value(name, vars(value), depth, data=data)

    def _generator(self, name: str, value: Any, depth: int, data: bool) -> None:
        self.compared.append((name, functools.partial(state_of, value)))

    def _object(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, Iterator) and kind.__module__ in ("builtins", "itertools"):
            self.iterators.append((name, kind.__qualname__))
            return
        if (
            changes_nothing(value)
            or package_of(kind) in OPAQUE
            or isinstance(value, PreTrainedModel)
        ):
            return
        if isinstance(value, torch.nn.Module) or not self.is_known(kind):
            self._add_class(kind)
        if (read := bytes_of(value)) is not None:
            self.compared.append((name, read))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.containers.append((name, "attributes", own))
            for key, item in [*own.items()]:
                self.value(f"{name}.{key}", item, depth - 1)
        for slot in slots_of(value):
            read = functools.partial(getattr, value, slot, None)
            self.compared.append((f"{name}.{slot}", read))
            self.value(f"{name}.{slot}", getattr(value, slot, None), depth - 1)


_WAYS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (FunctionType, Reach._function),  # noqa: SLF001  # of this module
    (type, Reach._class),  # noqa: SLF001
    (ModuleType, lambda *_: None),  # what is looked up in it is known where that is done
    (torch.Tensor, Reach._tensor),  # noqa: SLF001
    (np.ndarray, Reach._array),  # noqa: SLF001
    (_GENERATORS, Reach._generator),  # noqa: SLF001
)


def _sparse_state(tensor: torch.Tensor) -> list[Any]:
    parts = sparse_parts(tensor).values()
    return [tuple(tensor.shape), *((one.data_ptr(), tuple(one.shape)) for one in parts)]


def _environment(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _is_whole(kind: type) -> bool:
    """Whether a class of a library says how whole models are used, or is of every module."""
    if issubclass(kind, PreTrainedModel):
        return not kind.__module__.startswith("transformers.models")
    if issubclass(torch.Tensor, kind):  # whose methods every forward calls
        return False
    return not issubclass(kind, torch.nn.Module) or kind is torch.nn.Module
