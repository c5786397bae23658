"""Makes a live model attend through kvpager in forwards of an engine, and nowhere else.

transformers looks up its attention function by a name in the model's configuration. kvpager writes
nothing to the model or its configuration. Instead, while a forward of an engine runs, and only in
its thread (context), a configuration registered here returns kvpager's name. So `model()` and
`model.generate` work as before in every thread, and nothing has to be undone in a copy, in a saved
model or when an engine is never closed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvpager._model.seam.attention import NAME, Owner, is_running, register
from kvpager.errors import UnsupportedModelError

# Configurations of models that engines were made for, by id, until they are collected. They have no
# effect outside a forward.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_redirecting = threading.Lock()


def attach(model: Any) -> None:
    """Registers a model's configurations, once for all its engines. Cannot be undone.

    Raises:
        UnsupportedModelError: the model does not take a registered attention.
    """
    if not type(model)._can_set_attn_implementation():  # noqa: SLF001  # no public name
        raise UnsupportedModelError(
            f"{type(model).__name__} does not look its attention up in transformers' "
            "AttentionInterface; use an architecture of transformers that does"
        )
    register()
    if not redirect("_attn_implementation", _own_attention):
        raise UnsupportedModelError(
            "PreTrainedConfig._attn_implementation of this release of transformers is no property, "
            "so that attention cannot be exchanged for a forward; use a release that "
            "`pip install kvpager` would choose"
        )
    for config in configurations(model):
        _known[id(config)] = config


def configurations(model: Any) -> Iterator[Any]:
    """The configurations of a model and its modules, nested ones included, each once."""
    seen: set[int] = set()
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if not isinstance(config, PreTrainedConfig) or id(config) in seen:
            continue
        seen.add(id(config))
        waiting += [getattr(config, name, None) for name in config.sub_configs]
        yield config


def owner_of(model: Any) -> Owner:
    """The modules and configurations of a model, for `owned_by`."""
    return Owner(frozenset(map(id, model.modules())), frozenset(map(id, configurations(model))))


def _own_attention(config: Any) -> str | None:
    return NAME if is_running(config) and id(config) in _known else None


def redirect(name: str, own: Callable[[Any], str | None]) -> bool:
    """Patches a property of transformers' configurations; once per process.

    name: of the property, which names an implementation.
    own: the name that a configuration has while an engine runs; None: what its owner has set.

    Returns:
        False: this release of transformers has no such property.
    """
    with _redirecting:
        theirs = getattr(PreTrainedConfig, name, None)
        if not isinstance(theirs, property) or theirs.fget is None:
            return False
        if hasattr(theirs.fget, "_of_kvpager"):
            return True
        configured = theirs.fget

        def implementation(config: Any) -> Any:
            if torch.compiler.is_compiling():  # the caller's own graph, which no engine runs
                return configured(config)
            return own(config) or configured(config)

        implementation._of_kvpager = True  # type: ignore[attr-defined]  # noqa: SLF001  # our own function
        changed = property(implementation, theirs.fset, theirs.fdel, theirs.__doc__)
        setattr(PreTrainedConfig, name, changed)
        return True
