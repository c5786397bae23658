"""Damaged chunks of a snapshot, computed again from their token ids.

Token ids are metadata, which is verified when a snapshot is opened, and K/V are a pure function of
token ids: so a damaged chunk can be computed again, bit for bit. When the chunk's last row is
committed, the pager compares checksums and gives the new bytes to every sequence that uses the
damaged chunk. Then the call that failed is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.chunks import extend_from_states
from kvpager._runtime.text.damage import FAIL, DamageHandling
from kvpager._runtime.text.transcript import MarkComputed
from kvpager._support.tokens import TokenIds
from kvpager.errors import CorruptSnapshotError, PagerError, damaged_chunk, explain_damage
from kvpager.pager import Sequence

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def run(core: EngineCore, batch: Batch) -> torch.Tensor:
    """`Runner.run`, which first computes damaged chunks again if their sessions allow it.

    Raises:
        CorruptSnapshotError: a session has `on_corrupt="fail"`, or the chunk cannot be computed
            again; the message says why. Nothing was committed.
    """
    return recomputing_damage(core, batch.owners, lambda: core.runner.run(batch))


def recomputing_damage(
    core: EngineCore, sequences: Collection[Sequence], work: Callable[[], _Result]
) -> _Result:
    """Calls `work` until no damaged chunk of these sequences stops it; returns its result."""
    repeated: set[int | None] = set()
    while True:
        try:
            return work()
        except CorruptSnapshotError as error:  # noqa: PERF203  # once per damaged chunk
            chunk = damaged_chunk(error)
            damaged = [sequence for sequence in sequences if _is_damaged(sequence, chunk)]
            if damaged:
                _repair(core, damaged, error)
            elif chunk in repeated:
                raise
            else:  # another thread has repaired it in the meantime
                repeated.add(chunk)


def require_repairable(error: CorruptSnapshotError, on_corrupt: str, provenance: str) -> None:
    """Raises the error, with the reason, unless its chunk may and can be computed again."""
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
    core: EngineCore,
    tokens: TokenIds,
    error: CorruptSnapshotError,
    salt: str,
    mark: MarkComputed | None = None,
) -> int:
    """Computes the chunk that an error names, and every damaged chunk before it that it needs.

    Uses no transcript, so that any thread may call it.

    Args:
        core: the model and its pager.
        tokens: ids up to the chunk's end at least.
        error: the error that reported the damage; it names a chunk.
        salt: of the sequence with the damaged chunk.
        mark: called with (position, number) of the tokens computed.

    Returns:
        The number of tokens computed.
    """
    size = core.facts.layout.chunk_tokens
    chunk = damaged_chunk(error)
    if chunk is None:
        raise error
    computed: list[int] = []
    found_below: set[int] = set()
    while True:
        try:
            start = _compute_first_missing(core, tokens[: (chunk + 1) * size], salt)
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
        if mark is not None:
            mark(start, size)
        _log.warning("%s; tokens [%d, %d) were computed again", error, start, start + size)
    return len(computed) * size


def extend(core: EngineCore, sequence: Sequence, tokens: TokenIds) -> None:
    """Computes those of `tokens` that come after the ones the sequence holds."""
    _feed(core, sequence, tokens, lambda batch: run(core, batch))


def _feed(
    core: EngineCore,
    sequence: Sequence,
    tokens: TokenIds,
    forward: Callable[[Batch], torch.Tensor],
) -> None:
    if core.facts.recurrence is not None:
        extend_from_states(core, sequence, tokens, forward)
        return
    rows = core.rows
    sequence.reserve(len(tokens))
    while (start := sequence.length) < len(tokens):
        batch = Batch(rows)
        batch.commit(sequence, start, tokens[start : start + rows])
        forward(batch)


def _compute_first_missing(core: EngineCore, tokens: TokenIds, salt: str) -> int:
    """Computes the first of these full chunks of which the pager has no undamaged copy.

    Returns the chunk's first position, or the number of tokens if none is missing.
    """
    sequence = core.pager.sequence(salt=salt)
    try:
        start = sequence.adopt_prefix(tokens)  # ends before the first chunk known to be damaged
        if start < len(tokens):
            chunk = tokens[: start + core.facts.layout.chunk_tokens]
            _feed(core, sequence, chunk, core.runner.run)
        return start
    finally:
        sequence.close()


def _repair(core: EngineCore, damaged: list[Sequence], error: CorruptSnapshotError) -> None:
    """Repairs the chunk that an error names, damaged in all these sequences, if one allows it."""
    chunk = damaged_chunk(error)
    assert chunk is not None
    repaired = False
    refusal = error
    for sequence in damaged:
        transcript = core.transcripts.of(sequence)
        damage = DamageHandling() if transcript is None else transcript.damage
        damage.report(chunk)
        try:
            require_repairable(error, damage.on_corrupt, sequence.ledger()[chunk].provenance)
        except CorruptSnapshotError as refused:
            refusal = refused  # another of these sequences may allow the repair
            continue
        mark = None if transcript is None else transcript.mark_computed
        tokens = recompute_chunk(core, sequence.tokens, error, sequence.salt, mark)
        if _is_damaged(sequence, chunk):
            raise explain_damage(
                error, "its tokens computed again are not what was saved either"
            ) from error
        damage.count(tokens)
        repaired = True
    if not repaired:
        raise refusal


def _is_damaged(sequence: Sequence, chunk: int | None) -> bool:
    ledger = sequence.ledger()
    return chunk is not None and chunk < len(ledger) and ledger[chunk].damaged
