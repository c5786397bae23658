"""What a snapshot was saved under, in today's terms: those of older releases say it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from kvpager.pager import SALT_FIELD, SnapshotInfo
from kvpager.salts import is_of
from kvpager.weights import old_weights_digest

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine


def in_todays_terms(engine: Engine, snapshot: SnapshotInfo) -> SnapshotInfo:
    """The snapshot, with the fingerprint that its own means here.

    Releases before `behaviour` was part of it digested weights and salts otherwise: theirs are made
    of this engine's and compared. What they did not tell (adapters' states, hooks) is taken for
    none, and is this model's where that has none either: with equal weights, which include those of
    all adapters that are loaded.
    """
    found = snapshot.fingerprint
    here = engine.fingerprint
    if "behaviour" in found or "weights" not in found or "salt" not in found:
        return snapshot
    told = {**found, "additions": ""}
    if here["additions"] == "":
        told["behaviour"] = here["behaviour"]
    if found["weights"] == old_weights_digest(engine.model):
        told["weights"] = here["weights"]
    if found["salt"] == xxhash.xxh3_128_hexdigest(b"kvpager salt\0" + engine.salt.encode()):
        told["salt"] = here["salt"]
    return replace(snapshot, fingerprint=told)


def salt_of(engine: Engine, snapshot: SnapshotInfo, namespace: Callable[[str], str] = str) -> str:
    """What the chunks of an engine's snapshot are under: its salt stretched, or as it is.

    The latter before salts were stretched. namespace: what is made of a salt for such chunks.
    """
    plain = namespace(engine.salt)
    if engine.salt and is_of(plain, snapshot.session.get(SALT_FIELD)):
        return plain
    return namespace(engine.namespace)
