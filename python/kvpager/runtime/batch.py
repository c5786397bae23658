"""The rows of one forward, packed with tokens of any sequences; what is left over is padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Sequence
from kvpager.runtime.tokens import TokenIds

PADDING_TOKEN = 0

# Given the logits of the wanted rows: how many of each sequence's commit rows are to be kept.
Accept: TypeAlias = Callable[[torch.Tensor], Mapping[Sequence, int]]


class Batch:
    """Filled row by row, then run once. Padding is token 0 at position 0 and never varies.

    Attributes:
        sequences, positions, tokens, kinds: one entry per row, `capacity` of them; rows are filled
            from the first.
        used: rows filled.
        wanted: rows whose logits are returned, in order.
        exact: whether it runs with a row count that is proven to give the one set of bits, or with
            exactly `used` rows.
        accept: decides between the head and the commit what is kept; None: everything.
    """

    def __init__(self, capacity: int, *, exact: bool = True) -> None:
        self.sequences: list[Sequence | None] = [None] * capacity
        self.positions = np.zeros(capacity, dtype=np.int64)
        self.tokens = np.empty(capacity, dtype=np.int64)
        self.tokens.fill(PADDING_TOKEN)
        self.kinds = np.empty(capacity, dtype=np.uint8)
        self.kinds.fill(ROW_PADDING)
        self.wanted: list[int] = []
        self.used = 0
        self.exact = exact
        self.accept: Accept | None = None

    @property
    def room(self) -> int:
        """Rows still free."""
        return len(self.sequences) - self.used

    def commit(self, sequence: Sequence, start: int, tokens: TokenIds) -> range:
        """Adds rows that write positions start, start + 1, ...; returns their indices."""
        rows = range(self.used, self.used + len(tokens))
        assert rows.stop <= len(self.sequences)
        at = slice(rows.start, rows.stop)
        self.sequences[at] = [sequence] * len(tokens)
        self.positions[at] = np.arange(start, start + len(tokens))
        self.tokens[at] = tokens
        self.kinds[at] = ROW_COMMIT
        self.used = rows.stop
        return rows

    def commit_one(self, sequence: Sequence, position: int, token: int) -> int:
        """`commit` of a single token; returns the row's index."""
        return self._add(sequence, position, token, ROW_COMMIT)

    def read(self, sequence: Sequence, position: int, token: int) -> int:
        """Adds a row whose K/V exist, to have its logits again; returns its index."""
        return self._add(sequence, position, token, ROW_READ)

    def _add(self, sequence: Sequence, position: int, token: int, kind: int) -> int:
        row = self.used
        self.sequences[row] = sequence
        self.positions[row] = position
        self.tokens[row] = token
        self.kinds[row] = kind
        self.used = row + 1
        return row
