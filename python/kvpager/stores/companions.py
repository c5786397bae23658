"""Companions of a snapshot: other models' caches of the same text, saved with it.

A companion is an ordinary snapshot in the same store; its name is made of its primary's name and
its kind. The primary's session section names it with its digest, and the companion's section names
the primary: the two belong together only if both links agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpager import _core

if TYPE_CHECKING:
    from kvpager.stores.base import SaveReport


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


DRAFT, STATES = "draft", "states"
KINDS = (DRAFT, STATES)

_COMPANIONS, _OWNER = "companions", "companion_of"  # in sessions


def companion_name(name: str, kind: str) -> str:
    """The name of a snapshot's companion."""
    return f"{name}.{kind}"


def session_of_companion(session: str, owner: str) -> str:
    """A companion's session section, JSON text, with the name of its primary."""
    return _with(session, **{_OWNER: owner})


def session_of_primary(session: str, companions: Mapping[str, SaveReport]) -> str:
    """A primary's session section, JSON text, that names exactly these companions by kind."""
    named = {
        kind: {"name": report.name, "digest": report.logical_digest}
        for kind, report in companions.items()
    }
    return _with(session, **{_COMPANIONS: named})


def named_companions(session: Mapping[str, Any]) -> dict[str, str]:
    """Digests by kind of the companions that a primary's session names."""
    named = session.get(_COMPANIONS)
    if not isinstance(named, dict):
        return {}
    return {
        kind: str(link["digest"])
        for kind, link in named.items()
        if kind in KINDS and isinstance(link, dict) and "digest" in link
    }


def owner_of(session: Mapping[str, Any]) -> str | None:
    """The primary that a companion's session names; None if the snapshot is no companion."""
    owner = session.get(_OWNER)
    return owner if isinstance(owner, str) else None


def _with(session: str, **links: object) -> str:
    """The session's JSON text with exactly these links."""
    links = {name: value for name, value in links.items() if value}
    if not links and not any(f'"{name}"' in session for name in (_COMPANIONS, _OWNER)):
        return session
    values = json.loads(session)
    kept = {name: value for name, value in values.items() if name not in (_COMPANIONS, _OWNER)}
    return json.dumps(kept | links, separators=(",", ":"))
