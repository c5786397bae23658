"""The parts of an assembled text and their positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpager._support.tokens import TokenIds
from kvpager.segments.segment import Segment


@dataclass(frozen=True)
class Piece:
    """Positions [start, stop) of an assembled text, from one part of it.

    Attributes:
        start: position of its first token.
        tokens: its ids, int32 [stop - start].
        segment: the segment with its K/V; None for ids that have to be computed.
        exact: whether nothing before it is approximate, so that its K/V equal a full prefill's.
    """

    start: int
    tokens: TokenIds
    segment: Segment | None
    exact: bool

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    @property
    def moved(self) -> bool:
        """Whether its K/V were computed without the text that now comes before it."""
        return self.segment is not None and not self.exact


def lay_out(parts: Iterable[Segment | TokenIds]) -> list[Piece]:
    """One piece for each part that is not empty, in order.

    Ids or a segment at position 0 are exact, and ids after an exact piece too; a segment at another
    position is approximate, and so is everything after it.
    """
    pieces: list[Piece] = []
    start, exact = 0, True
    for part in parts:
        segment = None if isinstance(part, np.ndarray) else part
        tokens = part if isinstance(part, np.ndarray) else part.tokens
        if not len(tokens):
            continue
        exact = exact and (segment is None or start == 0)
        pieces.append(Piece(start, tokens, segment, exact))
        start += len(tokens)
    return pieces


def question_of(pieces: Sequence[Piece]) -> int:
    """Position of the ids after the last segment; the text's end if a segment is last."""
    stop = pieces[-1].stop
    for piece in reversed(pieces):
        if piece.segment is not None:
            break
        stop = piece.start
    return stop
