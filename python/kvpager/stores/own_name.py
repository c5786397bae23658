"""The name that a snapshot of a directory store was saved under, as its file records it.

It detects files that were exchanged by hand. Single files may be renamed, and snapshots of older
releases do not record their names.
"""

from __future__ import annotations

import json

from kvpager.errors import CorruptSnapshotError
from kvpager.section_json import parse_section

_NAME = "stored_as"  # in the session section


def with_name(session: str, name: str) -> str:
    """Adds the name to a session's JSON text; text that is no JSON object stays unchanged."""
    try:
        values = parse_section(session, name, "session")
    except CorruptSnapshotError:  # `restore` reports it
        return session
    return json.dumps(values | {_NAME: name}, separators=(",", ":"))


def name_in(session: str, path: str) -> str | None:
    """The name in a session's JSON text; None if there is none or it cannot be read."""
    if f'"{_NAME}"' not in session:
        return None
    try:
        name = parse_section(session, path, "session").get(_NAME)
    except CorruptSnapshotError:  # `restore` reports it
        return None
    return name if isinstance(name, str) else None


def misnamed(path: str, saved: str | None, name: str) -> str | None:
    """What is wrong if a snapshot `saved` under one name is found as `name`; None: nothing."""
    if saved is None or saved == name:
        return None
    return (
        f"{path}: it was saved as {saved!r} and lies under the name {name!r}: its file was renamed "
        "or put in another's place; give it its own name back, or delete it"
    )
