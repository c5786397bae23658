"""What somebody has added to a model: adapters and their state, hooks, patched methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from kvpager.hf.looks import changes_nothing
from kvpager.hf.structure import name_of

_OWN = ("torch", "transformers")  # whose modules are told by the fingerprint's other fields


def additions_digest(model: Any) -> str:
    """A digest, in hex, of what is not transformers' own of a model; empty where nothing is.

    Of modules of others (the layers of an adapter, a custom model): name, class and plain
    attributes, so that another active adapter, another scaling and a merge are seen. Of hooks and
    methods that were put in the place of a class's: their names; what they compute is seen by a
    forward (`behaviour`). The same in every process.
    """
    found = [item for name, module in model.named_modules() for item in _of_module(name, module)]
    if not found:
        return ""
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _of_module(name: str, module: torch.nn.Module) -> Iterator[list[Any]]:
    kind = type(module)
    own = vars(module)
    if kind.__module__.partition(".")[0] not in _OWN:
        plain = {key: told for key, value in own.items() if (told := _told(value)) is not None}
        yield [name, "module", name_of(kind), plain]
    for key, value in own.items():
        if "hooks" in key and isinstance(value, dict):
            for hook in value.values():
                called = hook[1] if isinstance(hook, tuple) else hook
                if callable(called) and not changes_nothing(called):
                    yield [name, key, name_of(called)]
        elif callable(value) and hasattr(kind, key) and not isinstance(value, torch.nn.Module):
            yield [name, "method", key, name_of(value)]


def _told(value: Any) -> Any:
    """A plain value as JSON has it, or None for any other."""
    if isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return ["list", [_told(item) for item in value]]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        told = {str(key): _told(item) for key, item in value.items()}
        return ["dict", {key: item for key, item in told.items() if item is not None}]
    return None
