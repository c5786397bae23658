"""Which row counts a pager takes for exact, and which tensors it takes for rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, Forward, Layout, Pager, Sequence

KV_HEADS, GROUP, DIM, C, M = 2, 2, 16, 16, 16
LAYOUT = Layout(1, KV_HEADS, DIM, DIM, chunk_tokens=C)
TOKENS = np.random.default_rng(0).integers(0, 1000, 4 * C).tolist()


def make_pager(smaller: tuple[int, ...] = (), **options: Any) -> Pager:
    config = PagerConfig(8 * C, chunk_tokens=C, host_bytes="8MiB", **options)
    return Pager(LAYOUT, config, rows=M, smaller_rows=smaller, threads=1)


def rows_of(tokens: list[int], total: int, heads: int, seed: int) -> np.ndarray:
    """[total, heads, DIM]: rows that are a function of their token; NaN where there is none."""
    rows = np.full((total, heads, DIM), np.nan, dtype=np.float32)
    for i, token in enumerate(tokens):
        rows[i] = np.random.default_rng((seed, token)).standard_normal((heads, DIM))
    return rows


def begin(pager: Pager, sequence: Sequence, tokens: list[int], total: int) -> Forward:
    padding = total - len(tokens)
    start = sequence.length
    return pager.begin(
        [sequence] * len(tokens) + [None] * padding,
        [*range(start, start + len(tokens)), *([0] * padding)],
        tokens + [0] * padding,
        [ROW_COMMIT] * len(tokens) + [ROW_PADDING] * padding,
    )


def feed(pager: Pager, sequence: Sequence, tokens: list[int], total: int) -> None:
    """One forward of `total` rows."""
    with begin(pager, sequence, tokens, total) as forward:
        q = rows_of(tokens, total, KV_HEADS * GROUP, 1)
        k, v = rows_of(tokens, total, KV_HEADS, 2), rows_of(tokens, total, KV_HEADS, 3)
        forward.attend(0, q, k, v, scaling=0.25)
        forward.commit()


def found(pager: Pager, tokens: list[int]) -> int:
    """Positions of a new sequence that are served from chunks the pager has."""
    sequence = pager.sequence()
    try:
        return sequence.adopt_prefix(tokens)
    finally:
        sequence.close()


def test_forwards_of_listed_counts_make_exact_chunks_and_others_decode() -> None:
    pager = make_pager((1, 4))
    assert pager.smaller_rows == (1, 4)
    for total, provenance in ((1, "exact"), (2, "decode"), (4, "exact"), (5, "decode")):
        tokens = [total * 1000 + i for i in range(C)]
        sequence = pager.sequence()
        for first in range(0, C, total):
            feed(pager, sequence, tokens[first : first + total], total)
        assert [chunk.provenance for chunk in sequence.ledger()] == [provenance], total
        assert found(pager, tokens) == (C if provenance == "exact" else 0)
        sequence.close()
    pager.check_invariants()


def test_a_pager_without_smaller_counts_takes_m_alone_for_exact() -> None:
    pager = make_pager()
    assert pager.smaller_rows == ()
    sequence = pager.sequence()
    feed(pager, sequence, TOKENS[:C], M)
    for first in range(C, 2 * C, 4):
        feed(pager, sequence, TOKENS[first : first + 4], 4)
    assert [chunk.provenance for chunk in sequence.ledger()] == ["exact", "decode"]
    assert found(pager, TOKENS) == C


def test_chunks_of_smaller_and_of_m_row_forwards_have_one_name_and_one_record() -> None:
    pager = make_pager((4, 8))
    small, large = pager.sequence(), pager.sequence()
    for first in range(0, 2 * C, 8):  # five tokens in eight rows, then three in four
        feed(pager, small, TOKENS[first : first + 5], 8)
        feed(pager, small, TOKENS[first + 5 : first + 8], 4)
    for first in range(0, 2 * C, M):
        feed(pager, large, TOKENS[first : first + M], M)
    names = [[chunk.chain_hash for chunk in s.ledger()] for s in (small, large)]
    assert names[0] == names[1]
    assert pager.stats()["chunks_shared"] == 2


def test_with_exactness_off_no_count_is_exact() -> None:
    pager = make_pager((4,), exact=False)
    sequence = pager.sequence()
    feed(pager, sequence, TOKENS[:M], M)
    for first in range(M, 2 * M, 4):
        feed(pager, sequence, TOKENS[first : first + 4], 4)
    assert {chunk.provenance for chunk in sequence.ledger()} == {"decode"}
    assert found(pager, TOKENS) == 0


@pytest.mark.parametrize("torch_tensors", [False, True])
def test_what_a_forward_was_given_and_gave_is_the_callers_alone_between_layers_and_forwards(
    torch_tensors: bool,
) -> None:
    layers, tokens = 3, TOKENS[:M]
    layout = Layout(layers, KV_HEADS, DIM, DIM, chunk_tokens=C)
    config = PagerConfig(8 * C, chunk_tokens=C, host_bytes="8MiB")
    as_given = torch.from_numpy if torch_tensors else np.asarray

    def run(shared: bool) -> tuple[list[bytes], list[bytes]]:
        """Outputs and K/V; `shared`: q, k and v are refilled in place, over and over."""
        pager = Pager(layout, config, rows=M, threads=1)
        sequence = pager.sequence()
        room = [np.empty((M, heads, DIM), dtype=np.float32) for heads in (4, 2, 2)]
        outputs: list[Any] = []
        for first in (0, M):
            with begin(pager, sequence, tokens, M) as forward:
                for layer in range(layers):
                    for i, full in enumerate(room):
                        seed = 100 * first + 10 * layer + i
                        full[:] = rows_of(tokens, M, full.shape[1], seed)
                    given = room if shared else [full.copy() for full in room]
                    outputs.append(forward.attend(layer, *map(as_given, given), scaling=0.25))
                    for full in room:
                        full[:] = np.nan
                forward.commit()
        kept = [part.numpy() for layer in range(layers) for part in sequence.read_kv(layer, 0, 32)]
        return [np.asarray(out).tobytes() for out in outputs], [part.tobytes() for part in kept]

    apart, together = run(False), run(True)
    assert together == apart
    assert len(set(apart[0])) == 2 * layers  # no output was written over by a later one


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((0,), "smaller_rows[0]: 0, expected ascending counts from 1 to 15"),
        ((4, 16), "smaller_rows[1]: 16"),
        ((8, 4), "smaller_rows[1]: 4"),
        ((4, 4), "smaller_rows[1]: 4"),
        ((-1,), "smaller_rows[0]: -1"),
    ],
)
def test_counts_that_do_not_ascend_below_m_are_refused_by_name(
    counts: tuple[int, ...], words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make_pager(counts)
    assert words in str(error.value)


def misaligned_torch(array: np.ndarray) -> torch.Tensor:
    memory = bytearray(1) + bytearray(array.tobytes())
    return torch.frombuffer(memory, dtype=torch.float32, offset=1).view(array.shape)


def misaligned_numpy(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, dtype=np.uint8)
    memory[1:] = np.frombuffer(array.tobytes(), dtype=np.uint8)
    return memory[1:].view(np.float32).reshape(array.shape)


@pytest.mark.parametrize("make", [misaligned_torch, misaligned_numpy])
@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_elements_that_are_not_aligned_are_refused_by_name_and_the_forward_goes_on(
    make: Callable[[np.ndarray], Any], which: str
) -> None:
    pager = make_pager()
    sequence = pager.sequence()
    tensors = {
        "q": rows_of(TOKENS[:M], M, KV_HEADS * GROUP, 1),
        "k": rows_of(TOKENS[:M], M, KV_HEADS, 2),
        "v": rows_of(TOKENS[:M], M, KV_HEADS, 3),
        "out": np.zeros((M, KV_HEADS * GROUP, DIM), dtype=np.float32),
    }
    with begin(pager, sequence, TOKENS[:M], M) as forward:
        odd = dict(tensors)
        odd[which] = make(tensors[which])
        with pytest.raises(InvalidArgumentError, match=rf"{which}: .*not aligned.*pass a copy"):
            forward.attend(0, odd["q"], odd["k"], odd["v"], out=odd["out"], scaling=0.25)
        forward.attend(0, **tensors, scaling=0.25)
        forward.commit()
    k, v = sequence.read_kv(0, 0, M)
    assert k.numpy().tobytes() == tensors["k"].tobytes()
    assert v.numpy().tobytes() == tensors["v"].tobytes()


def test_an_expanded_output_is_refused_and_expanded_inputs_are_read_as_what_they_show() -> None:
    pager = make_pager()
    sequence = pager.sequence()
    q = torch.from_numpy(rows_of(TOKENS[:1], 1, KV_HEADS * GROUP, 1)).expand(M, -1, -1)
    k = torch.from_numpy(rows_of(TOKENS[:1], 1, KV_HEADS, 2)).expand(M, -1, -1)
    v = torch.from_numpy(rows_of(TOKENS[:1], 1, KV_HEADS, 3)).expand(M, -1, -1)
    with begin(pager, sequence, TOKENS[:M], M) as forward:
        out = torch.zeros(1, KV_HEADS * GROUP, DIM).expand(M, -1, -1)
        with pytest.raises(InvalidArgumentError, match=r"out: strides 0 and 16 .* overlap"):
            forward.attend(0, q, k, v, out=out, scaling=0.25)
        whole = forward.attend(0, q.clone(), k.clone(), v.clone(), scaling=0.25)
        again = forward.attend(0, q, k, v, scaling=0.25)
        forward.commit()
    assert whole.numpy().tobytes() == again.numpy().tobytes()
