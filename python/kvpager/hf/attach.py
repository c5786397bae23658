"""How a live model comes to attend through kvpager in an engine's forward, and nowhere else.

transformers looks its attention up by a name that the model's configuration tells. Nothing is
written to the model or its configuration: while a forward of an engine runs, and only in the thread
(context) it runs in, a configuration that was made known here answers that question with kvpager's
name. So `model()` and `model.generate` are what they were, in every thread, and a copy, a saved
model or an engine that nobody closed has nothing to give back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvpager.errors import UnsupportedModelError
from kvpager.hf.attention import NAME, is_running, register

_ANSWER = "_attn_implementation"  # the property that transformers asks

# Configurations of models that engines were made for, by id. One stays until it is collected; it
# makes no difference outside a forward.
_known: dict[int, weakref.ref[Any]] = {}
_installing = threading.Lock()


def attach(model: Any) -> None:
    """Makes a model's configurations known, once for all its engines. There is no way back.

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
    for config in _configurations(model):
        _remember(config)


def _configurations(model: Any) -> Iterator[Any]:
    """Of a model and its modules, each once, with those that are parts of another."""
    seen: set[int] = set()
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if not isinstance(config, PreTrainedConfig) or id(config) in seen:
            continue
        seen.add(id(config))
        waiting += [getattr(config, name, None) for name in config.sub_configs]
        yield config


def _remember(config: Any) -> None:
    key = id(config)

    def forget(reference: weakref.ref[Any]) -> None:
        if _known.get(key) is reference:
            del _known[key]

    _known[key] = weakref.ref(config, forget)


def _install() -> None:
    """Teaches transformers' configurations to answer by what runs; once per process."""
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
            return NAME if is_running() and id(config) in _known else told(config)

        answer._of_kvpager = True  # type: ignore[attr-defined]  # noqa: SLF001  # our own function
        setattr(PreTrainedConfig, _ANSWER, property(answer, own.fset, own.fdel, own.__doc__))
