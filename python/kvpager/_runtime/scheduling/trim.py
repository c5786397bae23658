"""Cuts a text at a position, and keeps as much of its caches as possible."""

from __future__ import annotations

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.recompute import recomputing_damage
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.tokens import TokenIds
from kvpager.companions import CacheGroup, NeedsCheckpoint, Ok, Refused, TrimAnswer
from kvpager.errors import CapacityError


class PrimaryCache:
    """A transcript's own K/V and recurrent state, as the primary cache of its cache group.

    Tokens whose K/V cannot be kept become uncomputed; the text itself stays.
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._transcript.committed

    def trim(self, position: int) -> TrimAnswer:
        """Refuses positions before the earliest trim; for recurrent layers it names a checkpoint.

        If the pool has no block to copy a part of a sealed chunk, it names that chunk's beginning.
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
        """Makes the tokens from `position`, a checkpoint, on uncomputed."""
        transcript = self._transcript
        transcript.forget_from(position)
        transcript.provisional = False
        if transcript.states is not None:
            transcript.states.rewind(position)

    def reset(self) -> None:
        """Makes all tokens uncomputed."""
        self.rewind(0)


def trim(core: EngineCore, transcript: Transcript, position: int) -> None:
    """Keeps the tokens [0, position) of a text, 0 <= position <= its length.

    The next forward computes what a cache could not keep.
    """
    if position == transcript.length:
        return
    transcript.drop_accepted()
    held = transcript.committed
    group = CacheGroup(PrimaryCache(transcript), transcript.companions, transcript.trims)
    try:
        recomputing_damage(core, [transcript.sequence], lambda: group.trim(position))
    finally:  # also if a companion failed: the primary cache has been cut by then
        if transcript.committed <= position:
            transcript.finish_cut(position, held)


def trim_to_common(core: EngineCore, transcript: Transcript, text: TokenIds) -> int:
    """Keeps the tokens with which `text` begins too; returns how many that are."""
    held = transcript.tokens
    common = min(len(held), len(text))
    different = np.flatnonzero(held[:common] != text[:common])
    kept = int(different[0]) if different.size else common
    trim(core, transcript, kept)
    return kept
