"""A segment as its snapshot has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpager.runtime.tokens import TokenIds
from kvpager.stores.segments import SegmentNote

if TYPE_CHECKING:
    from kvpager.runtime.segments.segment import Segment


class SavedSegment(NamedTuple):
    """Name, and ids without padding."""

    name: str
    tokens: TokenIds

    @classmethod
    def of(cls, session: Mapping[str, Any], tokens: TokenIds, path: str) -> SavedSegment:
        """From a snapshot's session section and its ids, padding included.

        Raises:
            InvalidArgumentError: it is no segment.
            CorruptSnapshotError, UnsupportedVersionError: it says what no writer does.
        """
        note = SegmentNote.of(session, len(tokens), path)
        return cls(note.name, tokens[: note.tokens])


def segment_note(segment: Segment) -> dict[str, object]:
    """What a segment's snapshot says beside its chunks."""
    return SegmentNote(segment.name, len(segment), segment.digest).to_session()
