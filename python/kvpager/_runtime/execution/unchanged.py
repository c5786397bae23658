"""Checks that everything the bits depend on is as it was when the engine was made."""

from __future__ import annotations

from typing import Any

import torch

from kvpager._model.watch.looks import refuse_modes
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.weights.numerics import settings, tunes_kernels
from kvpager.errors import InvalidArgumentError, ModelChangedError


class Unchanged:
    """Checks settings of the process and the model's device before a forward, and the model after.

    If the model has changed by the end of a forward, its result is discarded; so a change during
    the forward is detected too. Before chunks are adopted, saved or restored, the model is checked
    as well, more thoroughly.
    """

    def __init__(self, model: Any, watch: ModelWatch) -> None:
        self._model = model
        self._watch = watch
        self._device = model.device
        self._threads = torch.get_num_threads()
        self._settings = settings(self._device)
        self._placed, self._placed_name = _first_parameter(model)

    def check_model(self, *, thorough: bool = False, training: bool = False) -> None:
        """Raises ModelChangedError if the model is not the one the engine was made for.

        A model in training mode raises a plain InvalidArgumentError, unless that is allowed.
        """
        self._check_mode(training=training)
        self._watch.check(thorough=thorough, training=training)

    def _check_mode(self, *, training: bool) -> None:
        if self._model.training and not training:
            raise InvalidArgumentError("the model is in training mode; call model.eval()")

    def explain(self, error: Exception) -> None:
        """Raises ModelChangedError from `error` if the model has changed.

        Does nothing if the change is a hook: then `error` itself says more.
        """
        try:
            self._watch.check()
        except ModelChangedError as changed:
            if not changed.what.startswith("hook "):
                raise changed from error

    def check_settings(self, *, training: bool = False) -> None:
        """Raises InvalidArgumentError if a setting of the process or the model's device changed.

        training: whether the model may be in training mode.
        """
        refuse_modes()
        threads = torch.get_num_threads()
        if threads != self._threads and self._device.type == "cpu":
            raise InvalidArgumentError(
                f"torch runs {threads} threads, but ran {self._threads} when the engine was made, "
                "and bits depend on it; call "
                f"torch.set_num_threads({self._threads}), or make a new Engine"
            )
        if self._placed[self._placed_name].device != self._device:
            raise InvalidArgumentError(
                f"the model is on {self._model.device}, but was on {self._device} when the engine "
                "was made; move it back, or close the engine and make a new one"
            )
        self._check_mode(training=training)
        now = settings(self._device)
        if now != self._settings:
            name = next(name for name, value in now.items() if value != self._settings[name])
            raise InvalidArgumentError(
                f"{name} is {now[name]!r}, but was {self._settings[name]!r} when the engine was "
                "made, and bits depend on it; set it back, or make a new Engine"
            )
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            raise InvalidArgumentError(
                "autocast is on, and under it the model computes other bits; leave the "
                f'`torch.autocast("{kind}")` block, or use torch.autocast("{kind}", enabled=False) '
                "inside"
            )
        if kind != "cpu" and tunes_kernels():
            raise InvalidArgumentError(
                "torch.cuda.tunable was enabled, under which bits depend on the run; call "
                "torch.cuda.tunable.enable(False)"
            )


def _first_parameter(model: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The dict and key of one parameter, whose device is the model's; read at each forward."""
    module, name = next(
        (module, name)
        for module in model.modules()
        for name, _ in module.named_parameters(recurse=False)
    )
    return vars(module)["_parameters"], name
