"""The rows of one forward, packed with tokens of any sequences; what is left over is padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvpager.hf.state import EMPTY, RecurrentState
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, ROW_PADDING, ROW_READ, Sequence, Span
from kvpager.tokens import TokenIds

PADDING_TOKEN = 0

# Given the logits of the wanted rows: how many of each sequence's commit rows are to be kept.
Accept: TypeAlias = Callable[[torch.Tensor], Mapping[Sequence, int]]


@dataclass(frozen=True)
class Given:
    """K/V that a forward commits without rows of the model, of all its given spans in order.

    tokens: [g] int32. k: [layers, g, kv_heads, k_dim]. v: [layers, g, kv_heads, v_dim].
    """

    tokens: TokenIds
    k: torch.Tensor
    v: torch.Tensor


class Batch:
    """Filled from the first row on, then run once. Padding is token 0 at position 0.

    Attributes:
        spans: whose rows they are, as `Pager.begin_spans` takes them; what is not named is padding.
        positions, tokens: one entry per row, `capacity` of them.
        used: rows filled.
        wanted: rows whose logits are returned, in order.
        exact: whether it runs with a row count that is proven to give the one set of bits, or with
            exactly `used` rows.
        given: what its given spans are filled with.
        dense: whether its rows attend to everything before them, whatever is configured.
        provenance: what its rows are worth at best.
        accept: decides between the head and the commit what is kept; None: everything.
        before: of a model with recurrent layers, the state before the first row.
        after: the state its forward has left, once it is committed.
    """

    def __init__(self, capacity: int, *, exact: bool = True) -> None:
        self.spans: list[Span] = []
        self.positions = np.zeros(capacity, dtype=np.int64)
        self.tokens = np.empty(capacity, dtype=np.int64)
        self.tokens.fill(PADDING_TOKEN)
        self.wanted: list[int] = []
        self.used = 0
        self.exact = exact
        self.given: Given | None = None
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
        """Adds positions whose K/V are in `given`; they take no row."""
        self.spans.append((sequence, start, count, ROW_GIVEN))

    def commit_one(self, sequence: Sequence, position: int, token: int) -> int:
        """`commit` of a single token; returns the row's index."""
        return self.add(sequence, position, token, ROW_COMMIT)

    def read(self, sequence: Sequence, position: int, token: int) -> int:
        """Adds a row whose K/V exist, to have its logits again; returns its index."""
        return self.add(sequence, position, token, ROW_READ)

    def add(self, sequence: Sequence | None, position: int, token: int, kind: int) -> int:
        """Adds a row of any kind; returns its index."""
        row = self.used
        self.spans.append((sequence, position, 1, kind))
        self.positions[row] = position
        self.tokens[row] = token
        self.used = row + 1
        return row
