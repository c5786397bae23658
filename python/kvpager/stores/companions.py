"""Companions of a snapshot: what other models hold of the same text, saved with it.

A companion is a snapshot like any other, in the same store, under its primary's name and its own
kind. The primary's session names it with its digest, the companion's names the primary: only a pair
that agrees belongs together.
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
    """What the companion of a snapshot is called."""
    return f"{name}.{kind}"


def session_of_companion(session: str, owner: str) -> str:
    """A companion's session, JSON text, that says whose it is."""
    return _with(session, **{_OWNER: owner})


def session_of_primary(session: str, companions: Mapping[str, SaveReport]) -> str:
    """A primary's session, JSON text, that names these companions by kind, and no other."""
    named = {
        kind: {"name": report.name, "digest": report.logical_digest}
        for kind, report in companions.items()
    }
    return _with(session, **{_COMPANIONS: named})


def links_of(session: str, path: str) -> tuple[dict[str, str], str | None]:
    """(`named_companions`, `owner_of`) of a session's text; none of text that is no JSON object."""
    try:
        values = parse_section(session, path, "session")
    except CorruptSnapshotError:  # reported to whoever restores it
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
    """The name of the primary that a companion's session names; None for a snapshot of its own."""
    owner = session.get(_OWNER)
    return owner if isinstance(owner, str) else None


def _with(session: str, **links: object) -> str:
    """The same text with these links and no others."""
    links = {name: value for name, value in links.items() if value}
    if not links and not any(f'"{name}"' in session for name in (_COMPANIONS, _OWNER)):
        return session
    values = json.loads(session)
    kept = {name: value for name, value in values.items() if name not in (_COMPANIONS, _OWNER)}
    return json.dumps(kept | links, sort_keys=True, separators=(",", ":"))
