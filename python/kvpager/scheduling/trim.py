"""Cuts a text at a position, and keeps as much of its caches as possible."""

from __future__ import annotations

import numpy as np

from kvpager.companions import CacheGroup
from kvpager.execution.core import EngineCore
from kvpager.scheduling.recompute import recomputing_damage
from kvpager.text.primary import PrimaryCache
from kvpager.text.transcript import Transcript
from kvpager.tokens import TokenIds


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
