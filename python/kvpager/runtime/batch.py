"""The rows of one forward: always M, packed with tokens of any sequences, the rest padding."""

from __future__ import annotations

import numpy as np

from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Sequence
from kvpager.runtime.tokens import TokenIds

PADDING_TOKEN = 0


class Batch:
    """Filled row by row, then run once. Padding is token 0 at position 0 and never varies."""

    def __init__(self, rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * rows
        self.positions = np.zeros(rows, dtype=np.int64)
        self.tokens = np.full(rows, PADDING_TOKEN, dtype=np.int64)
        self.kinds = np.full(rows, ROW_PADDING, dtype=np.uint8)
        self.wanted: list[int] = []  # rows whose logits are returned, in order
        self.used = 0

    @property
    def room(self) -> int:
        """Rows still free."""
        return len(self.sequences) - self.used

    def commit(self, sequence: Sequence, start: int, tokens: TokenIds) -> range:
        """Adds rows that write positions start, start + 1, ...; returns their indices."""
        return self._add(sequence, start, tokens, ROW_COMMIT)

    def read(self, sequence: Sequence, position: int, token: int) -> range:
        """Adds a row whose K/V exist, to have its logits again."""
        return self._add(sequence, position, np.array([token], dtype=np.int32), ROW_READ)

    def _add(self, sequence: Sequence, start: int, tokens: TokenIds, kind: int) -> range:
        rows = range(self.used, self.used + len(tokens))
        at = slice(rows.start, rows.stop)
        self.sequences[at] = [sequence] * len(tokens)
        self.positions[at] = np.arange(start, start + len(tokens))
        self.tokens[at] = tokens
        self.kinds[at] = kind
        self.used = rows.stop
        return rows
