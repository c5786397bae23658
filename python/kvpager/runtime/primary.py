"""A session's own K/V, and state where there is one, as the primary cache of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpager.errors import CapacityError
from kvpager.runtime.group import NeedsCheckpoint, Ok, Refused, TrimAnswer

if TYPE_CHECKING:
    from kvpager.runtime.session import Session


class PrimaryCache:
    """What cannot be kept of the text is owed by the session's cursor; the text stays."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._session.committed

    def trim(self, position: int) -> TrimAnswer:
        """Refused behind what a window has let go; from a checkpoint where state is recurrent.

        Where the pool has no block for a part of a sealed chunk, the chunk's beginning is one.
        """
        session = self._session
        size = session.engine.layout.chunk_tokens
        if position >= self.length:
            return Ok()
        kept = position
        if session.states is not None:
            kept = session.states.nearest(position)
        earliest = session.sequence.earliest_trim
        if 0 < kept < earliest:
            released = session.sequence.released
            return Refused(
                f"the first {released} tokens have left every layer's window and were let go; it "
                f"can be cut at {earliest} or later, or at 0 (rewind_tokens is "
                f"{session.engine.config.rewind_tokens})"
            )
        if kept != position:
            return NeedsCheckpoint(kept)
        try:
            session.cursor.cut(position)
        except CapacityError:
            boundary = position // size * size
            if boundary == position or 0 < boundary < earliest:
                raise
            return NeedsCheckpoint(boundary)
        if session.states is not None:
            session.states.rewind(position)
        return Ok()

    def rewind(self, position: int) -> None:
        """The tokens from the checkpoint on are owed."""
        session = self._session
        session.cursor.owe_from(position)
        session.cursor.provisional = False
        if session.states is not None:
            session.states.rewind(position)

    def reset(self) -> None:
        """All tokens are owed."""
        self.rewind(0)
