"""A companion as it is saved beside its primary's snapshot."""

from __future__ import annotations

from typing import NamedTuple

from kvpager import _core


class CompanionSnapshot(NamedTuple):
    """One companion of a session, at one moment.

    Attributes:
        kind: one of KINDS; a session has at most one of each.
        content: its chunks.
        fingerprint: of the companion's model, JSON text of an object.
        session: its session section, likewise.
    """

    kind: str
    content: _core.SnapshotContent
    fingerprint: str
    session: str
