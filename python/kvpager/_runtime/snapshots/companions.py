"""Saves and restores companions with their text."""

from __future__ import annotations

import logging

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.recurrent.cursor import StateCursor
from kvpager._runtime.text.transcript import Companion, Transcript
from kvpager._support.salts import StretchedSalt
from kvpager.errors import CorruptSnapshotError, PagerError
from kvpager.pager import SnapshotInfo
from kvpager.stores import SnapshotStore
from kvpager.stores.companions import (
    DRAFT,
    STATES,
    CompanionSnapshot,
    companion_name,
    named_companions,
)

_log = logging.getLogger(__name__)


def freeze_companions(transcript: Transcript, upto: int) -> tuple[CompanionSnapshot, ...]:
    """Companions for a save of the first `upto` tokens, without those that cannot be saved."""
    keepers: list[Companion | StateCursor] = list(transcript.companions)
    if transcript.states is not None:
        keepers.append(transcript.states)
    frozen = []
    for keeper in keepers:
        try:
            frozen.append(keeper.freeze(upto))
        except PagerError as error:  # noqa: PERF203  # each is left out by itself
            _log.warning("the session is saved without its %s: %s", keeper.kind, error)
    return tuple(part for part in frozen if part is not None)


def restore_companions(
    core: EngineCore,
    transcript: Transcript,
    snapshot: SnapshotInfo,
    name: str,
    source: SnapshotStore,
    tenant: StretchedSalt,
) -> None:
    """Restores the companions that were saved with a snapshot and that this engine uses.

    Skips one that is missing, damaged or of another save, with a warning; its cache is computed
    again when it is needed. No bits depend on companions.

    Args:
        core: whose transcript it is.
        transcript: restored from `snapshot`.
        snapshot: the primary's.
        name: of the snapshot in `source`.
        source: the store with the snapshot.
        tenant: whose it is.
    """
    for kind, digest in named_companions(snapshot.session).items():
        drafter = core.drafter if kind == DRAFT else None
        states = transcript.states if kind == STATES else None
        if drafter is None and states is None:
            continue
        try:
            found = _open(source, companion_name(name, kind), digest)
            if drafter is not None:
                drafter.restore(transcript, found, source, tenant)
            if states is not None:
                states.attach(found, snapshot.reader.chain_hashes)
        except (PagerError, OSError) as error:
            _log.warning("the %s saved with %s is left out: %s", kind, snapshot.path, error)


def _open(source: SnapshotStore, name: str, digest: str) -> SnapshotInfo:
    """Opens a companion; raises if it was not saved together with its primary."""
    found = SnapshotInfo.of(source.open(name))
    if found.logical_digest != digest:
        raise CorruptSnapshotError(
            f"{found.path}: its logical digest is {found.logical_digest}, expected {digest}: it "
            "belongs to another save"
        )
    return found
