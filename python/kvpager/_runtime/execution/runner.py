"""Runs the model on one batch of rows: begin, every layer, head, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager import _core
from kvpager._model.seam.attach import owner_of
from kvpager._model.seam.attention import RowAttention, owned_by, running
from kvpager._model.seam.causal_lm import Head, decoder_of
from kvpager._model.seam.layout import NO_KV_DIM
from kvpager._model.seam.linear import LinearLayers, computing
from kvpager._model.seam.observe import dummy_mask, packed_inputs
from kvpager._model.seam.recurrent import Recurrence
from kvpager._model.seam.rotary import KeyMover, find_rotation
from kvpager._model.seam.rows import RowCounts, same_bits
from kvpager._model.seam.state import RecurrentState
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.graphs import MOST_ROWS, Graphs
from kvpager._runtime.execution.recordings import Recordings, recordable
from kvpager._runtime.execution.unchanged import Unchanged
from kvpager.errors import UnsupportedModelError
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


class Traced(NamedTuple):
    """How autograd recorded a forward: rows, the model's mode, and `Trace.checkpoints`."""

    rows: int
    training: bool
    checkpoints: Hashable


class Trace(Protocol):
    """What records a forward for its gradients."""

    @property
    def checkpoints(self) -> Hashable:
        """How layers are computed again in the backward pass; equal where it is the same."""
        ...

    def products(self, layers: LinearLayers | None) -> AbstractContextManager[object]:
        """Has the products of linear layers recorded, within a `with`."""
        ...

    def attention(self, forward: Forward | None) -> RowAttention:
        """Attention that is recorded; without a forward, that of a layer computed again."""
        ...


class ToHost:
    """Copies tensors to the CPU: starts the copy at once and waits when the result is read.

    Copies from a GPU go through one pinned buffer and run while the host goes on. The caller has to
    read each result before the next copy starts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts a copy; returns a function that waits for it. May be called more than once."""
        if self._device.type == "cpu":
            return lambda: tensor
        if not tensor.numel():
            return tensor.cpu
        pinned = self._buffer(tensor.nbytes)[: tensor.nbytes]
        arriving = pinned.view(tensor.dtype).view(tensor.shape)
        arriving.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        arrived: list[torch.Tensor] = []

        def wait() -> torch.Tensor:
            if not arrived:
                done.synchronize()
                arrived.append(arriving.clone())
            return arrived[0]

        return wait

    def _buffer(self, size: int) -> torch.Tensor:
        if self._pinned is None or len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._pinned


class Runner:
    """The only place where the model runs. One forward at a time; a failed one commits nothing.

    Attributes:
        compared: how forwards were recorded by autograd that had the bits of `run`.
    """

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
        before: Runner | None = None,
    ) -> None:
        """`recurrence`: of the model's recurrent layers, if any. `turns`: None: makes its own.

        linear: layers that are kvpager's own products; None: torch computes all.
        graphs: forwards of few rows are replayed, on a GPU as CUDA graphs.
        before: of the same model with other values of its weights: what it has found out of the
            model's code still holds.
        """
        self.unchanged = unchanged
        self._recurrence = recurrence
        self._decoder = decoder_of(model)
        self.head = Head(model, row_counts.head)
        self._model = model
        self._owner = owner_of(model)
        self._pager = pager
        self._counts = row_counts
        self._device = model.device
        self._mask = dummy_mask(self._device)
        self._to_host = ToHost(self._device)
        self._linear = linear
        self.graphs = self._replaying(before) if graphs else None
        self.compared: set[Traced] = set() if before is None else before.compared
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

    def traced(self, batch: Batch, trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
        """Commits the batch with autograd recorded; the model may be in training mode.

        Returns:
            The decoder's output [rows, hidden_size], attached to autograd, and the logits
            [len(batch.wanted), vocab] of `run`, which are not.

        Raises:
            UnsupportedModelError: recorded, the model computes other bits.
            Other errors as `run`. Nothing was committed.
        """
        self.unchanged.check_settings(training=True)
        with self.turns, torch.enable_grad():
            start = time.perf_counter()
            rows = self.count(batch)
            tokens, positions = batch.tokens[:rows], batch.positions[:rows]
            kind = Traced(rows, self._model.training, trace.checkpoints)
            expected = None if kind in self.compared else self._untraced(batch, rows)
            with self._begin(batch, rows) as forward, trace.products(self._linear):
                hidden = self._packed(trace.attention(forward), tokens, positions)
                with torch.no_grad():
                    logits = self._logits(hidden.detach(), batch.wanted)
                    self._require_equal(expected, (hidden.detach(), logits))
                    self.compared.add(kind)
                    arriving = self._to_host(logits)
                    self.unchanged.check_model(training=True)
                    forward.commit(provenance=batch.provenance)
                    logits = arriving()
            self.forwards += 1
            self.rows += rows
            self.rows_used += batch.used
            self.seconds += time.perf_counter() - start
        return hidden, logits

    def around(self, trace: Trace) -> AbstractContextManager[object]:
        """The context of a forward that is traced, for layers that are computed again."""
        stack = ExitStack()
        stack.enter_context(trace.products(self._linear))
        stack.enter_context(owned_by(self._owner))
        stack.enter_context(running(trace.attention(None)))
        return stack

    def _untraced(self, batch: Batch, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch's hidden states and logits as `run` has them, in eval mode; not committed."""
        in_training = [module for module in self._model.modules() if module.training]
        try:
            for module in in_training:
                module.training = False
            with torch.inference_mode(), computing(self._linear):
                with self._begin(batch, rows) as forward:
                    hidden = self._packed(forward, batch.tokens[:rows], batch.positions[:rows])
                return hidden.clone(), self._logits(hidden, batch.wanted)
        finally:
            for module in in_training:
                module.training = True

    def _require_equal(
        self,
        expected: tuple[torch.Tensor, torch.Tensor] | None,
        found: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        if expected is not None and not all(map(same_bits, expected, found)):
            mode = "in training mode, " if self._model.training else ""
            raise UnsupportedModelError(
                f"{type(self._model).__name__} computes other bits {mode}when gradients are "
                "recorded, so that its log-probabilities would not be the rollout's"
            )

    def find_rotation(self) -> KeyMover:
        """Finds how position enters the model's keys; no forward runs meanwhile."""
        with self.turns, torch.inference_mode(), computing(self._linear):
            found = find_rotation(self._model)
            self.unchanged.check_model()
            return found

    def _replaying(self, before: Runner | None) -> Graphs | Recordings | None:
        if self._device.type == "cuda":
            return Graphs(self._pager, self._decoded, self._device)
        if self._recurrence is not None or not recordable(self._model):
            return None
        made = None if before is None else before.graphs
        made = made if isinstance(made, Recordings) else None
        return Recordings(self._model, self._decoded, self._linear, made)

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
        return self.head(hidden, wanted) if wanted else hidden.new_empty(0)
