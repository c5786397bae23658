"""The name, salt and model that a snapshot was saved under, as its file records them.

The name detects files of a directory store that were swapped by hand; single files may be renamed,
and do not record theirs. Salt and model keep users who share a folder from replacing each other's
snapshots by mistake. This is no access control: anyone who may write to a folder may replace every
file in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpager._model.fingerprint_rules import RULES
from kvpager._support.salts import salt_digest, stretched
from kvpager._support.section_json import parse_section, section_or_empty
from kvpager.errors import CorruptSnapshotError

_NAME = "stored_as"  # in the session section


def with_name(session: str, name: str) -> str:
    """Adds the name to a session's JSON text; text that is no JSON object stays unchanged."""
    try:
        values = parse_section(session, name, "session")
    except CorruptSnapshotError:  # `restore` reports it
        return session
    return json.dumps(values | {_NAME: name}, separators=(",", ":"))


def name_in(session: Mapping[str, Any]) -> str | None:
    """The name in a parsed session section; None if there is none."""
    name = session.get(_NAME)
    return name if isinstance(name, str) else None


def misnamed(path: str, saved: str | None, name: str) -> str | None:
    """The error if a snapshot `saved` under one name is found as `name`; None: no error."""
    if saved is None or saved == name:
        return None
    return (
        f"{path}: it was saved as {saved!r} and lies under the name {name!r}: its file was renamed "
        "or put in another's place; give it its own name back, or delete it"
    )


_SALT = "salt_digest"  # in the session section


@dataclass(frozen=True)
class Origin:
    """The salt and the model that a snapshot was saved under.

    Attributes:
        salt: digest of its salt, empty for no salt; None if it was not recorded.
        model: its fingerprint.
    """

    salt: str | None
    model: dict[str, Any]

    @classmethod
    def of(cls, fingerprint: str, session: Mapping[str, Any], path: str) -> Origin:
        """Reads a fingerprint's JSON text, taken for empty if it is none, and a parsed session."""
        salt = session.get(_SALT)
        model = section_or_empty(fingerprint, path, "fingerprint")
        return cls(salt if isinstance(salt, str) else None, model)

    def differs_from(self, other: Origin) -> str | None:
        """The difference, in words, that forbids `other` to replace this; None: it may."""
        if None not in (self.salt, other.salt) and self.salt != other.salt:
            return "another salt"
        for field in sorted(self.model.keys() & other.model.keys()):
            rule = RULES.get(field)
            if rule is not None and (rule.waivable or rule.follows):
                continue
            if self.model[field] != other.model[field]:
                return f"another model ({field} differs)"
        return None


def is_under(salt: str, digest: str | None) -> bool:
    """Whether a snapshot with this salt digest may come from an engine with `salt`.

    True if no digest was recorded. An engine's sessions and segments have a stretched salt, a plain
    pager's sequences the salt itself.
    """
    namespace = stretched(salt)
    under = (namespace, f"{namespace}\0segment", salt)
    return digest is None or digest in map(salt_digest, under)
