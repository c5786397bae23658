"""A digest of what code and data are, the same in every process.

Numbers and texts by their values, tensors and arrays by their bytes, objects by their attributes,
functions by their code and by what they refer to. Code of a library is told by its name, since the
fingerprint has its release. Of an object of an extension in C only the kind is told.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import os
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvpager.hf.looks import changes_nothing
from kvpager.hf.reach import (
    CACHED,
    ENVIRONMENT,
    INCIDENTAL,
    OPAQUE,
    Reach,
    bytes_of,
    collected_by,
    content_of,
    home_of,
    loaded_by,
    mentioned_by,
    package_of,
    slots_of,
)

_VALUES = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_WRAPPERS = ("__func__", "fget", "fset", "func", "__wrapped__")


class Description:
    """Digests of objects that a model's code can reach."""

    def __init__(self, model: torch.nn.Module, reach: Reach) -> None:
        self._reach = reach
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._known: dict[int, tuple[str, bool]] = {}
        self._kept: list[Any] = []  # whose ids are noted
        self._way: list[int] = []  # ids of the objects that lead to where the walk is

    def of(self, value: Any) -> str:
        """The digest of an object, in hex."""
        return self._told(value)[0]

    def is_foreign(self, value: Any) -> bool:
        """Whether there is code of no library in an object, or data beside it."""
        return self._told(value)[1]

    def _told(self, value: Any) -> tuple[str, bool]:
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
                    told, other = self._told(part[0])
                    digest.update(told.encode())
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
        elif isinstance(value, MethodType):
            yield from _each((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield from _each((value.func, value.args, value.keywords))
        elif isinstance(value, BuiltinFunctionType):
            yield f"{value.__module__}.{value.__qualname__}".encode()
            if not isinstance(value.__self__, (ModuleType, type)):
                yield (value.__self__,)
        elif isinstance(value, ModuleType):
            yield value.__name__.encode()
        else:
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[bytes | tuple[Any]]:
        name, kind = self._modules.get(id(value)), type(value)
        if name is not None:
            yield name.encode()
            return
        wrapped = [getattr(value, key, None) for key in _WRAPPERS] if _wraps(value) else []
        yield from _each(each for each in wrapped if each is not None)
        leaves = isinstance(value, (PreTrainedConfig, PreTrainedModel)) or changes_nothing(value)
        if wrapped or leaves or package_of(kind) in OPAQUE:
            return
        yield (kind,)
        if (read := bytes_of(value)) is not None:
            yield read()
        if isinstance(value, (list, tuple, collections.deque)):
            yield from _each(value)
        own = getattr(value, "__dict__", None)
        for key, item in sorted(own.items()) if isinstance(own, dict) else ():
            if not str(key).startswith("_kvpager"):
                yield str(key).encode()
                yield (item,)
        for slot in slots_of(value):
            yield from (slot.encode(), (getattr(value, slot, None),))

    def _of_function(self, function: FunctionType) -> Iterator[bytes | tuple[Any]]:
        yield f"{home_of(function)}.{function.__qualname__}".encode()
        if changes_nothing(function):
            return
        collected = collected_by(function.__code__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if variable in collected:
                continue
            yield from (variable.encode(), (content_of(cell),))
        if self._reach.is_known(function):
            return
        yield from _of_code(function.__code__)
        yield from _each((function.__defaults__, function.__kwdefaults__, vars(function)))
        values, mentioned = function.__globals__, mentioned_by(function.__code__)
        for name in sorted((loaded_by(function.__code__) - collected) & values.keys()):
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


def _wraps(value: Any) -> bool:
    kinds = (staticmethod, classmethod, property, functools.cached_property, CACHED)
    return isinstance(value, kinds)


def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode()
    if tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no public name
            plain = tensor.detach().cpu().contiguous().reshape(-1)
        if type(plain) is torch.Tensor:
            yield plain.view(torch.uint8).numpy().tobytes()


def _of_code(code: CodeType) -> Iterator[bytes]:
    """What a function does, without the lines it stands in."""
    yield code.co_code
    yield repr([code.co_names, code.co_varnames, code.co_freevars, code.co_argcount]).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant))).encode()
        else:
            yield repr(constant).encode()
