"""Positions whose K/V are given: what rows among them see, and what their chunks are then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require

from kvpager import CapacityError, Dense, InvalidArgumentError, NonFiniteError, PagerConfig, TopK
from kvpager.pager import (
    ROW_COMMIT,
    ROW_GIVEN,
    ROW_PADDING,
    ROW_READ,
    Forward,
    Layout,
    Pager,
    Sequence,
    Span,
)

LAYERS, KV_HEADS, HEADS, DIM, C, M = 2, 2, 4, 16, 16, 16
LENGTH = 9 * C + 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOPK = TopK(chunks=1, sinks=C, recent=C)


class Text:
    """Token ids, and q, k and v of each position, by which nothing here is computed."""

    def __init__(self, dtype: str = "float32", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int) -> torch.Tensor:
            return torch.randn((LAYERS, LENGTH, heads, DIM), generator=generator).to(DTYPES[dtype])

        self.layout = Layout(
            LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C, k_dtype=dtype, v_dtype=dtype
        )
        self.ids = np.random.default_rng(seed).integers(0, 1000, LENGTH, dtype=np.int32)
        self.q, self.k, self.v = drawn(HEADS), drawn(KV_HEADS), drawn(KV_HEADS)

    def pager(self, pool: int = 24, *, device: str = "cpu", rows: int = M, **options: Any) -> Pager:
        config = PagerConfig(pool * C, **{"chunk_tokens": C, "host_bytes": "8MiB", **options})
        return Pager(self.layout, config, rows=rows, threads=1, device=device, q_heads=HEADS)

    def attend(self, forward: Forward, rows: np.ndarray, **call: Any) -> torch.Tensor:
        """[layers, rows, heads, dim] of rows at these positions."""
        outputs = []
        for layer in range(LAYERS):
            q, k, v = (part[layer][rows].to(call["at"]) for part in (self.q, self.k, self.v))
            more = {name: value for name, value in call.items() if name != "at"}
            outputs.append(forward.attend(layer, q, k, v, scaling=0.25, **more).cpu())
        return torch.stack(outputs)

    def computed(self, **call: Any) -> tuple[torch.Tensor, Sequence]:
        """Attention of every position in ordinary forwards, and the sequence."""
        pager = self.pager()
        sequence = pager.sequence()
        outputs = []
        for first in range(0, LENGTH, M):
            here = np.arange(first, min(first + M, LENGTH))
            spans: list[Span] = [(sequence, first, len(here), ROW_COMMIT)]
            with pager.begin_spans(spans, self.ids[here]) as forward:
                outputs.append(self.attend(forward, here, at="cpu", **call))
                forward.commit()
        return torch.cat(outputs, dim=1), sequence

    def hand_in(self, forward: Forward, given: np.ndarray, at: str = "cpu") -> None:
        forward.give(self.k[:, given].to(at), self.v[:, given].to(at))


def spans_of(sequence: Sequence, first: int, rows: np.ndarray) -> list[Span]:
    """Spans from position `first` on: rows of the model where `rows` says so."""
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    return [
        (sequence, first + a, b - a, ROW_COMMIT if rows[a] else ROW_GIVEN)
        for a, b in pairwise(edges)
    ]


def drawn_rows(random: np.random.Generator, count: int) -> np.ndarray:
    rows = np.zeros(count, dtype=bool)
    for at in random.integers(0, count, 4):
        rows[at : at + random.integers(1, 4)] = True
    return rows


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = torch.int32 if a.element_size() == 4 else torch.int16
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integers), b.contiguous().view(integers)
    )


def assert_holds(sequence: Sequence, text: Text) -> None:
    assert sequence.tokens.tolist() == text.ids[: sequence.length].tolist()
    for layer in range(LAYERS):
        k, v = sequence.read_kv(layer, 0, sequence.length)
        assert same(k, text.k[layer, : sequence.length])
        assert same(v, text.v[layer, : sequence.length])


CALLS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small": {"pool": 7, "debug_shuffle_seed": 3, "debug_poison": True},
    "disk": {"pool": 7, "host_bytes": 3 * 8192, "disk_bytes": "1MiB", "debug_poison": True},
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "+".join(call) or "plain")
@pytest.mark.parametrize("place", POOLS)
@pytest.mark.parametrize("selection", [Dense(), TOPK], ids=["dense", "topk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_among_given_positions_attend_as_in_ordinary_forwards_wherever_chunks_are(
    dtype: str, selection: Any, place: str, call: dict[str, Any], tmp_path: Path
) -> None:
    text = Text(dtype)
    expected, _ = text.computed(**call)
    options = dict(POOLS[place])
    if "disk_bytes" in options:
        options["disk_path"] = tmp_path
    pager = text.pager(selection=selection, **options)
    random = np.random.default_rng(11)
    sequence = pager.sequence()
    while sequence.length < LENGTH:
        first = sequence.length
        rows = drawn_rows(random, min(int(random.integers(1, 5 * C)), LENGTH - first))
        positions = first + np.arange(len(rows))
        live = positions[rows]
        pager.evict_all()
        with pager.begin_spans(
            spans_of(sequence, first, rows),
            text.ids[live],
            given=text.ids[positions[~rows]],
            dense=True,
        ) as forward:
            if not rows.all():
                text.hand_in(forward, positions[~rows])
            outputs = text.attend(forward, live, at="cpu", **call)
            forward.commit(provenance="approximate")
        assert same(outputs, expected[:, live])
        pager.check_invariants()
    assert_holds(sequence, text)
    assert place == "roomy" or pager.stats()["chunks_evicted"] > 0


@pytest.mark.parametrize("at", DEVICES)
def test_a_device_gives_the_processors_bits(at: str) -> None:
    text = Text()
    device = require(at)
    expected, _ = text.computed()
    pager = text.pager(9, device=device, attention="reference", debug_poison=True)
    where = str(pager.device)
    sequence = pager.sequence()
    random = np.random.default_rng(5)
    for stop in (30, 33, 110, LENGTH):
        rows = drawn_rows(random, stop - sequence.length)
        positions = sequence.length + np.arange(len(rows))
        with pager.begin_spans(
            spans_of(sequence, sequence.length, rows),
            text.ids[positions[rows]],
            given=text.ids[positions[~rows]],
            dense=True,
        ) as forward:
            if not rows.all():
                text.hand_in(forward, positions[~rows], where)
            outputs = text.attend(forward, positions[rows], at=where)
            forward.commit()
        assert same(outputs, expected[:, positions[rows]])
        pager.evict_all()
    assert_holds(sequence, text)
    pager.check_invariants()


@pytest.mark.parametrize("at", ["cpu", *DEVICES])
def test_a_forward_that_is_to_be_dense_sees_all_though_the_pager_selects(at: str) -> None:
    text = Text()
    expected, _ = text.computed()
    device = at if at == "cpu" else require(at)
    pager = text.pager(device=device, selection=TOPK, attention="reference")
    where = str(pager.device)
    sequence = pager.sequence()
    stop = LENGTH - 1
    sequence.append(text.ids[:stop], text.k[:, :stop].to(where), text.v[:, :stop].to(where))
    seen = []
    for dense in (True, False, True):
        with pager.begin_spans(
            [(sequence, stop, 1, ROW_COMMIT)], text.ids[stop:], dense=dense
        ) as forward:
            seen.append(text.attend(forward, np.array([stop]), at=where))
            forward.commit()
        sequence.trim(stop)
    assert same(seen[0], expected[:, stop:])
    assert not same(seen[1], seen[0])
    assert same(seen[2], seen[0])
    pager.check_invariants()


def test_what_comes_after_a_row_is_nothing_to_it_nor_to_the_chunks_before() -> None:
    text = Text()
    rows = np.zeros(LENGTH, dtype=bool)
    rows[[0, 7, 40, 41, 63, 100]] = True
    given = np.flatnonzero(~rows)
    live = np.flatnonzero(rows)
    seen: list[tuple[torch.Tensor, list[str], torch.Tensor]] = []
    for changed in (LENGTH, 64):
        pager = text.pager()
        sequence = pager.sequence()
        k, v = text.k[:, given].clone(), text.v[:, given].clone()
        k[:, given >= changed] = 1e30
        v[:, given >= changed] *= -7
        with pager.begin_spans(
            spans_of(sequence, 0, rows), text.ids[live], given=text.ids[given]
        ) as forward:
            forward.give(k, v)
            outputs = text.attend(forward, live, at="cpu")
            forward.commit(provenance="approximate")
        names = [info.chain_hash for info in sequence.ledger()]
        seen.append((outputs, names, sequence.read_kv(1, 0, 64)[0]))
    (before, names, held), (after, other_names, other_held) = seen
    assert same(before[:, :5], after[:, :5])
    assert not same(before[:, 5:], after[:, 5:])
    assert same(held, other_held)
    assert names == other_names


def test_what_was_given_is_selected_like_what_was_computed() -> None:
    """Summaries are made of the keys, whoever wrote them: later rows choose the same chunks."""
    text = Text()
    chosen, outputs = [], []
    for given in (False, True):
        pager = text.pager(selection=TOPK)
        sequence = pager.sequence()
        stop = LENGTH - 1
        if given:
            sequence.append(text.ids[:stop], text.k[:, :stop], text.v[:, :stop])
        else:
            for first in range(0, stop, M):
                n = min(M, stop - first)
                here = slice(first, first + n)
                with pager.begin_spans(
                    [(sequence, first, n, ROW_COMMIT)], text.ids[here]
                ) as forward:
                    for layer in range(LAYERS):
                        forward.write(layer, text.k[layer, here], text.v[layer, here])
                    forward.commit()
        chosen.append([sequence.select(layer, text.q[layer, stop]) for layer in range(LAYERS)])
        with pager.begin_spans([(sequence, stop, 1, ROW_COMMIT)], text.ids[stop:]) as forward:
            outputs.append(text.attend(forward, np.array([stop]), at="cpu"))
    assert chosen[0] == chosen[1]
    assert len(chosen[0][0][0]) < LENGTH // C  # something was left out
    assert same(outputs[0], outputs[1])


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_what_is_given_may_be_one_tensor_or_one_per_layer(numpy: bool, by_layer: bool) -> None:
    text = Text()
    pager = text.pager()
    sequence = pager.sequence()
    k, v = (part.numpy() if numpy else part for part in (text.k, text.v))
    with pager.begin_spans([(sequence, 0, LENGTH, ROW_GIVEN)], (), given=text.ids) as forward:
        if by_layer:
            forward.give([k[0], k[1]], (v[0], v[1]))
        else:
            forward.give(k, v)
        forward.commit()
    assert_holds(sequence, text)
    assert sequence.ledger()[0].provenance == "exact"


def test_readers_see_a_stitched_text_and_leave_nothing() -> None:
    """Rows that only read attend in the forward that gives what they read."""
    text = Text()
    expected, computed = text.computed()
    pager = text.pager(selection=TOPK)
    sequence = pager.sequence()
    sequence.append(text.ids[:40], text.k[:, :40], text.v[:, :40])
    probes = np.array([3, 39, 17])
    with pager.begin_spans(
        [
            (sequence, 40, LENGTH - 40, ROW_GIVEN),
            *((sequence, int(at), 1, ROW_READ) for at in probes),
            (None, 0, 2, ROW_PADDING),
        ],
        [0] * 5,
        given=text.ids[40:],
        dense=True,
    ) as forward:
        text.hand_in(forward, np.arange(40, LENGTH))
        outputs = text.attend(forward, np.append(probes, [0, 0]), at="cpu")
        forward.commit()
    assert same(outputs[:, :3], expected[:, probes])
    assert not outputs[:, 3:].any()
    assert_holds(sequence, text)
    assert sequence.ledger()[-2].chain_hash != computed.ledger()[-2].chain_hash  # 5 rows: decode


@contextmanager
def unchanged(pager: Pager, sequence: Sequence) -> Iterator[None]:
    before = (sequence.length, pager.stats())
    yield
    pager.check_invariants()
    now = pager.stats()
    assert sequence.length == before[0]
    for what in ("open_blocks", "reserved_chunks", "records", "home_chunks"):
        assert now[what] == before[1][what]


def test_a_forward_that_does_not_come_to_its_end_leaves_the_sequence_as_it_was() -> None:
    text = Text()
    pager = text.pager(10, debug_poison=True)
    sequence = pager.sequence()
    sequence.append(text.ids[:21], text.k[:, :21], text.v[:, :21])
    rows = np.zeros(60, dtype=bool)
    rows[10] = True
    positions = 21 + np.arange(60)
    given = positions[~rows]

    def begin() -> Forward:
        spans = spans_of(sequence, 21, rows)
        return pager.begin_spans(spans, text.ids[[31]], given=text.ids[given])

    with unchanged(pager, sequence), begin():
        pass
    with unchanged(pager, sequence), begin() as forward:
        text.hand_in(forward, given)
        text.attend(forward, np.array([31]), at="cpu")
    for layer, what in ((0, "k"), (1, "v")):
        k, v = text.k[:, given].clone(), text.v[:, given].clone()
        (k if what == "k" else v)[layer, 37, 1, 3] = float("nan")
        with unchanged(pager, sequence), begin() as forward:
            with pytest.raises(NonFiniteError, match=rf"layer {layer}: .* position {given[37]} of"):
                forward.give(k, v)
            with pytest.raises(InvalidArgumentError, match="this forward has ended"):
                forward.commit()
    with unchanged(pager, sequence), begin() as forward:
        text.hand_in(forward, given)
        forward.commit({sequence: 0})
    assert_holds(sequence, text)


def test_more_open_chunks_than_there_are_blocks_are_refused_at_once() -> None:
    text = Text()
    pager = text.pager(4)
    sequence = pager.sequence()
    with (
        unchanged(pager, sequence),
        pytest.raises(CapacityError, match="begin: needs 5 blocks of the pool, 4 can be had"),
    ):
        pager.begin_spans([(sequence, 0, 4 * C + 1, ROW_GIVEN)], (), given=text.ids[: 4 * C + 1])
    with pager.begin_spans(
        [(sequence, 0, 4 * C, ROW_GIVEN)], (), given=text.ids[: 4 * C]
    ) as forward:
        text.hand_in(forward, np.arange(4 * C))
        forward.commit()
    sequence.append(text.ids[4 * C :], text.k[:, 4 * C :], text.v[:, 4 * C :])
    assert_holds(sequence, text)


def test_what_does_not_fit_is_refused_by_name() -> None:
    text = Text()
    pager = text.pager(selection=TOPK)
    sequence = pager.sequence()
    spans: list[Span] = [(sequence, 0, 4, ROW_GIVEN)]
    with pytest.raises(InvalidArgumentError, match="dense: false, but a forward with given"):
        pager.begin_spans(spans, (), given=[1, 2, 3, 4])
    with pytest.raises(InvalidArgumentError, match="from given row 0 on, expected 1 to 0"):
        pager.begin_spans(spans, [1, 2, 3, 4], dense=True)
    with pytest.raises(InvalidArgumentError, match="as many as given tokens, 5"):
        pager.begin_spans(spans, (), given=[1, 2, 3, 4, 5], dense=True)
    with pytest.raises(InvalidArgumentError, match=r"kinds\[0\]: 3, expected 0 \(commit\)"):
        pager.begin([sequence], [0], [1], [ROW_GIVEN])
    with pytest.raises(InvalidArgumentError, match="rows: 0 given, expected 1 to 16"):
        pager.begin_spans([], (), dense=True)
    with pager.begin_spans(spans, (), given=[1, 2, 3, 4], dense=True) as forward:
        k, v = text.k[:, :4], text.v[:, :4]
        with pytest.raises(InvalidArgumentError, match="no rows; call give, then commit"):
            forward.attend(0, text.q[0, :0], k[0, :0], v[0, :0], scaling=1.0)
        with pytest.raises(InvalidArgumentError, match="4 given positions are missing"):
            forward.commit()
        with pytest.raises(InvalidArgumentError, match=r"v\[1\]: shape \[3, 2, 16\], expected \[4"):
            forward.give(k, [v[0], v[1, :3]])
        with pytest.raises(InvalidArgumentError, match=r"k\[0\]: 2 dimensions, expected 3"):
            forward.give(k[0], v)
        with pytest.raises(InvalidArgumentError, match="keys of 1 layers and values of 2"):
            forward.give(k[:1], v)
        with pytest.raises(InvalidArgumentError, match=r"v\[0\].*float64|element type"):
            forward.give(k, v.double())
        forward.give(k, v)
        with pytest.raises(InvalidArgumentError, match="its keys and values already"):
            forward.give(k, v)
        forward.commit()
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        forward.give(k, v)
    with (
        pager.begin_spans([(sequence, 4, 1, ROW_COMMIT)], [5]) as forward,
        pytest.raises(InvalidArgumentError, match="no given positions; name them"),
    ):
        forward.give(k, v)
    assert sequence.length == 4


def test_an_append_forwards_no_row_of_a_model_and_is_exact_where_it_says_so() -> None:
    text = Text()
    for exact, worth in (("all", "exact"), (False, "decode")):
        pager = text.pager(exact=exact)
        sequence = pager.sequence()
        sequence.append(text.ids, text.k, text.v, provenance="exact")
        assert_holds(sequence, text)
        assert {info.provenance for info in sequence.ledger()[:-1]} == {worth}
        assert pager.stats()["forwards"] == -(-LENGTH // M)
        found = pager.sequence().adopt_prefix(text.ids)
        assert found == (LENGTH // C * C if exact else 0)
        pager.check_invariants()


def test_a_failed_append_leaves_the_sequence_as_it_was() -> None:
    text = Text()
    pager = text.pager()
    sequence = pager.sequence()
    sequence.append(text.ids[:20], text.k[:, :20], text.v[:, :20])
    k = text.k[:, 20:].clone()
    k[1, 90] = float("inf")
    with (
        unchanged(pager, sequence),
        pytest.raises(NonFiniteError, match="layer 1: the key or value at position 110"),
    ):
        sequence.append(text.ids[20:], k, text.v[:, 20:])
    assert_holds(sequence, text)


def test_a_pager_without_bytes_keeps_the_books() -> None:
    pager = Pager(
        Text().layout,
        PagerConfig(24 * C, chunk_tokens=C, host_bytes=0, selection=TOPK),
        rows=M,
        device="meta",
        threads=1,
    )
    text = Text()
    sequence = pager.sequence()
    with (
        pager.begin_spans(
            [(sequence, 0, LENGTH, ROW_GIVEN)], (), given=text.ids, dense=True
        ) as forward,
        pytest.raises(InvalidArgumentError, match="cannot give: device is meta"),
    ):
        forward.give(text.k, text.v)
    with pager.begin_spans(
        [(sequence, 0, LENGTH - 1, ROW_GIVEN), (sequence, LENGTH - 1, 1, ROW_COMMIT)],
        text.ids[-1:],
        given=text.ids[:-1],
        dense=True,
    ) as forward:
        forward.replayed(pager.generation)
        forward.commit()
    assert sequence.tokens.tolist() == text.ids.tolist()
    pager.check_invariants()
