"""What a snapshot was saved under, in today's terms: those of older releases say it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import xxhash

from kvpager.execution.core import EngineCore
from kvpager.pager import SALT_FIELD, SnapshotInfo
from kvpager.salts import is_of
from kvpager.weights import old_weights_digest


def in_todays_terms(core: EngineCore, snapshot: SnapshotInfo) -> SnapshotInfo:
    """The snapshot, with the fingerprint that its own means here.

    Releases before `behaviour` was part of it digested weights and salts otherwise: theirs are made
    of this engine's and compared. What they did not tell (adapters' states, hooks) is taken for
    none, and is this model's where that has none either: with equal weights, which include those of
    all adapters that are loaded.
    """
    found = snapshot.fingerprint
    here = core.fingerprint
    if "behaviour" in found or "weights" not in found or "salt" not in found:
        return snapshot
    theirs = {**found, "additions": ""}
    if here["additions"] == "":
        theirs["behaviour"] = here["behaviour"]
    if found["weights"] == old_weights_digest(core.model):
        theirs["weights"] = here["weights"]
    if found["salt"] == xxhash.xxh3_128_hexdigest(b"kvpager salt\0" + core.salt.encode()):
        theirs["salt"] = here["salt"]
    return replace(snapshot, fingerprint=theirs)


def salt_of(core: EngineCore, snapshot: SnapshotInfo, namespace: Callable[[str], str] = str) -> str:
    """What the chunks of an engine's snapshot are under: its salt stretched, or as it is.

    The latter before salts were stretched. namespace: what is made of a salt for such chunks.
    """
    plain = namespace(core.salt)
    if core.salt and is_of(plain, snapshot.session.get(SALT_FIELD)):
        return plain
    return namespace(core.namespace)
