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
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvpager.errors import UnsupportedModelError
from kvpager.hf.attention import NAME, Owner, is_running, register

_ANSWER = "_attn_implementation"  # the property that transformers asks

# Configurations of models that engines were made for, by id, until they are collected. They have no
# effect outside a forward.
_known: dict[int, weakref.ref[Any]] = {}
_installing = threading.Lock()


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
    _install()
    for config in configurations(model):
        _remember(config)


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
    """What belongs to a model, for `owned_by`."""
    return Owner(frozenset(map(id, model.modules())), frozenset(map(id, configurations(model))))


def _remember(config: Any) -> None:
    key = id(config)

    def forget(reference: weakref.ref[Any]) -> None:
        if _known.get(key) is reference:
            del _known[key]

    _known[key] = weakref.ref(config, forget)


def _install() -> None:
    """Patches transformers' configurations to answer by the running forward; once per process."""
    with _installing:
        own = getattr(PreTrainedConfig, _ANSWER, None)
        if not isinstance(own, property) or own.fget is None:
            raise UnsupportedModelError(
                f"PreTrainedConfig.{_ANSWER} of this release of transformers is no property, so "
                "that attention cannot be exchanged for a forward; use a release that "
                "`pip install kvpager` would choose"
            )
        if hasattr(own.fget, "_of_kvpager"):
            return
        told = own.fget

        def answer(config: Any) -> Any:
            if torch.compiler.is_compiling():  # the caller's own graph, which no engine runs
                return told(config)
            return NAME if is_running(config) and id(config) in _known else told(config)

        answer._of_kvpager = True  # type: ignore[attr-defined]  # noqa: SLF001  # our own function
        setattr(PreTrainedConfig, _ANSWER, property(answer, own.fset, own.fdel, own.__doc__))
