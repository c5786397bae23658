"""A digest of what code and data are, the same in every process.

Numbers and texts by their values, tensors and arrays by their bytes, objects by their attributes,
functions by their code and by what they refer to. Code of a library counts by its name, since the
fingerprint has its release; an object of an extension in C by its type alone.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvpager._model.watch.looks import called_by, changes_nothing
from kvpager._model.watch.reach import (
    ENVIRONMENT,
    INCIDENTAL,
    OPAQUE,
    WRAPPERS,
    Reach,
    bytes_of,
    closure_of,
    content_of,
    home_of,
    loaded_by,
    mentioned_by,
    package_of,
    parts_of,
    slots_of,
    sparse_parts,
)
from kvpager._model.weights.held import name_of
from kvpager._model.weights.supported import replaced_to_place

_VALUES = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class Description:
    """Digests of objects that a model's code can reach.

    Attributes:
        functions: of Python, that were met.
        opaque: types of objects that were met, of which a digest has no more than the type.
    """

    def __init__(self, model: torch.nn.Module, reach: Reach) -> None:
        self.functions: list[FunctionType] = []
        self.opaque: list[type] = []
        self._reach = reach
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._known: dict[int, tuple[str, bool]] = {}
        self._kept: list[Any] = []  # whose ids are noted
        self._way: list[int] = []  # ids of the objects that lead to where the walk is

    def of(self, value: Any) -> str:
        """The digest of an object, in hex."""
        return self._digested(value)[0]

    def is_foreign(self, value: Any) -> bool:
        """Whether there is code of no library in an object, or data beside it."""
        return self._digested(value)[1]

    def _digested(self, value: Any) -> tuple[str, bool]:
        if isinstance(value, _VALUES):
            return _hashed(f"{type(value).__name__} {value!r}".encode()), False
        known = self._known.get(id(value))
        if known is None:
            if id(value) in self._way:
                return f"{len(self._way) - self._way.index(id(value))} back", False
            self._way.append(id(value))
            digest, foreign = hashlib.blake2b(digest_size=20), self._is_own_code(value)
            for part in self._parts(value):
                if isinstance(part, bytes):
                    digest.update(b"%d " % len(part) + part)
                else:
                    inner, other = self._digested(part[0])
                    digest.update(inner.encode())
                    foreign = foreign or other
            self._way.pop()
            self._kept.append(value)
            known = self._known[id(value)] = digest.hexdigest(), foreign
        return known

    def _is_own_code(self, value: Any) -> bool:
        code = isinstance(value, (FunctionType, type))
        return code and not self._reach.is_known(value) and not changes_nothing(value)

    def _parts(self, value: Any) -> Iterator[bytes | tuple[Any]]:
        """What an object is: bytes, and further objects, each in a tuple."""
        yield f"{type(value).__module__}.{type(value).__qualname__}".encode()
        if isinstance(value, (*_NAMED, enum.Enum)):
            yield str(value).encode()
        elif isinstance(value, torch.Tensor):
            yield from _of_tensor(value)
        elif isinstance(value, np.ndarray):
            yield f"{value.dtype.str} {value.shape}".encode()
            if value.dtype == object:
                yield from _each(value.ravel().tolist())
            else:
                yield value.tobytes()
        elif isinstance(value, dict):
            for pair in value.items():
                yield from _each(pair)
        elif isinstance(value, (set, frozenset)):
            yield " ".join(sorted(map(self.of, value))).encode()
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, (MethodType, functools.partial, BuiltinFunctionType)):
            if isinstance(value, BuiltinFunctionType):
                yield f"{value.__module__}.{value.__qualname__}".encode()
            yield from _each(part for _, part in parts_of(value) or ())
        elif isinstance(value, ModuleType):
            yield value.__name__.encode()
        else:
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[bytes | tuple[Any]]:
        name, kind = self._modules.get(id(value)), type(value)
        if name is not None:
            yield name.encode()
            return
        if isinstance(value, WRAPPERS):
            yield from _each(part for _, part in parts_of(value) or ())
            return
        if isinstance(value, (PreTrainedConfig, PreTrainedModel)) or changes_nothing(value):
            return
        if package_of(kind) in OPAQUE:
            self.opaque.append(kind)
            return
        yield (kind,)
        read, own, slots = bytes_of(value), getattr(value, "__dict__", None), [*slots_of(value)]
        if read is not None:
            yield read()
        if isinstance(value, (list, tuple, collections.deque)):
            yield from _each(value)
        elif read is None and not isinstance(own, dict) and not slots and kind is not torch.device:
            self.opaque.append(kind)
        for key, item in sorted(own.items()) if isinstance(own, dict) else ():
            if not str(key).startswith("_kvpager"):
                yield str(key).encode()
                yield (item,)
        for slot in slots:
            yield from (slot.encode(), (getattr(value, slot, None),))

    def _of_function(self, function: FunctionType) -> Iterator[bytes | tuple[Any]]:
        self.functions.append(function)
        yield f"{home_of(function)}.{function.__qualname__}".encode()
        if changes_nothing(function):
            return
        for variable, cell in closure_of(function):
            yield from (variable.encode(), (content_of(cell),))
        if self._reach.is_known(function):
            return
        yield from _of_code(function.__code__)
        yield from _each((function.__defaults__, function.__kwdefaults__, vars(function)))
        values, mentioned = function.__globals__, mentioned_by(function.__code__)
        for name in sorted(loaded_by(function.__code__) & values.keys()):
            yield name.encode()
            yield from self._of_global(values[name], mentioned)
        if mentioned & ENVIRONMENT:
            for name in sorted(mentioned & os.environ.keys()):
                yield f"{name}={os.environ[name]}".encode()

    def _of_global(self, value: Any, mentioned: frozenset[str]) -> Iterator[bytes | tuple[Any]]:
        if not isinstance(value, ModuleType):
            yield (value,)
            return
        yield value.__name__.encode()
        if not self._reach.is_known(value) and id(value) not in self._way:
            self._way.append(id(value))
            for name in sorted(mentioned & vars(value).keys()):
                yield name.encode()
                yield from self._of_global(vars(value)[name], mentioned)
            self._way.pop()

    def _of_class(self, kind: type) -> Iterator[bytes | tuple[Any]]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if not self._reach.is_known(kind):
            yield from _each(kind.__bases__)
            for name, member in sorted(vars(kind).items()):
                if name not in INCIDENTAL:
                    yield from (name.encode(), (member,))


def state_digest(model: torch.nn.Module, reach: Reach) -> str:
    """A digest, in hex, of the attributes of modules that a model's code reads.

    Beside parameters, buffers and configurations, which other fields of a fingerprint cover.
    """
    description, digest = Description(model, reach), hashlib.blake2b(digest_size=32)
    for name, module in model.named_modules():
        for key, value in sorted(reach.attributes_of(module)):
            # Methods that are replaced are additions to the model, unless they only place it.
            method = callable(value) and hasattr(type(module), key)
            if not method and not isinstance(value, (torch.nn.Module, PreTrainedConfig)):
                digest.update(f"{name}.{key} {description.of(value)};".encode())
    return digest.hexdigest()


def _hashed(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=20).hexdigest()


def _each(values: Any) -> Iterator[tuple[Any]]:
    for value in [*values]:
        yield (value,)


def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode()
    for part in sparse_parts(tensor).values():
        yield from _of_tensor(part)
    if tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no public name
            plain = tensor.detach().cpu().contiguous().reshape(-1)
        if type(plain) is torch.Tensor:
            yield plain.view(torch.uint8).numpy().tobytes()


def _of_code(code: CodeType) -> Iterator[bytes]:
    """The instructions of a function, without their line numbers."""
    yield code.co_code
    yield repr([code.co_names, code.co_varnames, code.co_freevars, code.co_argcount]).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()


_OWN = ("torch", "transformers")  # other fields of the fingerprint cover their modules


@dataclass(frozen=True)
class Additions:
    """Everything in a model that is not from transformers.

    Attributes:
        digest: in hex, the same in every process; empty where nothing was added. For modules of
            other packages (the layers of an adapter, a custom model) it covers name, class and
            plain attributes, which another active adapter, another scaling and a merge change. For
            hooks, replaced methods and functions, and for code of no library, it covers what they
            are, with all that they refer to.
        hooked: the model has hooks, or replaced methods or functions: code that is not known.
    """

    digest: str
    hooked: bool


def additions_of(model: Any) -> Additions:
    """Finds what was added to a model."""
    found = [*_found_additions(model)]
    if not found:
        return Additions("", hooked=False)
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return Additions(digest, hooked=any(item[1] not in ("module", "class") for item in found))


def _found_additions(model: Any) -> Iterator[list[Any]]:
    reach = Reach(model)
    description = Description(model, reach)
    for name, module in model.named_modules():
        yield from _of_module(name, module, description)
    for kind in reach.classes:
        if not reach.is_known(kind):
            yield [name_of(kind), "class", description.of(kind)]
            continue
        for key, member in [*vars(kind).items()]:
            if reach.looks_up(kind, key) and description.is_foreign(member):
                yield [name_of(kind), "replaced", key, description.of(member)]
    for home, values, names in reach.globals.values():
        if not reach.is_known(ModuleType(home)):
            continue  # described with the functions that look them up
        for key in sorted(names & values.keys()):
            if callable(values[key]) and description.is_foreign(values[key]):
                yield [home, "replaced", key, description.of(values[key])]


def _of_module(name: str, module: torch.nn.Module, description: Description) -> Iterator[list[Any]]:
    kind = type(module)
    own = vars(module)
    if kind.__module__.partition(".")[0] not in _OWN:
        values = {
            key: plain for key, value in own.items() if (plain := _as_json(value)) is not None
        }
        yield [name, "module", name_of(kind), values]
    for key, value in own.items():
        if "forward" in key and "hooks" in key and isinstance(value, dict):
            for hook in value.values():
                called = called_by(hook)
                if callable(called) and not changes_nothing(called):
                    yield [name, key, name_of(called), description.of(called)]
        elif callable(value) and hasattr(kind, key) and not isinstance(value, torch.nn.Module):
            if replaced_to_place(module, key):
                continue
            yield [name, "method", key, name_of(value), description.of(value)]


def _as_json(value: Any) -> Any:
    """A plain value in JSON's types, or None for any other."""
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return ["list", [_as_json(item) for item in value]]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        items = {str(key): _as_json(item) for key, item in value.items()}
        return ["dict", {key: item for key, item in items.items() if item is not None}]
    return None
