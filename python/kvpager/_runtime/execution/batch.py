"""The rows of one forward, packed with tokens of any sequences; unused rows are padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvpager._model.seam.state import EMPTY, RecurrentState
from kvpager._support.tokens import TokenIds
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, ROW_PADDING, ROW_READ, Sequence, Span

PADDING_TOKEN = 0

# Takes the logits of the wanted rows; returns how many of each sequence's commit rows to keep.
Accept: TypeAlias = Callable[[torch.Tensor], Mapping[Sequence, int]]


@dataclass(frozen=True)
class GivenRows:
    """K/V of all given spans of a forward, in order, which it commits without running the model.

    tokens: [g] int32. k: [layers, g, kv_heads, k_dim]. v: [layers, g, kv_heads, v_dim].
    """

    tokens: TokenIds
    k: torch.Tensor
    v: torch.Tensor


class Batch:
    """Filled from the first row on, then run once. Padding is token 0 at position 0.

    Attributes:
        spans: the rows of each sequence, as for `Pager.begin_spans`; all others are padding.
        positions, tokens: one entry per row, `capacity` of them.
        used: rows filled.
        wanted: rows whose logits are returned, in order.
        exact: True: runs with a row count of the ladder; False: with exactly `used` rows.
        given: the K/V of its given spans.
        dense: whether its rows attend to everything before them, regardless of the configuration.
        provenance: the best provenance that its rows may have.
        accept: called between the head and the commit, decides which rows to keep; None: all.
        before: the state before the first row, for a model with recurrent layers.
        after: the state after the forward, once that is committed.
    """

    def __init__(self, capacity: int, *, exact: bool = True) -> None:
        self.spans: list[Span] = []
        self.positions = np.zeros(capacity, dtype=np.int64)
        self.tokens = np.empty(capacity, dtype=np.int64)
        self.tokens.fill(PADDING_TOKEN)
        self.wanted: list[int] = []
        self.used = 0
        self.exact = exact
        self.given: GivenRows | None = None
        self.dense = False
        self.provenance = "exact"
        self.accept: Accept | None = None
        self.before = EMPTY
        self.after: RecurrentState | None = None

    @property
    def room(self) -> int:
        """Rows still free."""
        return len(self.tokens) - self.used

    @property
    def owners(self) -> list[Sequence]:
        """The sequences it has rows of, each once."""
        return list(dict.fromkeys(span[0] for span in self.spans if span[0] is not None))

    def padded_spans(self, rows: int) -> list[Span]:
        """The spans of a forward of `rows` rows."""
        padding = rows - sum(count for _, _, count, kind in self.spans if kind != ROW_GIVEN)
        return [*self.spans, (None, 0, padding, ROW_PADDING)] if padding else self.spans

    def each_row(self) -> list[tuple[int, Sequence, int]]:
        """(row, sequence, kind) of every row that is no padding."""
        rows = []
        first = 0
        for sequence, _, count, kind in self.spans:
            if kind == ROW_GIVEN:
                continue
            if sequence is not None:
                rows += [(row, sequence, kind) for row in range(first, first + count)]
            first += count
        return rows

    def commit(self, sequence: Sequence, start: int, tokens: TokenIds) -> range:
        """Adds rows that write positions start, start + 1, ...; returns their indices."""
        rows = range(self.used, self.used + len(tokens))
        assert rows.stop <= len(self.tokens)
        at = slice(rows.start, rows.stop)
        if rows:
            self.spans.append((sequence, start, len(rows), ROW_COMMIT))
        self.positions[at] = np.arange(start, start + len(tokens))
        self.tokens[at] = tokens
        self.used = rows.stop
        return rows

    def give(self, sequence: Sequence, start: int, count: int) -> None:
        """Adds positions whose K/V are in `given`; they need no row."""
        self.spans.append((sequence, start, count, ROW_GIVEN))

    def commit_one(self, sequence: Sequence, position: int, token: int) -> int:
        """`commit` of a single token; returns the row's index."""
        return self.add(sequence, position, token, ROW_COMMIT)

    def read(self, sequence: Sequence, position: int, token: int) -> int:
        """Adds a row for a position that has K/V, to compute its logits; returns its index."""
        return self.add(sequence, position, token, ROW_READ)

    def add(self, sequence: Sequence | None, position: int, token: int, kind: int) -> int:
        """Adds a row of any kind; returns its index."""
        row = self.used
        self.spans.append((sequence, position, 1, kind))
        self.positions[row] = position
        self.tokens[row] = token
        self.used = row + 1
        return row
