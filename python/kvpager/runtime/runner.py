"""Runs the model on one batch of rows: begin, every layer, head, commit."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from kvpager.errors import InvalidArgumentError
from kvpager.hf import Head, packed_inputs, running
from kvpager.pager import Forward, Pager
from kvpager.runtime.batch import Batch


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


class Runner:
    """The only place where the model runs. One forward at a time; a failed one commits nothing."""

    def __init__(self, model: Any, pager: Pager) -> None:
        self._decoder = model.get_decoder()
        self._head = Head(model)
        self._model = model
        self._pager = pager
        self._threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.forwards = 0
        self.seconds = 0.0
        self.attention_seconds = 0.0
        self.head_seconds = 0.0

    def run(self, batch: Batch) -> torch.Tensor:
        """Commits the batch; returns logits [len(batch.wanted), vocab] in the model's dtype.

        Raises:
            InvalidArgumentError: something that bits depend on was changed since the engine was
                made.
            NonFiniteError, CapacityError, StorageError: from the pager. Nothing was committed.
        """
        self._check_unchanged()
        with self._lock, torch.inference_mode():
            start = time.perf_counter()
            tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
            with self._pager.begin(
                batch.sequences, batch.positions, batch.tokens, batch.kinds
            ) as forward:
                timed = _Timed(forward)
                with running(timed):
                    output = self._decoder(**packed_inputs(tokens, positions))
                self.attention_seconds += timed.seconds
                head_start = time.perf_counter()
                logits = self._head(output[0][0], batch.wanted) if batch.wanted else torch.empty(0)
                self.head_seconds += time.perf_counter() - head_start
                forward.commit()
            self.forwards += 1
            self.seconds += time.perf_counter() - start
        return logits

    def _check_unchanged(self) -> None:
        threads = torch.get_num_threads()
        if threads != self._threads:
            raise InvalidArgumentError(
                f"torch runs {threads} threads, but ran {self._threads} when the engine was made, "
                "and bits depend on it; call "
                f"torch.set_num_threads({self._threads}), or make a new Engine"
            )
        if self._model.training:
            raise InvalidArgumentError("the model is in training mode; call model.eval()")
