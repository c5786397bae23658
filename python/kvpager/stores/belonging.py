"""The salt and the model that a snapshot was saved under, as its file records them.

This is no access control: anyone who may write to a folder may replace every file in it. It keeps
users who share a folder from replacing each other's snapshots by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpager.errors import CorruptSnapshotError
from kvpager.fingerprint_rules import RULES
from kvpager.salts import is_of, old_salt_digest, stretched
from kvpager.section_json import parse_section

_SALT = "salt_digest"  # in the session section
_SALT_FIELD = "salt"  # in fingerprints
_NEWER = "behaviour"  # in fingerprints of releases that digest weights and salts as this one does
_DIGESTED = ("weights", "salt")


@dataclass(frozen=True)
class Belonging:
    """The salt and the model that a snapshot was saved under.

    Attributes:
        salt: digest of its salt, empty for no salt; None if it was not recorded.
        model: its fingerprint.
    """

    salt: str | None
    model: dict[str, Any]

    @classmethod
    def of(cls, fingerprint: str, session: str, path: str) -> Belonging:
        """Reads the JSON texts of both sections; takes unreadable ones for not recorded."""
        salt = _section(session, path, "session").get(_SALT)
        if salt == old_salt_digest(""):
            salt = ""
        model = _section(fingerprint, path, "fingerprint")
        return cls(salt if isinstance(salt, str) else None, model)

    def differs_from(self, other: Belonging) -> str | None:
        """The difference, in words, that forbids `other` to replace this; None: it may.

        Does not compare digests that the two releases make in different ways.
        """
        one_release = (_NEWER in self.model) == (_NEWER in other.model)
        told = None not in (self.salt, other.salt)
        if told and self.salt != other.salt and (one_release or "" in (self.salt, other.salt)):
            return "another salt"
        for field in sorted(self.model.keys() & other.model.keys()):
            rule = RULES.get(field)
            if rule is not None and (rule.waivable or rule.follows):
                continue
            if field == _SALT_FIELD and told:  # releases differ in whether it is in the fingerprint
                continue
            if not one_release and field in _DIGESTED:
                continue
            if self.model[field] != other.model[field]:
                return f"another model ({field} differs)"
        return None


def is_under(salt: str, digest: str | None) -> bool:
    """Whether a snapshot with this salt digest may come from an engine with `salt`.

    For sessions and segments of any release; True if no digest was recorded.
    """
    plain = (stretched(salt), salt)
    under = (*plain, *(f"{one}\0segment" for one in plain))
    return digest is None or any(is_of(one, digest) for one in under)


def _section(text: str, path: str, name: str) -> dict[str, Any]:
    try:
        return parse_section(text, path, name)
    except CorruptSnapshotError:  # `restore` reports it
        return {}
