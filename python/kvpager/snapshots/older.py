"""Translates fingerprints and salts of snapshots that older releases saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import xxhash

from kvpager.errors import FingerprintMismatchError
from kvpager.execution.core import EngineCore
from kvpager.fingerprint_rules import RULES
from kvpager.pager import SALT_FIELD, SnapshotInfo
from kvpager.salts import Tenant, is_of, salt_digest
from kvpager.weights import old_weights_digest


def in_todays_terms(
    core: EngineCore, snapshot: SnapshotInfo, tenant: Tenant | None = None
) -> SnapshotInfo:
    """The snapshot, with its fingerprint translated to this release's fields.

    tenant: whose it should be; None: the engine's own.

    Fingerprints had the salt's digest, which only the session section has today.

    Releases before the field `behaviour` digested weights and salts differently: this computes
    their digests of this engine's model and compares. They did not record adapters' states and
    hooks; this assumes there were none, and takes the snapshot for this model's only if that has
    none either and equal weights (which include those of all loaded adapters).
    """
    found = snapshot.fingerprint
    if "salt" not in found:
        return snapshot
    tenant = core.tenant if tenant is None else tenant
    found = {**found, "salt": _salt_today(found["salt"], tenant)}
    snapshot = replace(snapshot, fingerprint=found)
    here = core.fingerprint
    if "behaviour" in found or "weights" not in found:
        return snapshot
    theirs = {**found, "additions": ""}
    if here["additions"] == "":
        theirs["behaviour"] = here["behaviour"]
    if found["weights"] == old_weights_digest(core.model):
        theirs["weights"] = here["weights"]
    return replace(snapshot, fingerprint=theirs)


def require_salt(snapshot: SnapshotInfo, tenant: Tenant) -> None:
    """Raises FingerprintMismatchError, field "salt", if it was saved under another salt."""
    said = snapshot.session.get(SALT_FIELD)
    if said is None or is_of(tenant.namespace, said) or is_of(tenant.salt, said):
        return
    own = salt_digest(tenant.namespace)
    raise FingerprintMismatchError(
        f"{snapshot.path} was saved with salt {said!r} (a digest), and this is {own!r}; "
        f"{RULES['salt'].remedy}",
        field="salt",
        expected=own,
        found=said,
    )


def _salt_today(found: object, tenant: Tenant) -> object:
    """Empty for a digest of the tenant's salt in a fingerprint; any other one stays as it is."""
    older = xxhash.xxh3_128_hexdigest(b"kvpager salt\0" + tenant.salt.encode())
    return "" if found in (salt_digest(tenant.namespace), older) else found


def salt_of(snapshot: SnapshotInfo, tenant: Tenant, namespace: Callable[[str], str] = str) -> str:
    """The salt in the chunk names of a tenant's snapshot: stretched, or plain in older releases.

    namespace: makes the namespace of a plain salt.
    """
    plain = namespace(tenant.salt)
    if tenant.salt and is_of(plain, snapshot.session.get(SALT_FIELD)):
        return plain
    return namespace(tenant.namespace)
