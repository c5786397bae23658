"""Whose a snapshot is, as far as files tell: the salt and the model it was saved under.

Nothing here keeps anybody from anything: whoever may write to a folder may write whatever there is
in it. It keeps those who share a folder in good faith from one another's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpager.errors import CorruptSnapshotError
from kvpager.fingerprint_rules import RULES
from kvpager.salts import is_of, old_salt_digest, stretched
from kvpager.section_json import parse_section

_SALT = "salt_digest"  # in the session section
_NEWER = "behaviour"  # in fingerprints of releases that digest weights and salts as this one does
_DIGESTED = ("weights", "salt")


@dataclass(frozen=True)
class Belonging:
    """What a snapshot was saved under.

    Attributes:
        salt: digest of its salt, empty for none; None where that is not told.
        model: its fingerprint.
    """

    salt: str | None
    model: dict[str, Any]

    @classmethod
    def of(cls, fingerprint: str, session: str, path: str) -> Belonging:
        """From the JSON texts of both sections; what cannot be read is not told."""
        salt = _section(session, path, "session").get(_SALT)
        if salt == old_salt_digest(""):
            salt = ""
        model = _section(fingerprint, path, "fingerprint")
        return cls(salt if isinstance(salt, str) else None, model)

    def differs_from(self, other: Belonging) -> str | None:
        """In words, what a snapshot in this one's place must not differ in; None: nothing.

        What releases digest in different ways is not compared between them.
        """
        one_release = (_NEWER in self.model) == (_NEWER in other.model)
        told = None not in (self.salt, other.salt)
        if told and self.salt != other.salt and (one_release or "" in (self.salt, other.salt)):
            return "another salt"
        for field in sorted(self.model.keys() & other.model.keys()):
            rule = RULES.get(field)
            if rule is not None and (rule.waivable or rule.follows):
                continue
            if not one_release and field in _DIGESTED:
                continue
            if self.model[field] != other.model[field]:
                return f"another model ({field} differs)"
        return None


def is_under(salt: str, digest: str | None) -> bool:
    """Whether a snapshot that says this of its salt is one of an engine with `salt`.

    Sessions and segments, of any release; and one that says nothing.
    """
    plain = (stretched(salt), salt)
    under = (*plain, *(f"{one}\0segment" for one in plain))
    return digest is None or any(is_of(one, digest) for one in under)


def _section(text: str, path: str, name: str) -> dict[str, Any]:
    try:
        return parse_section(text, path, name)
    except CorruptSnapshotError:  # reported to whoever restores it
        return {}
