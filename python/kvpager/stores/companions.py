"""Companions of a snapshot: other models' caches of the same text, saved with it.

A companion is an ordinary snapshot in the same store; its name is made of its primary's name and
its kind. The primary's session section names it with its digest, and the companion's section names
the primary: the two belong together only if both links agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvpager.errors import CorruptSnapshotError
from kvpager.section_json import parse_section
from kvpager.stores.base import SaveReport

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


def links_of(session: str, path: str) -> tuple[dict[str, str], str | None]:
    """(`named_companions`, `owner_of`) of a session's text; ({}, None) if it is no JSON object."""
    try:
        values = parse_section(session, path, "session")
    except CorruptSnapshotError:  # `restore` reports it
        return {}, None
    return named_companions(values), owner_of(values)


def named_companions(session: Mapping[str, Any]) -> dict[str, str]:
    """Digests by kind of the companions that a primary's session names."""
    named = session.get(_COMPANIONS)
    if not isinstance(named, dict):
        return {}
    return {
        kind: str(said["digest"])
        for kind, said in named.items()
        if kind in KINDS and isinstance(said, dict) and "digest" in said
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
