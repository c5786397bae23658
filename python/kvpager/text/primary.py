"""A transcript's own K/V, and state where there is one, as the primary cache of a group."""

from __future__ import annotations

from kvpager.caches import NeedsCheckpoint, Ok, Refused, TrimAnswer
from kvpager.errors import CapacityError
from kvpager.text.transcript import Transcript


class PrimaryCache:
    """What cannot be kept of the text is uncomputed from then on; the text stays."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._transcript.committed

    def trim(self, position: int) -> TrimAnswer:
        """Refused behind what a window has let go; from a checkpoint where state is recurrent.

        Where the pool has no block for a part of a sealed chunk, the chunk's beginning is one.
        """
        transcript = self._transcript
        size = transcript.config.chunk_tokens
        if position >= self.length:
            return Ok()
        kept = position
        if transcript.states is not None:
            kept = transcript.states.nearest(position)
        earliest = transcript.sequence.earliest_trim
        if 0 < kept < earliest:
            released = transcript.sequence.released
            return Refused(
                f"the first {released} tokens have left every layer's window and were let go; it "
                f"can be cut at {earliest} or later, or at 0 (rewind_tokens is "
                f"{transcript.config.rewind_tokens})"
            )
        if kept != position:
            return NeedsCheckpoint(kept)
        try:
            transcript.cut(position)
        except CapacityError:
            boundary = position // size * size
            if boundary == position or 0 < boundary < earliest:
                raise
            return NeedsCheckpoint(boundary)
        if transcript.states is not None:
            transcript.states.rewind(position)
        return Ok()

    def rewind(self, position: int) -> None:
        """The tokens from the checkpoint on are uncomputed."""
        transcript = self._transcript
        transcript.forget_from(position)
        transcript.provisional = False
        if transcript.states is not None:
            transcript.states.rewind(position)

    def reset(self) -> None:
        """All tokens are uncomputed."""
        self.rewind(0)
