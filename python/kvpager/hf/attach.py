"""Puts kvpager's attention into a live model, and what was there before back."""

from __future__ import annotations

from typing import Any

from kvpager.errors import UnsupportedModelError
from kvpager.hf.attention import NAME, register

_STATE = "_kvpager_attached"  # on the model: (engines attached, implementation before the first)


class Attachment:
    """One engine's claim on a model's attention; the last to be released puts back what was."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModelError where the model does not take a registered attention."""
        register()
        engines, previous = getattr(model, _STATE, (0, _implementation(model)))
        if not engines:
            model.set_attn_implementation(NAME)
            if _implementation(model) != NAME:
                raise UnsupportedModelError(
                    f"{type(model).__name__} does not look its attention up in transformers' "
                    "AttentionInterface; use an architecture of transformers that does"
                )
        setattr(model, _STATE, (engines + 1, previous))
        self._model: Any = model

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._model is None

    def release(self) -> None:
        """Gives the claim up. Doing so twice is harmless."""
        model, self._model = self._model, None
        if model is None:
            return
        engines, previous = getattr(model, _STATE)
        if engines > 1:
            setattr(model, _STATE, (engines - 1, previous))
            return
        delattr(model, _STATE)
        model.set_attn_implementation(previous)


def _implementation(model: Any) -> Any:
    return model.config._attn_implementation  # noqa: SLF001  # no public name
