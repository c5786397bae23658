"""Additions to a model: adapters and their state, hooks, patched methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from kvpager.hf.description import Description
from kvpager.hf.looks import changes_nothing
from kvpager.hf.placement import replaced_to_place
from kvpager.hf.reach import Reach
from kvpager.hf.structure import name_of

_OWN = ("torch", "transformers")  # other fields of the fingerprint cover their modules


def additions_digest(model: Any) -> str:
    """A digest, in hex, of everything in a model that is not from transformers; may be empty.

    For modules of other packages (the layers of an adapter, a custom model) it covers name, class
    and plain attributes, which another active adapter, another scaling and a merge change. For
    hooks, replaced methods and functions, and for code of no library, it covers what they are, with
    all that they refer to (description.py). The same in every process.
    """
    found = [*_additions(model)]
    if not found:
        return ""
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def hooked(model: Any) -> bool:
    """Whether a model has hooks or replaced methods or functions, whose code nobody knows."""
    return any(item[1] not in ("module", "class") for item in _additions(model))


def _additions(model: Any) -> Iterator[list[Any]]:
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
            continue  # told of the functions that look them up
        for key in sorted(names & values.keys()):
            if callable(values[key]) and description.is_foreign(values[key]):
                yield [home, "replaced", key, description.of(values[key])]


def _of_module(name: str, module: torch.nn.Module, description: Description) -> Iterator[list[Any]]:
    kind = type(module)
    own = vars(module)
    if kind.__module__.partition(".")[0] not in _OWN:
        plain = {key: told for key, value in own.items() if (told := _told(value)) is not None}
        yield [name, "module", name_of(kind), plain]
    for key, value in own.items():
        if "forward" in key and "hooks" in key and isinstance(value, dict):
            for hook in value.values():
                called = hook[1] if isinstance(hook, tuple) else hook
                if callable(called) and not changes_nothing(called):
                    yield [name, key, name_of(called), description.of(called)]
        elif callable(value) and hasattr(kind, key) and not isinstance(value, torch.nn.Module):
            if replaced_to_place(module, key):
                continue
            yield [name, "method", key, name_of(value), description.of(value)]


def _told(value: Any) -> Any:
    """A plain value in JSON's types, or None for any other."""
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return ["list", [_told(item) for item in value]]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        told = {str(key): _told(item) for key, item in value.items()}
        return ["dict", {key: item for key, item in told.items() if item is not None}]
    return None
