"""Runs the model on one batch of rows: begin, every layer, head, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager import _core
from kvpager.execution.batch import Batch
from kvpager.execution.graphs import MOST_ROWS, Graphs
from kvpager.execution.recordings import Recordings, recordable
from kvpager.execution.to_host import ToHost
from kvpager.execution.unchanged import Unchanged
from kvpager.hf import Head, RowCounts, dummy_mask, packed_inputs, running
from kvpager.hf.attach import owner_of
from kvpager.hf.attention import RowAttention, owned_by
from kvpager.hf.decoder import decoder_of
from kvpager.hf.layout import NO_KV_DIM
from kvpager.hf.linear import LinearLayers, computing
from kvpager.hf.recurrent import Recurrence
from kvpager.hf.rotary import KeyMover, find_rotation
from kvpager.hf.state import RecurrentState
from kvpager.pager import Forward, Pager

# Takes (layer, q, k, v, how the layer attends); returns True to end the forward.
Listener: TypeAlias = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], bool
]


class _EnoughError(Exception):
    """Ends a forward because its listener returned True."""


class _Heard:
    """A forward that passes its queries, keys and values to a listener."""

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
        unchanged: Unchanged,
        recurrence: Recurrence | None = None,
        turns: _core.Turns | None = None,
        *,
        graphs: bool = False,
        linear: LinearLayers | None = None,
    ) -> None:
        """`recurrence`: of the model's recurrent layers, if any. `turns`: None: makes its own.

        linear: layers that are kvpager's own products; None: torch computes all.
        graphs: forwards of few rows are replayed, on a GPU as CUDA graphs.
        """
        self.unchanged = unchanged
        self._recurrence = recurrence
        self._decoder = decoder_of(model)
        self._head = Head(model, row_counts.head)
        self._model = model
        self._owner = owner_of(model)
        self._pager = pager
        self._counts = row_counts
        self._device = model.device
        self._mask = dummy_mask(self._device)
        self._to_host = ToHost(self._device)
        self._linear = linear
        self.graphs = self._replaying() if graphs else None
        self.turns = turns or _core.Turns()
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
            InvalidArgumentError: a setting that the bits depend on has changed since the engine was
                made. ModelChangedError: the model has.
            NonFiniteError, CapacityError, StorageError: from the pager. Nothing was committed.
        """
        self.unchanged.check_settings()
        with self.turns, torch.inference_mode(), computing(self._linear):
            start = time.perf_counter()
            rows = self.count(batch)
            positions, tokens = batch.positions[:rows], batch.tokens[:rows]
            graphs, after = self._graphs_for(batch, rows), None
            if graphs is not None:
                graphs.prepare(rows, self.unchanged.check_model)
            with self._begin(batch, rows) as forward:
                self._give(forward, batch)
                try:
                    hidden = None
                    if graphs is not None:
                        given = torch.from_numpy(tokens), torch.from_numpy(positions)
                        hidden = graphs.run(forward, *given)
                    if hidden is None:
                        hidden, after = self._hidden(forward, batch, tokens, positions)
                    self.attention_seconds += forward.attend_seconds
                    head_start = time.perf_counter()
                    arriving = self._to_host(self._logits(hidden, batch.wanted))
                    self.head_seconds += time.perf_counter() - head_start
                except Exception as error:
                    self.unchanged.explain(error)
                    raise
                self.unchanged.check_model()
                with computing(None):  # a processor of logits may call the model itself
                    accepted = None if batch.accept is None else batch.accept(arriving())
                forward.commit(accepted, provenance=batch.provenance)
                logits = arriving()
                if after is not None:
                    batch.after = after
            self.forwards += 1
            self.rows += rows
            self.rows_used += batch.used
            self.seconds += time.perf_counter() - start
        return logits

    def give(self, batch: Batch) -> None:
        """Commits a batch of given K/V alone, without running the model."""
        with self.turns, self._begin(batch, 0) as forward:
            self._give(forward, batch)
            self.unchanged.check_model(thorough=True)
            forward.commit(provenance=batch.provenance)

    def look(self, batch: Batch, listener: Listener) -> int:
        """Runs the batch until the listener returns True, and commits nothing.

        listener: called with (layer, q, k, v, call) before each layer's attention.

        Returns:
            How many layers' attention was computed.
        """
        self.unchanged.check_settings()
        with self.turns, torch.inference_mode(), computing(self._linear):
            start = time.perf_counter()
            rows = self.count(batch)
            with self._begin(batch, rows) as forward:
                self._give(forward, batch)
                heard = _Heard(forward, listener)
                with suppress(_EnoughError):
                    self._packed(heard, batch.tokens[:rows], batch.positions[:rows])
                self.unchanged.check_model()
            self.forwards += 1
            self.rows += rows
            self.rows_used += batch.used
            self.seconds += time.perf_counter() - start
        return heard.layers

    def find_rotation(self) -> KeyMover:
        """Finds how position enters the model's keys; no forward runs meanwhile."""
        with self.turns, torch.inference_mode(), computing(self._linear):
            found = find_rotation(self._model)
            self.unchanged.check_model()
            return found

    def _replaying(self) -> Graphs | Recordings | None:
        if self._device.type == "cuda":
            return Graphs(self._pager, self._decoded, self._device)
        if self._recurrence is not None or not recordable(self._model):
            return None
        return Recordings(self._model, self._decoded, self._linear)

    def _graphs_for(self, batch: Batch, rows: int) -> Graphs | Recordings | None:
        """The graphs or recordings, if a replay can stand for the batch."""
        fits = rows <= MOST_ROWS and batch.given is None and not batch.dense
        return self.graphs if fits and self._recurrence is None else None

    def _begin(self, batch: Batch, rows: int) -> Forward:
        """Begins the pager's forward for a batch; `_give` then passes its given K/V."""
        return self._pager.begin_spans(
            batch.padded_spans(rows),
            batch.tokens[:rows].astype(np.int32),
            given=None if batch.given is None else batch.given.tokens,
            dense=batch.dense,
        )

    def _give(self, forward: Forward, batch: Batch) -> None:
        if batch.given is not None:
            forward.give(batch.given.k.to(self._device), batch.given.v.to(self._device))

    def _hidden(
        self,
        forward: Forward,
        batch: Batch,
        tokens: npt.NDArray[Any],
        positions: npt.NDArray[Any],
    ) -> tuple[torch.Tensor, RecurrentState | None]:
        """The decoder's output [rows, hidden_size], and the state behind it, if there are any."""
        if self._recurrence is None:
            return self._packed(forward, tokens, positions), None
        return self._from_state(forward, batch, tokens, positions)

    def _packed(
        self, forward: RowAttention, tokens: npt.NDArray[Any], positions: npt.NDArray[Any]
    ) -> torch.Tensor:
        """The decoder's output [rows, hidden_size] for rows of any sequences."""
        return self._decoded(forward, self._on_device(tokens), self._on_device(positions))

    def _decoded(
        self, forward: RowAttention, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The same, of tokens and positions on the model's device."""
        inputs = packed_inputs(tokens, positions, self._mask)
        with owned_by(self._owner), running(forward):
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
        """The same for rows of one sequence that follow a state; and the state after them."""
        assert self._recurrence is not None
        assert len(batch.owners) == 1
        assert batch.before.position == positions[0]
        recurrence, rows = self._recurrence, len(tokens)
        cache = recurrence.cache(batch.before)
        inputs = recurrence.inputs(self._on_device(tokens), self._on_device(positions), cache)
        attention = recurrence.attention(cache, forward)
        with owned_by(self._owner, directed=True), running(attention):
            output = self._decoder(**inputs)
        if not recurrence.layers:
            nothing = torch.zeros(rows, 1, NO_KV_DIM, dtype=torch.float16, device=self._device)
            forward.attend(0, nothing, nothing, nothing, scaling=1.0)
        hidden = output[0][0]
        return hidden, recurrence.taken(cache, batch.before.position + rows, hidden[-1])

    def logits_after(self, state: RecurrentState) -> torch.Tensor:
        """Logits [vocab] after a state that is not of position 0, with the bits of its forward."""
        self.unchanged.check_settings()
        with self.turns, torch.inference_mode(), computing(self._linear):
            hidden = state.hidden.to(self._device).unsqueeze(0)
            arriving = self._to_host(self._logits(hidden, [0]))
            self.unchanged.check_model()
            return arriving()[0]

    def _on_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _logits(self, hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        return self._head(hidden, wanted) if wanted else hidden.new_empty(0)
