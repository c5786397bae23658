"""Segments saved as snapshots: the note in their session section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvpager.errors import (
    CorruptSnapshotError,
    InvalidArgumentError,
    PagerError,
    UnsupportedVersionError,
)
from kvpager.stores.names import check_name

VERSION = 1
PREFIX = "segment-"  # of names in a store

_NOTE = "segment"  # in the session section


@dataclass(frozen=True)
class SegmentNote:
    """The note that makes a snapshot that of a segment.

    Attributes:
        name: of the segment.
        tokens: of its text; the snapshot holds padding after them.
        digest: hex digest of its token ids.
    """

    name: str
    tokens: int
    digest: str

    @classmethod
    def of(cls, session: Mapping[str, Any], held: int, path: str) -> SegmentNote:
        """Reads the note of a parsed session section.

        held: tokens of the snapshot, padding included.

        Raises:
            InvalidArgumentError: the snapshot is no segment.
            CorruptSnapshotError, UnsupportedVersionError: the note has invalid values.
        """
        note = session.get(_NOTE)
        if note is None:
            raise InvalidArgumentError(
                f"{path} is a session, not a segment; open it with engine.restore"
            )
        if not isinstance(note, dict):
            raise CorruptSnapshotError(f"{path}: session.segment is {note!r}; expected an object")
        if note.get("version") != VERSION:
            raise UnsupportedVersionError(
                f"{path}: session.segment.version is {note.get('version')!r}; this release reads "
                f"{VERSION}"
            )
        tokens, digest = note.get("tokens"), note.get("digest")
        if type(tokens) is not int or not 1 <= tokens <= held:
            raise CorruptSnapshotError(
                f"{path}: session.segment.tokens is {tokens!r}; expected 1 to {held}"
            )
        if not isinstance(digest, str):
            raise CorruptSnapshotError(f"{path}: session.segment.digest is {digest!r}")
        try:
            name = check_name(note.get("name"))
        except InvalidArgumentError as error:
            raise CorruptSnapshotError(f"{path}: session.segment: {error}") from error
        return cls(name, tokens, digest)

    def to_session(self) -> dict[str, object]:
        """The session section of a segment's snapshot."""
        return {_NOTE: {"version": VERSION, **asdict(self)}}


def noted_segment(session: Mapping[str, Any], held: int, path: str) -> SegmentNote | None:
    """The note in a parsed session section; None if there is none or it cannot be read."""
    try:
        return SegmentNote.of(session, held, path)
    except PagerError:  # loading the segment reports it
        return None


def stored_name(name: str) -> str:
    """The name of a segment's snapshot in a store."""
    return PREFIX + check_name(name)
