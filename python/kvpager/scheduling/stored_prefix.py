"""The beginning of a prompt, from the snapshots of a store."""

from __future__ import annotations

import logging

import numpy as np

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, PagerError, damaged_chunk
from kvpager.execution.core import EngineCore
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.stores import SnapshotStore
from kvpager.text.damage import DamageHandling
from kvpager.text.transcript import Transcript
from kvpager.tokens import TokenIds

_log = logging.getLogger(__name__)


def adopt_stored_prefix(core: EngineCore, transcript: Transcript, ids: TokenIds) -> None:
    """Makes a session start from the longest prefix of its prompt in its or the engine's store.

    Does so only if that is more than the session holds. A chunk's name covers fingerprint and salt,
    so that only chunks of an equal engine are found. A problem with the store is no error: the
    caller gets a warning, and the tokens are computed. Chunks found damaged when they are read are
    computed again.
    """
    size = core.layout.chunk_tokens
    store = transcript.store or core.store
    if store is None or len(ids) - transcript.committed < size:
        return
    hashes = core.pager.chain_hashes(ids, transcript.sequence.salt)
    while len(hashes) * size > transcript.committed:
        try:
            found = _restore(store, core, transcript, hashes, ids)
        except (PagerError, OSError) as error:  # noqa: PERF203  # a shorter one each time
            chunk = damaged_chunk(error) if isinstance(error, CorruptSnapshotError) else None
            shorter = hashes[:chunk] if chunk is not None and chunk < len(hashes) else []
            _log.warning("no prefix of %d chunks from the store: %s", len(hashes), error)
            hashes = shorter
        else:
            if found is not None:
                sequence, reader = found
                transcript.replace_sequence(sequence, restored_tokens=sequence.length)
                transcript.damage = DamageHandling(
                    store=store, reader=reader, tokens=transcript.damage.tokens
                )
            return


def _longest(
    store: SnapshotStore,
    core: EngineCore,
    transcript: Transcript,
    hashes: list[bytes],
    ids: TokenIds,
) -> _core.SnapshotReader | None:
    """The snapshot with the longest prefix, found by chunk names or an older format's hashes."""
    found = store.find_prefix(hashes)
    if found is not None and found.sealed_chunks == len(hashes):
        return found
    text = ids[: len(hashes) * core.layout.chunk_tokens]
    older = store.find_prefix(core.pager.legacy_chain_hashes(text, transcript.sequence.salt))
    if found is None or (older is not None and older.sealed_chunks > found.sealed_chunks):
        return older
    return found


def _restore(
    store: SnapshotStore,
    core: EngineCore,
    transcript: Transcript,
    hashes: list[bytes],
    ids: TokenIds,
) -> tuple[Sequence, _core.SnapshotReader] | None:
    """The longest prefix in the store, with its snapshot; None if the session holds as much."""
    reader = _longest(store, core, transcript, hashes, ids)
    if reader is None or len(reader.tokens) <= transcript.committed:
        return None
    tokens = reader.tokens
    if not np.array_equal(tokens, ids[: len(tokens)]):  # found by name, verified by token ids
        raise CorruptSnapshotError(f"{reader.path}: its token ids are not those it was found by")
    return core.pager.restore(SnapshotInfo.of(reader), salt=transcript.sequence.salt), reader
