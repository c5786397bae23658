"""What a model's modules hold beside weights and other modules: scales, sizes, functions."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig

# torch's own of every module, of which other parts of a key tell, and what no forward reads.
_LEFT_OUT = (frozenset(vars(torch.nn.Module())) - {"training"}) | {"generation_config"}
_MOST_NUMBERS = 1 << 16  # of a tensor that is neither a parameter nor a buffer
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class UnknownStateError(Exception):
    """A module holds an object of which nothing is known, named in the message."""


# Whether a function with this code and these global names is known.
Known = Callable[[CodeType, dict[str, Any]], bool]


def module_state(model: torch.nn.Module, known: Known) -> Iterator[tuple[str, str, Any]]:
    """(module, attribute, value) of every module, each value made of JSON's kinds.

    Args:
        model: the model.
        known: says of functions that modules hold whether they are known.

    Raises:
        UnknownStateError: a value is of a kind that nothing is known of.
    """
    configurations: dict[int, Any] = {}  # one for all modules, as a rule
    for name, module in model.named_modules():
        for attribute, value in sorted(vars(module).items()):
            if attribute in _LEFT_OUT:
                continue
            try:
                told = configurations.get(id(value)) or _told(value, known)
            except UnknownStateError as error:
                raise UnknownStateError(f"{name}.{attribute} is {error}") from None
            if isinstance(value, PretrainedConfig):
                configurations[id(value)] = told
            yield name, attribute, told


def _told(value: Any, known: Known) -> Any:
    if isinstance(value, enum.Enum) or type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, PretrainedConfig) or _is_adapters_setting(value):
        # Not to_dict(), which leaves out whose attention and whose experts a model has.
        return [type(value).__qualname__, _told(vars(value), known)]
    if isinstance(value, Mapping):
        return sorted([str(key), _told(member, known)] for key, member in value.items())
    if isinstance(value, (list, tuple)):
        return [_told(member, known) for member in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_told(member, known)) for member in value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, functools.partial):
        return [_told(part, known) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return _function(value, known)


def _is_adapters_setting(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and type(value).__module__.startswith("peft.")


def _tensor(value: torch.Tensor) -> Any:
    plain = type(value) is torch.Tensor and value.layout == torch.strided
    if not plain or value.device.type != "cpu" or value.numel() > _MOST_NUMBERS:
        raise UnknownStateError(f"a tensor of {value.numel()} numbers on {value.device}")
    numbers = value.detach().contiguous().view(-1).view(torch.uint8)
    return [str(value.dtype), list(value.shape), list(value.stride()), numbers.tolist()]


def _function(value: Any, known: Known) -> Any:
    """A function by its file, line and defaults, where these say all of it."""
    if isinstance(value, MethodType) and isinstance(value.__self__, (torch.nn.Module, type)):
        value = value.__func__
    if isinstance(value, BuiltinFunctionType):
        if isinstance(value.__self__, (ModuleType, type, type(None))):
            return value.__qualname__
    elif isinstance(value, FunctionType) and not value.__closure__:
        code = value.__code__
        if not known(code, value.__globals__):
            raise UnknownStateError(f"{value.__qualname__} of {code.co_filename}")
        defaults = [value.__defaults__ or (), value.__kwdefaults__ or {}]
        return [code.co_filename, code.co_firstlineno, value.__qualname__, _told(defaults, known)]
    raise UnknownStateError(f"a {type(value).__module__}.{type(value).__qualname__}")
