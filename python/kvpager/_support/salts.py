"""Salts as they enter chunk names and snapshots.

An attacker can test guesses of a salt against digests in a file, on many machines. So an engine's
salt goes through scrypt (Percival 2009, RFC 7914) before it is used; each guess costs 16 MiB and
some 50 ms. A random salt would not need this; a weak one stays weak.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

from kvpager._support.arguments import require_unicode
from kvpager.errors import InvalidArgumentError

_APPLICATION = b"kvpager tenant salt"
_COST, _BLOCK, _MEMORY = 1 << 14, 8, 64 << 20
_KEPT = 4096  # salts of which the result is kept, some 300 bytes each: a server's tenants


@lru_cache(maxsize=_KEPT)
def stretched(salt: str) -> str:
    """The stretched salt for chunk names and digests; an empty salt stays empty."""
    if not salt:
        return ""
    return hashlib.scrypt(
        salt.encode(), salt=_APPLICATION, n=_COST, r=_BLOCK, p=1, maxmem=_MEMORY, dklen=32
    ).hex()


class StretchedSalt(NamedTuple):
    """A tenant's salt.

    Attributes:
        salt: as it was given.
        namespace: as it enters chunk names: stretched.
    """

    salt: str
    namespace: str

    @classmethod
    def of(cls, salt: object) -> StretchedSalt:
        """Raises InvalidArgumentError unless `salt` is a string."""
        given = checked_salt(salt)
        return cls(given, stretched(given))


def checked_salt(salt: object) -> str:
    """The salt. Raises InvalidArgumentError unless it is a string."""
    if not isinstance(salt, str):
        raise InvalidArgumentError(f"salt is {salt!r}; expected a string")
    return require_unicode(salt, "salt")


def salt_digest(salt: str) -> str:
    """The digest, in hex, that a snapshot records of its chunks' salt; empty for no salt."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), digest_size=16, key=_APPLICATION).hexdigest()
