"""A pager and its snapshots: which may be restored into which, and what an interrupt leaves."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupted_pager import OPERATIONS, expected_row, interrupt

from kvpager import FingerprintMismatchError
from kvpager.config import Dense, PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager import ROW_COMMIT, ROW_GIVEN, ROW_READ, Layout, Pager, Sequence

C, DIM = 16, 16
LAYOUT = Layout(1, 1, DIM, DIM, chunk_tokens=C)
RANDOM = np.random.default_rng(4)
TOKENS = RANDOM.integers(0, 1000, 3 * C, dtype=np.int32)
K, V = RANDOM.standard_normal((2, 1, 3 * C, 1, DIM), dtype=np.float32)
Q = RANDOM.standard_normal((C, 1, DIM), dtype=np.float32)


def make() -> Pager:
    config = PagerConfig(
        8 * C, chunk_tokens=C, selection=Dense(), host_bytes=32 * LAYOUT.chunk_bytes
    )
    return Pager(LAYOUT, config, rows=C, threads=1)


def filled(pager: Pager, length: int = 2 * C) -> Sequence:
    sequence = pager.sequence()
    sequence.append(TOKENS[:length], K[:, :length], V[:, :length])
    return sequence


def begin(pager: Pager, sequence: Sequence, form: str, at: int = 2 * C):
    """A forward of rows of `sequence` in each form that can name one."""
    ids = TOKENS[:4]
    if form == "rows":
        return pager.begin([sequence] * 4, range(at, at + 4), ids, [ROW_COMMIT] * 4)
    if form == "reading rows":
        return pager.begin([sequence] * 4, range(4), ids, [ROW_READ] * 4)
    if form == "given":
        return pager.begin_spans([(sequence, at, 4, ROW_GIVEN)], (), given=ids, dense=True)
    return pager.begin_spans([(sequence, at, 4, ROW_COMMIT)], ids)


FORMS = ["rows", "reading rows", "spans", "given"]


@pytest.mark.parametrize("form", FORMS)
def test_a_forward_with_a_sequence_of_another_pager_is_refused(form):
    ours, theirs = make(), make()
    mine, other = filled(ours), filled(theirs)
    before = [s.read_kv(0, 0, 2 * C)[0].numpy().tobytes() for s in (mine, other)]
    with pytest.raises(InvalidArgumentError, match="is of another pager"):
        begin(ours, other, form)
    assert not ours.core.forward_running()
    assert not theirs.core.forward_running()
    assert (mine.length, other.length) == (2 * C, 2 * C)
    assert before == [s.read_kv(0, 0, 2 * C)[0].numpy().tobytes() for s in (mine, other)]
    ours.check_invariants()
    begin(ours, mine, form).abort()


def test_no_number_means_something_to_two_pagers():
    ours, theirs = make(), make()
    mine, other = [ours.sequence() for _ in range(3)], [theirs.sequence() for _ in range(3)]
    assert len({s.uid for s in [*mine, *other]}) == 6
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        ours.begin(np.full(4, other[0].uid), range(4), TOKENS[:4], [ROW_COMMIT] * 4)
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        ours.core.read_kv(other[0].uid, 0, 0, 0)


def test_a_commit_that_counts_rows_of_another_pagers_sequence_is_refused():
    ours, theirs = make(), make()
    mine, other = filled(ours), filled(theirs)
    with begin(ours, mine, "spans") as forward:
        forward.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
        with pytest.raises(InvalidArgumentError, match="is of another pager"):
            forward.commit({other: 2})
        forward.commit({mine: 2})
    assert mine.length == 2 * C + 2


@pytest.mark.parametrize("form", FORMS)
def test_a_closed_sequence_is_refused_by_name(form):
    pager = make()
    sequence = filled(pager)
    uid = sequence.uid
    sequence.close()
    sequence.close()  # twice is allowed
    assert sequence.closed
    with pytest.raises(InvalidArgumentError, match=f"sequence {uid} is closed"):
        begin(pager, sequence, form)
    for use in (
        lambda: sequence.length,
        lambda: sequence.fork(),
        lambda: sequence.trim(0),
        lambda: sequence.pin(0, C),
        lambda: sequence.freeze(),
        lambda: sequence.reserve(C),
        lambda: sequence.select(0, Q[0]),
    ):
        with pytest.raises(InvalidArgumentError, match=f"sequence {uid} is closed"):
            use()


@pytest.mark.parametrize("end", ["reset", "close"])
def test_sequences_pins_and_forwards_of_before_a_reset_or_a_close_are_refused(end):
    pager = make()
    sequence = filled(pager)
    pin = sequence.pin(0, C)
    forward = begin(pager, sequence, "spans")
    assert not sequence.closed
    getattr(pager, end)()
    assert sequence.closed
    if end == "reset":
        fresh = filled(pager)
        for form in FORMS:
            with pytest.raises(InvalidArgumentError, match="closed or reset"):
                begin(pager, sequence, form)
        running = begin(pager, fresh, "spans")
    for use in (lambda: sequence.length, lambda: sequence.fork(), lambda: sequence.pin(0, C)):
        with pytest.raises(InvalidArgumentError, match="closed or reset"):
            use()
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        forward.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        forward.commit()
    forward.abort()
    pin.release()
    sequence.close()
    if end == "reset":
        running.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
        running.commit()
        assert fresh.length == 2 * C + 4
        pager.check_invariants()


def test_a_forward_that_failed_does_not_speak_for_the_next_one():
    pager = make()
    sequence = filled(pager)
    failed = begin(pager, sequence, "spans")
    with pytest.raises(Exception, match="not finite"):
        failed.attend(0, Q[:4], np.full_like(K[0, :4], np.nan), V[0, :4], scaling=1.0)
    running = begin(pager, sequence, "spans")
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        failed.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        failed.commit()
    failed.abort()
    running.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
    running.commit()
    assert sequence.length == 2 * C + 4


class Replacing:
    """A tensor whose export ends the running forward and begins another one."""

    def __init__(self, tensor, replace):
        self._tensor = tensor
        self._replace = replace

    def __dlpack__(self):
        self._replace()
        return self._tensor.__dlpack__()


@pytest.mark.parametrize("call", ["attend", "write", "give"])
def test_what_is_for_a_forward_that_was_replaced_meanwhile_does_not_reach_the_next_one(call):
    pager = make()
    sequence = filled(pager)
    form = "given" if call == "give" else "spans"
    first = begin(pager, sequence, form)
    second = []

    def replace():
        if not second:
            first.abort()
            second.append(begin(pager, sequence, form))

    k, v = Replacing(K[0, :4], replace), V[0, :4]
    calls = {
        "attend": lambda: first.attend(0, Q[:4], k, v, scaling=1.0),
        "write": lambda: first.write(0, k, v),
        "give": lambda: first.give([k], [v]),
    }
    with pytest.raises(InvalidArgumentError, match="this forward has ended"):
        calls[call]()
    (running,) = second
    with pytest.raises(InvalidArgumentError, match=r"was never written|are missing"):
        running.commit()


def test_what_nobody_holds_goes_back():
    pager = make()
    sequence = filled(pager)
    begin(pager, sequence, "spans")  # a forward that is dropped at once
    assert not pager.core.forward_running()
    sequence.pin(0, C)
    assert pager.stats()["pinned_blocks"] == 0
    sequence.fork()
    assert pager.stats()["sequences"] == 1
    del sequence
    gc.collect()
    assert pager.stats()["sequences"] == 0
    assert pager.stats()["open_blocks"] == 0
    pager.check_invariants()


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_a_sequence_that_is_dropped_while_its_forward_runs_goes_with_it(ending):
    pager = make()
    sequence = filled(pager)
    forward = begin(pager, sequence, "spans")
    del sequence
    gc.collect()
    assert pager.stats()["sequences"] == 1
    forward.attend(0, Q[:4], K[0, :4], V[0, :4], scaling=1.0)
    getattr(forward, ending)()
    assert pager.stats()["sequences"] == 0
    pager.check_invariants()


def test_a_sequence_in_a_running_forward_is_not_closed():
    pager = make()
    sequence = filled(pager)
    with begin(pager, sequence, "spans"):
        with pytest.raises(InvalidArgumentError, match="while it is in a running forward"):
            sequence.close()
        assert not sequence.closed
    sequence.close()
    assert pager.stats()["sequences"] == 0


def test_a_save_outlives_its_pager_and_what_else_was_held_of_it_does_not():
    pager = make()
    sequence = filled(pager)
    pin, content = sequence.pin(0, C), sequence.freeze()
    pager.close()
    assert len(content.tokens) == 2 * C
    del content
    pin.release()
    assert sequence.closed


def test_something_else_in_the_place_of_a_sequence_is_named():
    pager = make()
    with pytest.raises(InvalidArgumentError, match=r"spans\[0\]: .*int.*, expected a Sequence"):
        pager.begin_spans([(7, 0, 4, ROW_COMMIT)], TOKENS[:4])
    with pytest.raises(InvalidArgumentError, match=r"sequences\[1\]: .*str.*, expected a Sequence"):
        pager.begin([None, "a"], [0, 0], [0, 0], [2, 0])


LAYOUT_16 = Layout(layers=1, kv_heads=1, k_dim=16, v_dim=16, chunk_tokens=16)


def make_pager(layout: Layout = LAYOUT_16, fingerprint: str = "a", **options: Any) -> Pager:
    config = PagerConfig(pool_tokens=64, chunk_tokens=16, host_bytes="1MiB", **options)
    return Pager(layout, config, rows=16, fingerprint={"model": fingerprint}, threads=1)


@pytest.fixture(params=[5, 40], ids=["tail only", "sealed chunks"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kv = np.random.default_rng(0).standard_normal((1, request.param, 1, 16), dtype=np.float32)
    sequence = make_pager().sequence(salt="tenant")
    sequence.append(np.arange(request.param), kv, kv)
    sequence.save(tmp_path / "turn.kvsnap")
    return tmp_path / "turn.kvsnap"


@pytest.mark.parametrize(
    ("field", "pager", "salt"),
    [
        ("salt", {}, "other"),
        ("layout", {"layout": Layout(1, 1, 32, 16, chunk_tokens=16)}, "tenant"),
        ("model", {"fingerprint": "b"}, "tenant"),
    ],
)
def test_another_salt_layout_or_model_is_refused_by_name(
    saved: Path, field: str, pager: dict[str, Any], salt: str
) -> None:
    other = make_pager(**pager)
    before = other.stats()
    with pytest.raises(FingerprintMismatchError) as refused:
        other.restore(other.open_snapshot(saved), salt=salt)
    assert refused.value.field == field
    assert other.stats() == before
    other.check_invariants()


@pytest.fixture(scope="module")
def expected() -> bytes:
    return expected_row()


@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_any_return_leaves_nothing_behind(operate, tmp_path, expected):
    assert interrupt(operate, expected, tmp_path).interrupted >= 1
