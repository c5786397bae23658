"""Runners that stand in for an engine's: one collects logits, one moves and pads the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpager._runtime.execution.batch import Batch
from kvpager._support.tokens import TokenIds
from kvpager.pager import ROW_PADDING, Forward, Sequence

if TYPE_CHECKING:
    from kvpager.engine import Engine


class ListeningRunner:
    """Runs each batch unchanged, and keeps its rows and the logits they requested."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine.core.runner
        # Of each forward and sequence: (position, token, logits or None), positions ascending.
        self._seen: list[tuple[int, list[tuple[int, int, torch.Tensor | None]]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, batch: Batch) -> torch.Tensor:
        """`Runner.run`."""
        logits: torch.Tensor = self._inner.run(batch)
        wanted = dict(zip(batch.wanted, logits))
        rows: dict[int, list[tuple[int, int, torch.Tensor | None]]] = {}
        for row, sequence, _ in batch.each_row():
            after = wanted.get(row)
            rows.setdefault(sequence.uid, []).append(
                (
                    int(batch.positions[row]),
                    int(batch.tokens[row]),
                    None if after is None else after.clone(),
                )
            )
        self._seen += rows.items()
        return logits

    def heard(self, uid: int, tokens: TokenIds) -> Iterator[tuple[int, torch.Tensor]]:
        """(position, logits after it) of every row that belongs to the text `tokens`.

        A row with a rejected proposal belongs to another text, and so do all rows after it in its
        forward.
        """
        for owner, rows in self._seen:
            if owner != uid:
                continue
            for position, token, logits in rows:
                if position >= len(tokens) or int(tokens[position]) != token:
                    break
                if logits is not None:
                    yield position, logits


@contextmanager
def listening(engine: Engine) -> Iterator[ListeningRunner]:
    """While open, the engine's forwards are listened to."""
    runner = engine.core.runner
    listener = ListeningRunner(engine)
    swap: Any = engine
    swap.runner = listener
    try:
        yield listener
    finally:
        swap.runner = runner


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
