"""Writes an assembled text into a sequence: moved K/V as they are, chosen tokens computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from kvpager import pager
from kvpager._runtime.execution.batch import Batch, GivenRows
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.recompute import run
from kvpager._support.tokens import TokenIds
from kvpager.errors import CapacityError, InvariantError
from kvpager.pager import READ_DTYPES
from kvpager.segments.pieces import Piece
from kvpager.segments.policies import Mask

GIVEN_BYTES = 64 << 20  # most K/V given to one forward; at least a chunk's
POOL_SHARE = 4  # a forward opens at most 1/POOL_SHARE of the pool's blocks, if possible

Report = Callable[[int], object]


class Stitcher:
    """Writes the K/V of a text whose parts are laid out into sequences of one engine.

    A forward continues the sequence with *given* rows, whose K/V come from segments, and *live*
    rows, which the model computes. In every layer, each live row attends to all positions before
    it, given or live, and to none after it.

    Attributes:
        rows: live rows so far.
        forwards: forwards of the model so far.
    """

    def __init__(self, core: EngineCore, pieces: Sequence[Piece], text: TokenIds) -> None:
        self.rows = 0
        self.forwards = 0
        self._core = core
        self._pieces = pieces
        self._text = text
        layout = core.facts.layout
        self._chunk_tokens = layout.chunk_tokens
        self._most_given = max(layout.chunk_tokens, GIVEN_BYTES // layout.token_bytes)
        self._open_chunks = max(1, core.config.pool_blocks // POOL_SHARE)

    def extend(
        self,
        sequence: pager.Sequence,
        stop: int,
        live: Mask,
        *,
        provenance: str = "approximate",
        report: Report = lambda done: None,
    ) -> None:
        """Extends a sequence, which holds a prefix of the text, up to `stop`.

        Args:
            sequence: to extend; reserve room for it first.
            stop: position after the last token to write.
            live: [tokens] bool, those to compute; all others must be in segments.
            provenance: of the new tokens.
            report: called with the number of tokens held.

        Raises:
            CapacityError: the pool cannot hold the open chunks of even one forward.
            CorruptSnapshotError, StorageError, NonFiniteError: K/V written before stay.
        """
        planned = int(live[sequence.length : stop].sum())
        before = self.rows
        while (start := sequence.length) < stop:
            end = self._window(start, stop, live)
            try:
                self._forward(sequence, start, end, live, provenance)
            except CapacityError:
                if self._open_chunks == 1:
                    raise
                self._open_chunks //= 2
            report(sequence.length)
        if self.rows - before != planned:
            raise InvariantError(
                f"repair: {self.rows - before} rows were computed, where {planned} were chosen"
            )

    def _window(self, start: int, stop: int, live: Mask) -> int:
        """Where a forward from `start` ends, limited by its rows, given bytes and open chunks."""
        size = self._chunk_tokens
        end = min(stop, (start // size + self._open_chunks) * size)
        rows = np.flatnonzero(live[start:end])
        if len(rows) > self._core.rows:
            end = start + int(rows[self._core.rows])
        given = np.flatnonzero(~live[start:end])
        return end if len(given) <= self._most_given else start + int(given[self._most_given])

    def _forward(
        self, sequence: pager.Sequence, start: int, end: int, live: Mask, provenance: str
    ) -> None:
        core = self._core
        batch = Batch(core.rows, exact=core.config.exact is not False)
        batch.dense, batch.provenance = True, provenance
        for first, last in _runs(live, start, end):
            if live[first]:
                batch.commit(sequence, first, self._text[first:last])
            else:
                batch.give(sequence, first, last - first)
        at = start + np.flatnonzero(~live[start:end])
        if len(at):
            batch.given = GivenRows(self._text[at], *self.moved(at))
        if batch.used:
            run(core, batch)
            self.forwards += 1
        else:
            core.runner.give(batch)
        self.rows += batch.used

    def moved(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of ascending positions, all of segments, with keys moved to these positions.

        Returns:
            k [layers, n, kv_heads, k_dim] and v [layers, n, kv_heads, v_dim] on the CPU.
        """
        layout = self._core.facts.layout
        shape = (layout.layers, len(positions), layout.kv_heads)
        k = torch.empty(*shape, layout.k_dim, dtype=READ_DTYPES[layout.k_dtype])
        v = torch.empty(*shape, layout.v_dim, dtype=READ_DTYPES[layout.v_dtype])
        for piece in self._pieces:
            first, last = np.searchsorted(positions, [piece.start, piece.stop])
            if first == last:
                continue
            assert piece.segment is not None
            old = positions[first:last] - piece.start
            begin, end = int(old[0]), int(old[-1]) + 1
            move = self._core.key_mover.at(old, positions[first:last])
            chosen = torch.from_numpy(old - begin)
            everything = len(old) == end - begin
            for layer in range(layout.layers):
                keys, values = piece.segment.read_kv(layer, begin, end)
                if not everything:
                    keys, values = keys[chosen], values[chosen]
                k[layer, first:last] = move.move(layer, keys)
                v[layer, first:last] = values
        return k, v


def _runs(live: Mask, start: int, stop: int) -> list[tuple[int, int]]:
    """The maximal ranges within [start, stop) that are all live or all given, in order."""
    changes = start + 1 + np.flatnonzero(np.diff(live[start:stop]))
    edges = [start, *map(int, changes), stop]
    return list(pairwise(edges))
