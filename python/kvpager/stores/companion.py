"""What another model holds of a text, as it is saved beside the text's own snapshot."""

from __future__ import annotations

from typing import NamedTuple

from kvpager import _core


class CompanionSnapshot(NamedTuple):
    """One companion of a session as it was at one moment.

    Attributes:
        kind: one of KINDS; a session has at most one of each.
        content: its chunks.
        fingerprint: what its bytes belong to, JSON text of an object.
        session: what it keeps beside them, likewise.
    """

    kind: str
    content: _core.SnapshotContent
    fingerprint: str
    session: str
