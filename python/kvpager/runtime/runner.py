"""Runs the model on one batch of rows: begin, every layer, head, commit."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager.errors import InvalidArgumentError
from kvpager.hf import Head, RowCounts, dummy_mask, packed_inputs, running
from kvpager.hf.attention import RowAttention
from kvpager.hf.decoder import decoder_of
from kvpager.hf.layout import NO_KV_DIM
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rotary import KeyMover, find_rotation
from kvpager.hf.state import RecurrentState
from kvpager.numerics import settings, tunes_kernels
from kvpager.pager import Forward, Pager
from kvpager.runtime.batch import Batch
from kvpager.runtime.to_host import ToHost


class _Timed:
    """A forward whose attention is timed, so that the model's share can be told from it."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.seconds = 0.0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        start = time.perf_counter()
        out: torch.Tensor = self._forward.attend(layer, q, k, v, **call)
        self.seconds += time.perf_counter() - start
        return out


# Given (layer, q, k, v, how the layer attends): whether that was enough.
Listener: TypeAlias = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], bool
]


class _EnoughError(Exception):
    """Ends a forward whose listener has heard enough."""


class _Heard:
    """A forward whose queries, keys and values somebody wants to see."""

    def __init__(self, forward: Forward, listener: Listener) -> None:
        self._forward = forward
        self._listener = listener
        self.layers = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> torch.Tensor:
        if self._listener(layer, q, k, v, call):
            raise _EnoughError
        out: torch.Tensor = self._forward.attend(layer, q, k, v, **call)
        self.layers += 1
        return out


class Runner:
    """The only place where the model runs. One forward at a time; a failed one commits nothing."""

    def __init__(
        self,
        model: Any,
        pager: Pager,
        row_counts: RowCounts,
        recurrence: Recurrence | None = None,
    ) -> None:
        """`recurrence`: how the model's recurrent layers are run, if it has any."""
        self._recurrence = recurrence
        self._decoder = decoder_of(model)
        self._head = Head(model, row_counts.head)
        self._model = model
        self._pager = pager
        self._counts = row_counts
        self._device = model.device
        self._threads = torch.get_num_threads()
        self._settings = settings(self._device)
        self._mask = dummy_mask(self._device)
        self._to_host = ToHost(self._device)
        self._weights = [
            tensor
            for tensor in (*model.parameters(), *model.buffers())
            if not tensor.is_inference()  # those have no version
        ]
        self._placed, self._placed_name = _first_parameter(model)
        self._dtype = self._placed[self._placed_name].dtype
        self._weights_version = sum(map(_VERSION, self._weights))
        self._lock = threading.Lock()
        self.forwards = 0
        self.rows = 0  # of all forwards, padding included
        self.rows_used = 0
        self.seconds = 0.0
        self.attention_seconds = 0.0
        self.head_seconds = 0.0

    def count(self, batch: Batch) -> int:
        """The rows a batch runs with: padded to a proven count, or exactly those it uses."""
        return self._counts.fit(batch.used) if batch.exact else batch.used

    def run(self, batch: Batch) -> torch.Tensor:
        """Commits the batch; returns logits [len(batch.wanted), vocab] in the model's dtype.

        They are on the CPU, whatever the model's device: one copy per forward.

        Raises:
            InvalidArgumentError: something that bits depend on was changed since the engine was
                made.
            NonFiniteError, CapacityError, StorageError: from the pager. Nothing was committed.
        """
        self.check_unchanged()
        with self._lock, torch.inference_mode():
            start = time.perf_counter()
            rows = self.count(batch)
            positions, tokens = batch.positions[:rows], batch.tokens[:rows]
            with self._begin(batch, rows) as forward:
                self._give(forward, batch)
                timed = _Timed(forward)
                if self._recurrence is None:
                    hidden = self._packed(timed, tokens, positions)
                else:
                    hidden, after = self._from_state(timed, batch, tokens, positions)
                self.attention_seconds += timed.seconds
                head_start = time.perf_counter()
                arriving = self._to_host(self._logits(hidden, batch.wanted))
                self.head_seconds += time.perf_counter() - head_start
                accepted = None if batch.accept is None else batch.accept(arriving())
                forward.commit(accepted, provenance=batch.provenance)
                logits = arriving()
                if self._recurrence is not None:
                    batch.after = after
            self.forwards += 1
            self.rows += rows
            self.rows_used += batch.used
            self.seconds += time.perf_counter() - start
        return logits

    def give(self, batch: Batch) -> None:
        """Commits a batch that has no rows of the model, but K/V that it is given."""
        with self._lock, self._begin(batch, 0) as forward:
            self._give(forward, batch)
            forward.commit(provenance=batch.provenance)

    def look(self, batch: Batch, listener: Listener) -> int:
        """Runs the batch until the listener has heard enough, and commits nothing.

        listener: called with (layer, q, k, v, call) before each layer's attention; True: enough.

        Returns:
            How many layers' attention was computed.
        """
        self.check_unchanged()
        with self._lock, torch.inference_mode():
            start = time.perf_counter()
            rows = self.count(batch)
            with self._begin(batch, rows) as forward:
                self._give(forward, batch)
                heard = _Heard(forward, listener)
                with suppress(_EnoughError):
                    self._packed(heard, batch.tokens[:rows], batch.positions[:rows])
            self.forwards += 1
            self.rows += rows
            self.rows_used += batch.used
            self.seconds += time.perf_counter() - start
        return heard.layers

    def find_rotation(self) -> KeyMover:
        """How position enters the model's keys, found out between two forwards."""
        with self._lock, torch.inference_mode():
            return find_rotation(self._model)

    def _begin(self, batch: Batch, rows: int) -> Forward:
        """The pager's forward for a batch of so many rows. It has yet to be given what it is."""
        return self._pager.begin_spans(
            batch.padded_spans(rows),
            batch.tokens[:rows].astype(np.int32),
            given=None if batch.given is None else batch.given.tokens,
            dense=batch.dense,
        )

    def _give(self, forward: Forward, batch: Batch) -> None:
        if batch.given is not None:
            forward.give(batch.given.k.to(self._device), batch.given.v.to(self._device))

    def _packed(
        self, forward: RowAttention, tokens: npt.NDArray[Any], positions: npt.NDArray[Any]
    ) -> torch.Tensor:
        """The decoder's output [rows, hidden_size] for rows of any sequences."""
        inputs = packed_inputs(self._on_device(tokens), self._on_device(positions), self._mask)
        with running(forward):
            output = self._decoder(**inputs)
        hidden: torch.Tensor = output[0][0]
        return hidden

    def _from_state(
        self,
        forward: RowAttention,
        batch: Batch,
        tokens: npt.NDArray[Any],
        positions: npt.NDArray[Any],
    ) -> tuple[torch.Tensor, RecurrentState]:
        """The same for the rows after a state, of one sequence; and the state after them."""
        assert self._recurrence is not None
        assert len(batch.owners) == 1
        assert batch.before.position == positions[0]
        recurrence, rows = self._recurrence, len(tokens)
        cache = recurrence.cache(batch.before)
        inputs = recurrence.inputs(self._on_device(tokens), self._on_device(positions), cache)
        with running(recurrence.attention(cache, forward)):
            output = self._decoder(**inputs)
        if not recurrence.layers:
            nothing = torch.zeros(rows, 1, NO_KV_DIM, dtype=torch.float16, device=self._device)
            forward.attend(0, nothing, nothing, nothing, scaling=1.0)
        hidden = output[0][0]
        return hidden, recurrence.taken(cache, batch.before.position + rows, hidden[-1])

    def logits_after(self, state: RecurrentState) -> torch.Tensor:
        """Logits [vocab] for the token after a state that is not of position 0: the same bits."""
        self.check_unchanged()
        with self._lock, torch.inference_mode():
            hidden = state.hidden.to(self._device).unsqueeze(0)
            arriving = self._to_host(self._logits(hidden, [0]))
            return arriving()[0]

    def _on_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _logits(self, hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        return self._head(hidden, wanted) if wanted else hidden.new_empty(0)

    def check_unchanged(self) -> None:
        """Raises InvalidArgumentError if something bits depend on is not as it was at the start.

        Weights that are changed in place are noticed by torch's own version counters; a change
        through `.data` or a tensor put in another's place is not.
        """
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
        if self._placed[self._placed_name].dtype != self._dtype:
            raise InvalidArgumentError(
                f"the model's dtype is {self._model.dtype}, but was {self._dtype} when the engine "
                "was made; close the engine, load the model again and make a new one"
            )
        if self._model.training:
            raise InvalidArgumentError("the model is in training mode; call model.eval()")
        for (name, value), then in zip(settings(self._device).items(), self._settings.values()):
            if value != then:
                raise InvalidArgumentError(
                    f"{name} is {value!r}, but was {then!r} when the engine was made, and bits "
                    "depend on it; set it back, or make a new Engine"
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
        if sum(map(_VERSION, self._weights)) != self._weights_version:
            raise InvalidArgumentError(
                "the model's weights were changed since the engine was made, and its K/V and "
                "fingerprint are of the old ones; close it and make a new Engine(model, ...)"
            )


def _first_parameter(model: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Where a model keeps a parameter, whose device is the model's; looked up at each forward."""
    module, name = next(
        (module, name)
        for module in model.modules()
        for name, _ in module.named_parameters(recurse=False)
    )
    return vars(module)["_parameters"], name


_VERSION = operator.attrgetter("_version")  # bumped by every change in place
