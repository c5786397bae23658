"""What other models hold of a text: saved with it, and brought back with it."""

from __future__ import annotations

import logging

from kvpager.errors import CorruptSnapshotError, PagerError
from kvpager.execution.core import EngineCore
from kvpager.pager import SnapshotInfo
from kvpager.recurrent.cursor import StateCursor
from kvpager.snapshots.older import in_todays_terms
from kvpager.stores import SnapshotStore
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.companions import DRAFT, STATES, companion_name, named_companions
from kvpager.text.companion import Companion
from kvpager.text.transcript import Transcript

_log = logging.getLogger(__name__)


def freeze_companions(transcript: Transcript, upto: int) -> tuple[CompanionSnapshot, ...]:
    """What a save of the first `upto` tokens keeps beside the K/V; what cannot be is left out."""
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
) -> None:
    """Brings back what was saved beside a snapshot, as far as this engine has a use for it.

    One that is missing, damaged, or of another save is left out with a warning: what it held is
    computed again when it is needed. Bits depend on none of it.

    Args:
        core: whose transcript it is.
        transcript: restored from `snapshot`.
        snapshot: of the primary.
        name: by which `source` knows it.
        source: the store it is in.
    """
    for kind, digest in named_companions(snapshot.session).items():
        drafter = core.drafter if kind == DRAFT else None
        states = transcript.states if kind == STATES else None
        if drafter is None and states is None:
            continue
        try:
            found = _open(source, companion_name(name, kind), digest)
            if drafter is not None:
                drafter.restore(transcript, found, source)
            if states is not None:
                states.attach(in_todays_terms(core, found), snapshot.reader.chain_hashes)
        except (PagerError, OSError) as error:
            _log.warning("the %s saved with %s is left out: %s", kind, snapshot.path, error)


def _open(source: SnapshotStore, name: str, digest: str) -> SnapshotInfo:
    """A companion, if it is the one that was saved together with its primary."""
    found = SnapshotInfo.of(source.open(name))
    if found.logical_digest != digest:
        raise CorruptSnapshotError(
            f"{found.path}: its logical digest is {found.logical_digest}, expected {digest}: it "
            "belongs to another save"
        )
    return found
