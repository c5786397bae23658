"""Forwards with the same work in other rows, among other neighbours, at other row counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpager.execution.batch import Batch
from kvpager.pager import ROW_PADDING, Forward, Sequence

if TYPE_CHECKING:
    from kvpager.engine import Engine


class DisturbedRunner:
    """Runs each batch with its rows elsewhere, and counts what it did.

    The rows of a sequence keep their order, as required. Everything else is random: the row count,
    from those proven to give the same bits; which rows are padding; and the content of padding:
    random tokens at random positions, whose attention is NaN.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._inner = engine.core.runner
        self._ladder = engine.row_counts.ladder
        self._random = np.random.default_rng(seed)
        self._vocab = engine.vocab_size
        self._positions = _known_positions(engine)
        self.moved = 0  # rows that ran at another index than planned
        self.padded = 0  # rows of garbage beside them
        self.shared = 0  # forwards with rows of several sequences
        self.counts: set[int] = set()
        self.padding: list[int] = []  # of the forward that is running

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Batch) -> torch.Tensor:
        """`Runner.run` of the same rows in other places."""
        used = batch.each_row()
        counts = [count for count in self._ladder if count >= len(used)]
        count = int(self._random.choice(counts))
        place = self._places(used, count)
        other = Batch(count)
        other.accept = batch.accept
        tokens = self._random.integers(0, self._vocab, count)
        positions = self._random.integers(0, self._positions, count)
        planned = {place[row]: (row, sequence, kind) for row, sequence, kind in used}
        for new in range(count):
            if new in planned:
                row, sequence, kind = planned[new]
                other.add(sequence, int(batch.positions[row]), int(batch.tokens[row]), kind)
            else:
                other.add(None, int(positions[new]), int(tokens[new]), ROW_PADDING)
        other.wanted = [place[row] for row in batch.wanted]
        self._note(batch, place, count)
        logits: torch.Tensor = self._inner.run(other)
        return logits

    def _note(self, batch: Batch, place: dict[int, int], count: int) -> None:
        self.padding = sorted(set(range(count)) - set(place.values()))
        self.padded += len(self.padding)
        self.moved += sum(old != new for old, new in place.items())
        self.shared += len(batch.owners) > 1
        self.counts.add(count)

    def _places(self, used: list[tuple[int, Sequence, int]], count: int) -> dict[int, int]:
        """A new row for each used one; rows of one sequence stay in order."""
        drawn = self._random.permutation(count)[: len(used)].tolist()
        rows: dict[int, list[int]] = defaultdict(list)
        places: dict[int, list[int]] = defaultdict(list)
        for (row, sequence, _), new in zip(used, drawn):
            rows[sequence.uid].append(row)
            places[sequence.uid].append(new)
        return {
            row: new for uid, mine in rows.items() for row, new in zip(mine, sorted(places[uid]))
        }


@contextmanager
def disturbed(engine: Engine, seed: int) -> Iterator[DisturbedRunner]:
    """While open, every forward of the engine is disturbed."""
    runner, begin = engine.core.runner, engine.pager.begin_spans
    disturber = DisturbedRunner(engine, seed)
    swap: Any = engine.core

    def poisoning(*args: Any, **options: Any) -> Forward:
        forward = begin(*args, **options)
        _answer_padding_with_nan(forward, disturber.padding)
        return forward

    swap.runner, swap.pager.begin_spans = disturber, poisoning
    try:
        yield disturber
    finally:
        swap.runner = runner
        del swap.pager.begin_spans  # the class's own is seen again


def _answer_padding_with_nan(forward: Any, padding: list[int]) -> None:
    """A padding row's attention is zeros; NaN there shows whether anything reads that row."""
    attend: Callable[..., torch.Tensor] = forward.attend

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        out = attend(*args, **options)
        out[padding] = torch.nan
        return out

    forward.attend = poisoned


def _known_positions(engine: Engine) -> int:
    """Positions a padding row may claim: any that the model was made for."""
    return int(getattr(engine.model.config, "max_position_embeddings", None) or engine.rows)
