"""Collects logits from the forwards of an engine, without running further ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvpager.execution.batch import Batch
from kvpager.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.engine import Engine


class Listener:
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
def listening(engine: Engine) -> Iterator[Listener]:
    """While open, the engine's forwards are listened to."""
    runner = engine.core.runner
    listener = Listener(engine)
    swap: Any = engine
    swap.runner = listener
    try:
        yield listener
    finally:
        swap.runner = runner
