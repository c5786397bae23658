"""The name that a snapshot of a directory store says it was saved under.

Files that are put in one another's place are told apart by it. Single files may be renamed, and
snapshots of older releases do not know their names.
"""

from __future__ import annotations

import json

from kvpager.errors import CorruptSnapshotError
from kvpager.section_json import parse_section

_NAME = "stored_as"  # in the session section


def with_name(session: str, name: str) -> str:
    """A session's JSON text that says its name; text that is no JSON object stays as it is."""
    try:
        values = parse_section(session, name, "session")
    except CorruptSnapshotError:  # reported to whoever restores it
        return session
    return json.dumps(values | {_NAME: name}, sort_keys=True, separators=(",", ":"))


def name_in(session: str, path: str) -> str | None:
    """What a session's JSON text says; None where it says nothing that can be read."""
    if f'"{_NAME}"' not in session:
        return None
    try:
        name = parse_section(session, path, "session").get(_NAME)
    except CorruptSnapshotError:  # likewise
        return None
    return name if isinstance(name, str) else None


def misnamed(path: str, saved: str | None, name: str) -> str | None:
    """What is wrong with a snapshot `saved` under one name and found under another, if it is."""
    if saved is None or saved == name:
        return None
    return (
        f"{path}: it was saved as {saved!r} and lies under the name {name!r}: its file was renamed "
        "or put in another's place; give it its own name back, or delete it"
    )
