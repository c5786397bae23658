"""Damaged chunks of a snapshot, computed again from their token ids.

Token ids are metadata, which is verified when a snapshot is opened, and K/V are a pure function of
token ids: so a chunk whose bytes are not what was saved can be had again, bit for bit. The pager
compares checksums when the chunk's last row is committed, and gives the new bytes to every sequence
that uses the damaged one. What needed it is then repeated.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, PagerError, damaged_chunk, explain_damage
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.runtime.batch import Batch
from kvpager.runtime.chunks import extend_from_states
from kvpager.runtime.older import salt_of
from kvpager.runtime.tokens import TokenIds
from kvpager.stores import SnapshotStore

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session

FAIL = "fail"
RECOMPUTE = "recompute"
ON_CORRUPT = (FAIL, RECOMPUTE)

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass
class Repairs:
    """What a session does about damaged chunks, and how much of it was done. Thread-safe."""

    on_corrupt: str = RECOMPUTE  # a session that restored nothing must not fail for another's file
    store: SnapshotStore | None = None  # it was restored from, and
    reader: _core.SnapshotReader | None = None  # what of it
    first: int = 0  # chunk of the text that is the first there
    tokens: int = 0  # computed again
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def for_fork(self) -> Repairs:
        """Those of a fork, which has done none yet."""
        return Repairs(self.on_corrupt, self.store, self.reader, self.first)

    def count(self, tokens: int) -> None:
        """Adds tokens that were computed again."""
        with self._lock:
            self.tokens += tokens

    def tell_store(self, chunk: int) -> None:
        """A store that shares chunks must not share this one any more, nor take it for saved."""
        report = getattr(self.store, "report_damage", None)
        if report is None:
            return
        try:
            report(self.reader, chunk - self.first)
        except (PagerError, OSError) as error:
            _log.warning("the store cannot be told that chunk %d is damaged: %s", chunk, error)


def run(engine: Engine, batch: Batch) -> torch.Tensor:
    """`Runner.run`; where a damaged chunk is in the way, it is computed again if its owner allows.

    Raises:
        CorruptSnapshotError: of a session that asked for it (`on_corrupt="fail"`), or of a chunk
            that cannot be computed again; says why. Nothing was committed.
    """
    return repairing(engine, batch.owners, lambda: engine.runner.run(batch))


def repairing(
    engine: Engine, sequences: Collection[Sequence], work: Callable[[], _Result]
) -> _Result:
    """What `work` returns, once the damage of these sequences that stops it has been repaired."""
    repeated: set[int | None] = set()
    while True:
        try:
            return work()
        except CorruptSnapshotError as error:  # noqa: PERF203  # once per damaged chunk
            chunk = damaged_chunk(error)
            damaged = [sequence for sequence in sequences if _is_damaged(sequence, chunk)]
            if damaged:
                _repair(engine, damaged, error)
            elif chunk in repeated:
                raise
            else:  # another thread has repaired it meanwhile
                repeated.add(chunk)


def require_repairable(error: CorruptSnapshotError, on_corrupt: str, provenance: str) -> None:
    """Raises the error, and why it stands, unless its chunk may and can be computed again."""
    if on_corrupt == FAIL:
        raise explain_damage(
            error, 'restore it with on_corrupt="recompute" to have its tokens computed again'
        ) from error
    if provenance != "exact":
        raise explain_damage(
            error,
            f'on_corrupt="recompute" cannot help: the chunk is "{provenance}", and computing its '
            "tokens again would not give the bits that were saved",
        ) from error


def recompute_chunk(
    engine: Engine, tokens: TokenIds, error: CorruptSnapshotError, salt: str
) -> int:
    """Computes the chunk that an error names, and every damaged one that this needs.

    Needs nothing of a session, so that any thread may do it.

    Args:
        engine: whose model and pager.
        tokens: ids up to the chunk's end at least.
        error: what found the damage; it names a chunk.
        salt: of the sequence it was found in.

    Returns:
        The number of tokens computed.
    """
    size = engine.layout.chunk_tokens
    chunk = damaged_chunk(error)
    if chunk is None:
        raise error
    computed: list[int] = []
    found_below: set[int] = set()
    while True:
        try:
            start = _compute_first_missing(engine, tokens[: (chunk + 1) * size], salt)
        except CorruptSnapshotError as another:  # noqa: PERF203  # once per damaged chunk
            below = damaged_chunk(another)
            if below is None or below >= chunk or below in found_below:
                raise
            found_below.add(below)
        except PagerError as refusal:
            raise explain_damage(error, f"computing it again failed: {refusal}") from refusal
        else:
            if start == (chunk + 1) * size:
                break
            if start in computed:
                raise explain_damage(
                    error,
                    f"tokens [{start}, {start + size}) computed again are not what was saved "
                    "either, or the pager has no room to keep them",
                ) from error
            computed.append(start)
    for start in sorted(computed):
        _log.warning("%s; tokens [%d, %d) were computed again", error, start, start + size)
    return len(computed) * size


def restore_without_tail(
    engine: Engine, snapshot: SnapshotInfo, error: CorruptSnapshotError, provenance: str
) -> Sequence:
    """The sealed chunks of a snapshot whose tail is damaged; `recompute_tail` adds the rest.

    provenance: what the snapshot is worth to this engine.
    """
    worth = snapshot.reader.provenance[-1] if provenance == "exact" else provenance
    if engine.recurrence is None:  # which uses no saved tail, whatever it is worth
        require_repairable(error, RECOMPUTE, worth)
    whole = snapshot.reader.sealed_chunks * engine.layout.chunk_tokens
    return engine.pager.restore(snapshot, salt=salt_of(engine, snapshot), upto=whole)


def recompute_tail(
    engine: Engine, session: Session, snapshot: SnapshotInfo, error: CorruptSnapshotError
) -> None:
    """Computes the tokens after those the session holds, and compares them with what was saved."""
    tokens, start = snapshot.tokens, session.committed
    if engine.recurrence is not None:
        session.cursor.owe(tokens)
        session.repairs.count(len(tokens) - start)
        _log.warning("%s; tokens [%d, %d) will be computed again", error, start, len(tokens))
        return
    extend(engine, session.sequence, tokens)
    saved = snapshot.reader.slice_checksums[-1]
    frozen = repairing(engine, [session.sequence], session.sequence.freeze)
    if (frozen.slice_checksums[-1] != saved).any():
        raise explain_damage(
            error,
            f"tokens [{start}, {len(tokens)}) computed again are not what was saved either",
        ) from error
    session.repairs.count(len(tokens) - start)
    _log.warning("%s; tokens [%d, %d) were computed again", error, start, len(tokens))


def extend(engine: Engine, sequence: Sequence, tokens: TokenIds) -> None:
    """Makes a sequence hold all of `tokens`, of which it holds the first ones."""
    _feed(engine, sequence, tokens, lambda batch: run(engine, batch))


def _feed(
    engine: Engine,
    sequence: Sequence,
    tokens: TokenIds,
    forward: Callable[[Batch], torch.Tensor],
) -> None:
    if engine.recurrence is not None:
        extend_from_states(engine, sequence, tokens, forward)
        return
    rows = engine.rows
    sequence.reserve(len(tokens))
    while (start := sequence.length) < len(tokens):
        batch = Batch(rows)
        batch.commit(sequence, start, tokens[start : start + rows])
        forward(batch)


def _compute_first_missing(engine: Engine, tokens: TokenIds, salt: str) -> int:
    """Computes the first of these full chunks that the pager has no sound copy of.

    Returns where it starts, or the number of tokens if none is missing.
    """
    sequence = engine.pager.sequence(salt=salt)
    try:
        start = sequence.adopt_prefix(tokens)  # ends before the first chunk known to be damaged
        if start < len(tokens):
            chunk = tokens[: start + engine.layout.chunk_tokens]
            _feed(engine, sequence, chunk, engine.runner.run)
        return start
    finally:
        sequence.close()


def _repair(engine: Engine, damaged: list[Sequence], error: CorruptSnapshotError) -> None:
    """Repairs the chunk an error names in those sequences, all damaged there, where it may be."""
    chunk = damaged_chunk(error)
    assert chunk is not None
    repaired = False
    refusal = error
    for sequence in damaged:
        session = engine.session_of(sequence)
        repairs = Repairs() if session is None else session.repairs
        repairs.tell_store(chunk)
        try:
            require_repairable(error, repairs.on_corrupt, sequence.ledger()[chunk].provenance)
        except CorruptSnapshotError as refused:
            refusal = refused  # another one of these may be what was in the way
            continue
        tokens = recompute_chunk(engine, sequence.tokens, error, sequence.salt)
        if _is_damaged(sequence, chunk):
            raise explain_damage(
                error, "its tokens computed again are not what was saved either"
            ) from error
        repairs.count(tokens)
        repaired = True
    if not repaired:
        raise refusal


def _is_damaged(sequence: Sequence, chunk: int | None) -> bool:
    ledger = sequence.ledger()
    return chunk is not None and chunk < len(ledger) and ledger[chunk].damaged
