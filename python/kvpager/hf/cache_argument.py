"""The argument by which a model of transformers is handed its cache: 5.24 gave it another name."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from kvpager.hf.decoder import decoder_of

# From 5.24 on; before; before, of Mamba. Of a call that has two, transformers takes the first.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

_names: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def cache_argument(model: Any) -> str | None:
    """The name by which a causal LM takes its Cache, and by which its output has it.

    None: its decoder's forward takes none.
    """
    kind = type(decoder_of(model))
    if kind not in _names:
        taken = inspect.signature(kind.forward).parameters
        _names[kind] = next((name for name in CACHE_ARGUMENTS if name in taken), None)
    return _names[kind]


def handed(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword of a call of a model with a cache; none for None, or where it takes none."""
    name = cache_argument(model)
    return {} if cache is None or name is None else {name: cache}
