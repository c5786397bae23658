"""Salts as chunk names and snapshots know them.

What a file says of a salt can be used to try guesses at it, elsewhere and on many machines. So an
engine's salt goes through scrypt (Percival 2009, RFC 7914) before anything is made of it, and each
guess costs what that costs: 16 MiB and some 50 ms. A salt that nobody can guess needs none of this;
a weak one is still weak.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import xxhash

_APPLICATION = b"kvpager tenant salt"
_COST, _BLOCK, _MEMORY = 1 << 14, 8, 64 << 20


@lru_cache(maxsize=64)
def stretched(salt: str) -> str:
    """What stands for a salt in chunk names and digests; no salt costs nothing and stays none."""
    if not salt:
        return ""
    return hashlib.scrypt(
        salt.encode(), salt=_APPLICATION, n=_COST, r=_BLOCK, p=1, maxmem=_MEMORY, dklen=32
    ).hex()


def salt_digest(salt: str) -> str:
    """What a snapshot says of the salt its chunks are under, in hex; empty for none."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), digest_size=16, key=_APPLICATION).hexdigest()


def old_salt_digest(salt: str) -> str:
    """What snapshots of 1.0 and 1.1 say of it."""
    return xxhash.xxh3_128_hexdigest(salt.encode())


def is_of(salt: str, digest: object) -> bool:
    """Whether a snapshot of any release that says this of its salt was saved under `salt`."""
    return digest in (salt_digest(salt), old_salt_digest(salt))
