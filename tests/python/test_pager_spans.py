"""Rows named in spans: what `Pager.begin` and `Pager.begin_spans` have to agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpager import InvalidArgumentError, Layout, Pager, PagerConfig
from kvpager._runtime.execution.batch import Batch
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Forward, Sequence

C, M = 16, 64
LAYOUT = Layout(1, 1, 16, 16, chunk_tokens=C)
# Ends before, at and behind the end of a chunk, and of several.
LENGTHS = (1, C - 1, C, C + 1, 2 * C - 1, 2 * C, 3 * C + 5, M)


@pytest.fixture
def pager() -> Pager:
    config = PagerConfig(64 * C, chunk_tokens=C, host_bytes=0)
    return Pager(LAYOUT, config, rows=M, smaller_rows=range(1, M), device="meta", threads=1)


def ids(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def run(forward: Forward, accepted: dict[Sequence, int] | None = None) -> None:
    with forward:
        forward.replayed(0)
        forward.commit(accepted)


def append(pager: Pager, sequence: Sequence, tokens: np.ndarray[Any, Any]) -> None:
    run(pager.begin_spans([(sequence, sequence.length, len(tokens), ROW_COMMIT)], tokens))


@pytest.mark.parametrize("before", [0, 1, C - 1, C, C + 1])
@pytest.mark.parametrize("count", LENGTHS)
def test_a_span_seals_the_chunks_it_fills_whole_and_under_their_own_names(
    pager: Pager, before: int, count: int
) -> None:
    text = ids(before + count)
    sequence = pager.sequence()
    if before:
        append(pager, sequence, text[:before])
    append(pager, sequence, text[before:])
    assert sequence.tokens.tolist() == text.tolist()
    infos = sequence.ledger()
    assert [info.sealed for info in infos].count(True) == len(text) // C
    names = [bytes.fromhex(info.chain_hash) for info in infos if info.sealed]
    assert names == pager.chain_hashes(text)
    pager.check_invariants()
    assert pager.sequence().adopt_prefix(text) == len(text) // C * C


@pytest.mark.parametrize("accepted", [0, 1, C - 1, C, C + 1, 2 * C, 2 * C + 3])
def test_of_a_span_as_many_rows_are_kept_as_were_accepted(pager: Pager, accepted: int) -> None:
    text = ids(5 + 2 * C + 3)
    sequence = pager.sequence()
    append(pager, sequence, text[:5])
    more = text[5:]
    forward = pager.begin_spans([(sequence, 5, len(more), ROW_COMMIT)], more)
    run(forward, {sequence: accepted})
    assert sequence.tokens.tolist() == text[: 5 + accepted].tolist()
    pager.check_invariants()
    append(pager, sequence, more[accepted:]) if accepted < len(more) else None
    assert sequence.tokens.tolist() == text.tolist()


def test_spans_of_one_sequence_may_lie_apart(pager: Pager) -> None:
    a, b = pager.sequence(), pager.sequence()
    text, other = ids(2 * C, 1), ids(20, 2)
    spans = [
        (a, 0, 7, ROW_COMMIT),
        (b, 0, 20, ROW_COMMIT),
        (None, 0, 3, ROW_PADDING),
        (a, 7, 2 * C - 7, ROW_COMMIT),
    ]
    rows = np.concatenate([text[:7], other, np.zeros(3, np.int32), text[7:]])
    run(pager.begin_spans(spans, rows))
    assert a.tokens.tolist() == text.tolist()
    assert b.tokens.tolist() == other.tolist()
    pager.check_invariants()


def test_what_is_no_span_is_refused_and_names_itself(pager: Pager) -> None:
    sequence = pager.sequence()
    good = (sequence, 0, 4, ROW_COMMIT)
    for spans, message in (
        ([(sequence, 0, 4, 4)], r"spans\[0\]: kind 4, expected 0 \(commit\)"),
        ([good, (sequence, 4, 1, -1)], r"spans\[1\]: kind -1"),
        ([(sequence, 0, 5, ROW_COMMIT)], "spans: 5 rows from row 0 on, expected 1 to 4"),
        ([(sequence, 0, 3, ROW_COMMIT)], "of 3 rows, expected as many as tokens, 4"),
        ([(sequence, 1, 4, ROW_COMMIT)], f"position 1 of sequence {sequence.uid}, expected 0"),
        ([(sequence, 0, 4, ROW_READ)], "row 0: reads position 0"),
        ([], "of 0 rows, expected as many"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            pager.begin_spans(spans, [1, 2, 3, 4])
    for position in (0.5, "0", 2**63):
        with pytest.raises(
            InvalidArgumentError, match=r"spans\[0\]: .*expected integers of 64 bits"
        ):
            pager.begin_spans([(sequence, position, 4, ROW_COMMIT)], [1, 2, 3, 4])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="row 2: token id -3 is negative"):
        pager.begin_spans([good], np.array([1, 2, -3, 4], dtype=np.int32))
    run(pager.begin_spans([good], [1, 2, 3, 4]))
    assert sequence.tokens.tolist() == [1, 2, 3, 4]


def test_a_sequence_that_a_refused_forward_named_is_free_again(pager: Pager) -> None:
    a, b = pager.sequence(), pager.sequence()
    with pytest.raises(InvalidArgumentError, match="position 9"):
        pager.begin_spans([(a, 0, 2, ROW_COMMIT), (b, 9, 2, ROW_COMMIT)], [1, 2, 3, 4])
    pager.check_invariants()
    a.trim(0)
    a.close()
    append(pager, b, ids(3))


def test_a_batch_names_every_row_once_and_the_rest_as_padding(pager: Pager) -> None:
    a, b = pager.sequence(), pager.sequence()
    append(pager, b, ids(6))
    batch = Batch(M)
    assert batch.room == M
    assert list(batch.commit(a, 0, ids(5))) == [0, 1, 2, 3, 4]
    assert batch.read(b, 5, 9) == 5
    assert batch.commit_one(b, 6, 7) == 6
    assert (batch.used, batch.room) == (7, M - 7)
    assert batch.owners == [a, b]
    kinds = [ROW_COMMIT] * 5 + [ROW_READ, ROW_COMMIT]
    assert [(row, kind) for row, _, kind in batch.each_row()] == list(enumerate(kinds))
    assert batch.positions[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert batch.padded_spans(7) == batch.spans
    assert batch.padded_spans(16)[-1] == (None, 0, 9, ROW_PADDING)
    assert sum(span[2] for span in batch.padded_spans(16)) == 16
