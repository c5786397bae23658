"""A segment as read from its snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpager._support.tokens import TokenIds
from kvpager.errors import CorruptSnapshotError
from kvpager.segments.segment import Segment, digest_of
from kvpager.stores.segments import SegmentNote


class SavedSegment(NamedTuple):
    """Name, and ids without padding."""

    name: str
    tokens: TokenIds

    @classmethod
    def of(
        cls, transcript: Mapping[str, Any], tokens: TokenIds, path: str, name: str
    ) -> SavedSegment:
        """Reads a snapshot's session section.

        tokens: the snapshot's ids, padding included. name: under which it was found.

        Raises:
            InvalidArgumentError: it is no segment.
            CorruptSnapshotError, UnsupportedVersionError: its note has invalid values, or it is the
                segment of another name.
        """
        note = SegmentNote.of(transcript, len(tokens), path)
        if note.name != name:
            raise CorruptSnapshotError(
                f"{path} holds segment {note.name!r}; expected {name!r}: its file was renamed, or "
                "put in another's place"
            )
        ids = tokens[: note.tokens]
        if note.digest != digest_of(ids):
            raise CorruptSnapshotError(
                f"{path}: session.segment.digest is {note.digest}, and that of its token ids is "
                f"{digest_of(ids)}"
            )
        return cls(note.name, ids)


def segment_note(segment: Segment) -> dict[str, object]:
    """The session section of a segment's snapshot."""
    return SegmentNote(segment.name, len(segment), segment.digest).to_session()
