"""The beginning of a prompt, from whatever snapshots a store holds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, PagerError, damaged_chunk
from kvpager.pager import SnapshotInfo
from kvpager.runtime.repair import Repairs
from kvpager.runtime.tokens import TokenIds

if TYPE_CHECKING:
    from kvpager.pager import Sequence
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session
    from kvpager.stores import SnapshotStore

_log = logging.getLogger(__name__)


def adopt_stored_prefix(engine: Engine, session: Session, ids: TokenIds) -> None:
    """Makes a session start from what the engine's store has of its prompt, if it has more.

    A chunk's name covers fingerprint and salt, so that what is found is this engine's own. Nothing
    that is wrong with the store is an error: it costs a warning and some tokens to compute. Chunks
    that turn out to be damaged when they are read are computed again.
    """
    size = engine.layout.chunk_tokens
    if engine.store is None or len(ids) - session.committed < size:
        return
    hashes = engine.pager.chain_hashes(ids, session.sequence.salt)
    while len(hashes) * size > session.committed:
        try:
            found = _restore(engine, session, hashes, ids)
        except (PagerError, OSError) as error:  # noqa: PERF203  # a shorter one each time
            chunk = damaged_chunk(error) if isinstance(error, CorruptSnapshotError) else None
            shorter = hashes[:chunk] if chunk is not None and chunk < len(hashes) else []
            _log.warning("no prefix of %d chunks from the store: %s", len(hashes), error)
            hashes = shorter
        else:
            if found is not None:
                sequence, reader = found
                session.hold(sequence, restored_tokens=sequence.length)
                session.repairs = Repairs(
                    store=engine.store, reader=reader, tokens=session.recomputed_tokens
                )
            return


def _longest(
    store: SnapshotStore, engine: Engine, session: Session, hashes: list[bytes], ids: TokenIds
) -> _core.SnapshotReader | None:
    """The longest prefix of so many chunks, by their names, or by those of earlier formats."""
    found = store.find_prefix(hashes)
    if found is not None and found.sealed_chunks == len(hashes):
        return found
    text = ids[: len(hashes) * engine.layout.chunk_tokens]
    older = store.find_prefix(engine.pager.legacy_chain_hashes(text, session.sequence.salt))
    if found is None or (older is not None and older.sealed_chunks > found.sealed_chunks):
        return older
    return found


def _restore(
    engine: Engine, session: Session, hashes: list[bytes], ids: TokenIds
) -> tuple[Sequence, _core.SnapshotReader] | None:
    """The longest prefix the store has, and where from; None if that is no more than is held."""
    assert engine.store is not None
    reader = _longest(engine.store, engine, session, hashes, ids)
    if reader is None or len(reader.tokens) <= session.committed:
        return None
    tokens = reader.tokens
    if not np.array_equal(tokens, ids[: len(tokens)]):  # a name finds, token ids decide
        raise CorruptSnapshotError(f"{reader.path}: its token ids are not those it was found by")
    return engine.pager.restore(SnapshotInfo.of(reader), salt=session.sequence.salt), reader
