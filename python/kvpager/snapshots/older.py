"""Translates fingerprints and salts of snapshots that older releases saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import xxhash

from kvpager.execution.core import EngineCore
from kvpager.pager import SALT_FIELD, SnapshotInfo
from kvpager.salts import is_of
from kvpager.weights import old_weights_digest


def in_todays_terms(core: EngineCore, snapshot: SnapshotInfo) -> SnapshotInfo:
    """The snapshot, with its fingerprint translated to this release's fields.

    Releases before the field `behaviour` digested weights and salts differently: this computes
    their digests of this engine's model and compares. They did not record adapters' states and
    hooks; this assumes there were none, and takes the snapshot for this model's only if that has
    none either and equal weights (which include those of all loaded adapters).
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
    """The salt in the chunk names of an engine's snapshot: stretched, or plain in older releases.

    namespace: makes the namespace of a plain salt.
    """
    plain = namespace(core.salt)
    if core.salt and is_of(plain, snapshot.session.get(SALT_FIELD)):
        return plain
    return namespace(core.namespace)
