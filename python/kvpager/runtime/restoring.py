"""Sessions from snapshots: what was saved is checked, and made a session of again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from kvpager import fingerprint as fingerprints
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, UnsupportedVersionError
from kvpager.pager import SnapshotInfo
from kvpager.runtime.companions import restore_companions
from kvpager.runtime.older import in_todays_terms, salt_of
from kvpager.runtime.repair import (
    ON_CORRUPT,
    RECOMPUTE,
    Repairs,
    recompute_tail,
    restore_without_tail,
)
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.saving import destination
from kvpager.runtime.session import RELEASED_VERSION, SESSION_VERSION, Session
from kvpager.stores import SnapshotStore

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine


def restore_session(
    engine: Engine,
    name_or_path: str | os.PathLike[str],
    store: SnapshotStore | None,
    on_mismatch: str,
    on_corrupt: str,
) -> Session:
    """See `Engine.restore`."""
    if on_corrupt not in ON_CORRUPT:
        raise InvalidArgumentError(f'on_corrupt is {on_corrupt!r}; expected "fail" or "recompute"')
    engine.runner.unchanged.check_model(thorough=True)
    name, source = destination(name_or_path, store)
    snapshot = in_todays_terms(engine, SnapshotInfo.of(source.open(name)))
    snapshot.require_restorable()
    provenance = fingerprints.compare(
        engine.fingerprint, snapshot.fingerprint, on_mismatch=on_mismatch, source=snapshot.path
    )
    state = SavedSession.of(snapshot, engine.vocab_size)
    damage: CorruptSnapshotError | None = None
    try:
        salt = salt_of(engine, snapshot)
        sequence = engine.pager.restore(snapshot, salt=salt, provenance=provenance)
    except CorruptSnapshotError as error:  # of the tail, which alone is read now
        if on_corrupt != RECOMPUTE:
            raise
        damage = error
        sequence = restore_without_tail(engine, snapshot, error, provenance)
    session = engine.adopt(
        sequence,
        sampling=state.sampling,
        restored_tokens=len(snapshot.tokens),
        repairs=Repairs(
            on_corrupt,
            source,
            snapshot.reader,
            first=len(snapshot.released_tokens) // engine.layout.chunk_tokens,
        ),
    )
    try:
        if damage is not None:
            recompute_tail(engine, session, snapshot, damage)
        session.keep_pending(state.pending)
        session.generation_start = state.generation_start
        restore_companions(session, snapshot, name, source)
    except BaseException:
        session.close()
        raise
    return session


class SavedSession(NamedTuple):
    """What a snapshot keeps beside the K/V; a pager alone writes one without.

    Attributes:
        pending: the sampled token that no forward has taken yet.
        sampling: of the last generation.
        generation_start: where that began; None where it was cut or there was none.
    """

    pending: int | None
    sampling: Sampling
    generation_start: int | None

    @classmethod
    def of(cls, snapshot: SnapshotInfo, vocab_size: int) -> SavedSession:
        """Raises CorruptSnapshotError, UnsupportedVersionError."""
        state, path = snapshot.session, snapshot.path
        version = state.get("version", SESSION_VERSION)
        if version not in (SESSION_VERSION, RELEASED_VERSION):
            raise UnsupportedVersionError(
                f"{path}: session.version is {version!r}; this release reads {SESSION_VERSION} "
                f"and {RELEASED_VERSION}"
            )
        pending = state.get("pending")
        if pending is not None and (type(pending) is not int or not 0 <= pending < vocab_size):
            raise CorruptSnapshotError(
                f"{path}: session.pending is {pending!r}; expected a token id below {vocab_size}"
            )
        start, length = state.get("generation_start"), len(snapshot.tokens) + (pending is not None)
        if start is not None and (type(start) is not int or not 0 <= start <= length):
            raise CorruptSnapshotError(
                f"{path}: session.generation_start is {start!r}; expected 0 to {length}"
            )
        sampling = state.get("sampling", {})
        if not isinstance(sampling, dict):
            raise CorruptSnapshotError(
                f"{path}: session.sampling is {sampling!r}; expected an object"
            )
        try:
            return cls(pending, Sampling.from_json(sampling), start)
        except InvalidArgumentError as error:
            raise CorruptSnapshotError(f"{path}: session.sampling: {error}") from error
