"""Whether all that bits depend on is as it was when an engine was made."""

from __future__ import annotations

from typing import Any

import torch

from kvpager.errors import InvalidArgumentError, ModelChangedError
from kvpager.hf.watch import ModelWatch
from kvpager.numerics import settings, tunes_kernels


class Unchanged:
    """Settings of the process and the model's place, looked at before a forward; the model after.

    What a forward computes is thrown away where the model has changed by its end, and so a change
    while it runs is seen too. Before something that was computed earlier is adopted, saved or
    restored, the model is looked at as well, more thoroughly.
    """

    def __init__(self, model: Any, watch: ModelWatch) -> None:
        self._model = model
        self._watch = watch
        self._device = model.device
        self._threads = torch.get_num_threads()
        self._settings = settings(self._device)
        self._placed, self._placed_name = _first_parameter(model)

    def check_model(self, *, thorough: bool = False) -> None:
        """Raises ModelChangedError if the model is not the one the engine was made for.

        Training mode is named for what it is: an InvalidArgumentError.
        """
        if self._model.training:
            raise InvalidArgumentError("the model is in training mode; call model.eval()")
        self._watch.check(thorough=thorough)

    def explain(self, error: Exception) -> None:
        """Raises ModelChangedError in the place of what a forward of a changed model failed with.

        A hook that fails is left to speak for itself.
        """
        try:
            self._watch.check()
        except ModelChangedError as changed:
            if not changed.what.startswith("hook "):
                raise changed from error

    def check_settings(self) -> None:
        """Raises InvalidArgumentError if a setting of the process or the model's place changed."""
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
        if self._model.training:
            raise InvalidArgumentError("the model is in training mode; call model.eval()")
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
    """Where a model keeps a parameter, whose device is the model's; looked up at each forward."""
    module, name = next(
        (module, name)
        for module in model.modules()
        for name, _ in module.named_parameters(recurse=False)
    )
    return vars(module)["_parameters"], name
