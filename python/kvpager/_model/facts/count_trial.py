"""Computes a short text with each of an engine's row counts, end to end over a small pager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from kvpager._model.facts.checked_model import CheckedModel
from kvpager._model.model_facts import Findings
from kvpager._model.proof.prove import Dropped
from kvpager._model.seam.causal_lm import HEAD_ROWS, Positions
from kvpager._model.seam.rows import RowCounts, same_bits
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import new_pager
from kvpager._runtime.execution.runner import Runner
from kvpager._runtime.execution.unchanged import Unchanged
from kvpager.config import frontier_blocks
from kvpager.pager import Pager, Sequence

_MORE = 8  # tokens after a whole chunk
_LEAST_DECODED = 8
_SEED = 7

# Rows of a forward that are of one text: its number, and which of its tokens.
_TextRows: TypeAlias = tuple[int, range]


class CountTrial:
    """Computes a made-up text in forwards of M rows and of other counts; compares the bits.

    A context manager. A second text is the beginning of the first, under another salt, so that the
    two share no chunk. The trial makes its own runner and pager and closes them at its end.
    """

    def __init__(self, checked: CheckedModel, found: Findings, watch: ModelWatch) -> None:
        """`found`: of the model, to be tried. `watch`: has seen a forward."""
        self._checked, self._found = checked, found
        self._unchanged = Unchanged(checked.model, watch)
        length = found.layout.chunk_tokens + _MORE
        length = min(length, Positions(checked.model).limit or length)
        random = np.random.default_rng(_SEED)
        self._ids = random.integers(0, checked.vocab_size, length).astype(np.int32)
        self._salts = 0
        self._logits = torch.empty(0, device="cpu")
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pager = self._small_pager()

    def differing(self) -> list[Dropped]:
        """Row counts of the engine, or of its head, that give other bits than M rows."""
        self._compute_alone()
        found = [self._judged(rows, head, first) for rows, head, first in self._ways()]
        return [one for one in found if one is not None]

    def difference_of_all_rows(self) -> str | None:
        """What differs if all forwards have M rows but other pieces of the text; None: nothing."""
        self._compute_alone()
        return self._difference(self._found.rows, HEAD_ROWS, first=True)

    def __enter__(self) -> CountTrial:
        return self

    def __exit__(self, *_: object) -> None:
        self._pager.close()

    def _small_pager(self) -> Pager:
        found, size = self._found, self._found.layout.chunk_tokens
        blocks = frontier_blocks(size, found.rows) + 1 + 2 * -(-len(self._ids) // size)
        config = found.config.replace(
            pool_tokens=blocks * size,
            rows=found.rows,
            host_bytes=4 * blocks * found.layout.chunk_bytes,
            disk_bytes=0,
            disk_path=None,
        )
        return new_pager(
            found,
            config,
            {"trial": "of row counts"},
            self._checked.workers,
            self._checked.place,
        )

    def _ways(self) -> Iterator[tuple[int, int, bool]]:
        """Row counts to try, as (rows, rows of the head, whether token by token)."""
        counts = self._found.row_counts
        rows = counts.smaller or (counts.rows,)
        heads = [head for head in counts.head if head != HEAD_ROWS] or [HEAD_ROWS]
        for at in range(max(len(rows), len(heads))):
            first = at == 0 and bool(counts.smaller)
            yield rows[min(at, len(rows) - 1)], heads[min(at, len(heads) - 1)], first

    def _judged(self, rows: int, head: int, first: bool) -> Dropped | None:
        what = self._difference(rows, head, first)
        if what is None:
            return None
        if head != HEAD_ROWS and what.startswith("logits"):  # of the rows, or of the head?
            without = self._difference(rows, HEAD_ROWS, first)
            if without is None:
                return Dropped(head, f"the short check at start: {what}, in the head")
        return Dropped(rows, f"the short check at start: {what}")

    def _difference(self, rows: int, head: int, first: bool) -> str | None:
        length = len(self._ids)
        most = self._found.rows
        plans = [_decoded(length, rows, most)] if first else []
        if not first or rows == most:
            plans.append(_packed(length, rows))
        return next(filter(None, (self._compared(rows, head, plan) for plan in plans)), None)

    def _compute_alone(self) -> None:
        rows = self._found.rows
        with self._new_texts() as texts:
            plan = ([(0, piece)] for piece in _ranges(0, len(self._ids), rows))
            forwards = self._run(rows, HEAD_ROWS, plan, texts)
            self._logits = torch.cat([logits for _, logits in forwards])
            self._kv = self._read(texts[0], len(self._ids))

    def _compared(self, rows: int, head: int, plan: Iterable[list[_TextRows]]) -> str | None:
        """What differs if `plan` runs with `rows` rows and `head` of the head; None: nothing."""
        other_logits = None
        with self._new_texts() as texts:
            for pieces, logits in self._run(rows, head, plan, texts):
                positions = [position for _, piece in pieces for position in piece]
                for position, ours in zip(positions, logits):
                    if not other_logits and not same_bits(ours, self._logits[position]):
                        other_logits = f"logits after position {position}"
            return self._difference_of_kv(texts) or other_logits

    def _difference_of_kv(self, texts: list[Sequence]) -> str | None:
        for sequence in texts:
            length = sequence.length
            for layer, pair in enumerate(self._read(sequence, length)):
                for name, ours, theirs in zip(("keys", "values"), pair, self._kv[layer]):
                    if not same_bits(ours, theirs[:length]):
                        rows = zip(ours, theirs)
                        at = next(i for i, (a, b) in enumerate(rows) if not same_bits(a, b))
                        return f"{name} of layer {layer} at position {at}"
        return None

    def _run(
        self, rows: int, head: int, plan: Iterable[list[_TextRows]], texts: list[Sequence]
    ) -> Iterator[tuple[list[_TextRows], torch.Tensor]]:
        """Runs forwards of exactly `rows` rows; yields the pieces of each and all their logits."""
        most = self._found.rows
        counts = RowCounts(most, (rows,) if rows < most else (), (head,))
        runner = Runner(
            self._checked.model,
            self._pager,
            counts,
            self._unchanged,
            linear=self._checked.linear,
        )
        for pieces in plan:
            batch = Batch(most)
            for text, piece in pieces:
                batch.commit(texts[text], piece.start, self._ids[piece.start : piece.stop])
            batch.wanted.extend(range(batch.used))
            yield pieces, runner.run(batch)

    def _read(self, sequence: Sequence, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [sequence.read_kv(layer, 0, length) for layer in range(self._found.layout.layers)]

    @contextmanager
    def _new_texts(self) -> Iterator[list[Sequence]]:
        """The two texts, empty, which are closed at the end."""
        self._salts += 2
        texts = [self._pager.sequence(salt=f"{self._salts + i}") for i in range(2)]
        try:
            yield texts
        finally:
            for text in texts:
                text.close()


def _ranges(start: int, stop: int, size: int) -> Iterator[range]:
    for first in range(start, stop, size):
        yield range(first, min(first + size, stop))


def _decoded(length: int, rows: int, most: int) -> Iterator[list[_TextRows]]:
    """The text in pieces of all rows, and its last tokens one by one: about M rows in all."""
    last = min(length // 2, max(_LEAST_DECODED, most // rows))
    for piece in (*_ranges(0, length - last, rows), *_ranges(length - last, length, 1)):
        yield [(0, piece)]


def _packed(length: int, rows: int) -> Iterator[list[_TextRows]]:
    """Both texts in common forwards, the second, which ends halfway, in the first rows."""
    done = other = 0
    while done < length:
        second = range(other, min(other + rows // 2, length // 2))
        first = range(done, min(done + rows - len(second), length))
        yield [(1, second), (0, first)] if second else [(0, first)]
        done, other = first.stop, second.stop
