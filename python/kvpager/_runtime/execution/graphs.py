"""CUDA graphs: a forward of few rows is launched as one, not operation by operation.

A decode step of an 8B model is some 1,600 launches, which take longer than what they launch. So the
decoder, with the pager's own launches in it, is captured once for each number of rows and replayed
for all later forwards of as many: what differs between them is read from device memory, and
`Pager.begin` and `commit` stay outside (docs/cuda.md).

A graph counts only if a replay has the bits of the same forward run operation by operation, which
is tried when it is captured. Where it has others, or a model cannot be captured, forwards of as
many rows stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from kvpager._model.seam.attention import RowAttention
from kvpager._model.seam.rows import same_bits
from kvpager.errors import CapacityError
from kvpager.pager import ROW_COMMIT, Pager

MOST_ROWS = 64  # with more, kernels take longer than their launches

_SALT = "kvpager: rows that a graph is captured with"
_log = logging.getLogger(__name__)

# The decoder's output [rows, hidden_size] for rows with tokens and positions [rows] int64.
Decode: TypeAlias = Callable[[RowAttention, torch.Tensor, torch.Tensor], torch.Tensor]
# Captures what a function launches; returns what the function returns, and what launches it again.
Capture: TypeAlias = Callable[
    [Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], object]]
]


def cuda_capture(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
    """Captures a CUDA graph. Other threads may use the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = step()
    return made, graph.replay


class Replayed(RowAttention, Protocol):
    """A forward of the pager that can be replayed."""

    def replayed(self, generation: int) -> None:
        """See `Forward.replayed`."""


@dataclass(frozen=True)
class _Graph:
    """tokens, positions: [rows] int64, read by a replay. hidden: [rows, hidden], written by it."""

    tokens: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    replay: Callable[[], object]
    generation: int


class Graphs:
    """The CUDA graphs of one model and pager, by their number of rows.

    Attributes:
        replays: forwards that were replayed.
    """

    def __init__(
        self, pager: Pager, decode: Decode, device: torch.device, capture: Capture = cuda_capture
    ) -> None:
        self._pager = pager
        self._decode = decode
        self._device = device
        self._capture = capture
        self._graphs: dict[int, _Graph | None] = {}  # None: not to be had
        self.replays = 0

    def prepare(self, rows: int, check: Callable[[], None]) -> None:
        """Captures a graph of so many rows, if there is none that can be replayed.

        Call it while no forward runs. Without room for a text of so many tokens it does nothing.

        check: raises where the model has changed; then nothing is kept of it.
        """
        if rows in self._graphs:
            known = self._graphs[rows]
            if known is None or known.generation == self._pager.generation:
                return
        made = None
        try:
            made = self._captured(rows)
        except CapacityError:
            return
        except Exception as error:
            _log.warning(
                "forwards of %d rows are not captured as a CUDA graph, and run operation by "
                "operation: %s: %s",
                rows,
                type(error).__name__,
                error,
            )
        check()
        self._graphs[rows] = made

    def run(
        self, forward: Replayed, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | None:
        """The decoder's output [rows, hidden_size] of a forward of the pager, by a replay.

        It is overwritten by the next replay of as many rows. None: there is no graph to replay.

        tokens, positions: [rows] int64, on the CPU.
        """
        graph = self._graphs.get(len(tokens))
        if graph is None or graph.generation != self._pager.generation:
            return None
        graph.tokens.copy_(tokens)
        graph.positions.copy_(positions)
        graph.replay()
        forward.replayed(graph.generation)
        self.replays += 1
        return graph.hidden

    def _captured(self, rows: int) -> _Graph | None:
        pager = self._pager
        ids = np.arange(rows, dtype=np.int64)
        tokens = torch.from_numpy(ids).to(self._device).clone()
        positions = tokens.clone()
        with closing(pager.sequence(salt=_SALT)) as text:
            spans = [(text, 0, rows, ROW_COMMIT)]
            with pager.begin_spans(spans, ids.astype(np.int32)) as forward:
                expected = self._decode(forward, tokens, positions).clone()
            with pager.begin_spans(spans, ids.astype(np.int32)) as forward:
                hidden, replay = self._capture(lambda: self._decode(forward, tokens, positions))
                graph = _Graph(tokens, positions, hidden, replay, pager.generation)
                replay()
                forward.replayed(graph.generation)
                if same_bits(hidden, expected):
                    return graph
        _log.warning(
            "a CUDA graph of %d rows has other bits than its operations one by one; forwards of as "
            "many rows are not captured",
            rows,
        )
        return None
