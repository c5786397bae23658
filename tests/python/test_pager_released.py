"""Windowed layers: what is behind every window is let go, and nobody can tell from the bits."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require
from windowed_pager import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    LENGTH,
    WINDOW,
    WINDOWS,
    C,
    M,
    Text,
    grow,
    kv,
    make,
    read,
    state,
)

from kvpager import (
    CapacityError,
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    NonFiniteError,
    Pager,
    open_snapshot,
)
from kvpager.config import TopK
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.stores import DirectoryStore

REWIND = C  # the least there is: what was sealed last can always be dropped
# The most sealed chunks that are held at a time: window, rewind, and the rows of a forward.
MOST = (WINDOW + REWIND + M) // C + 1


def released_at(length: int, rewind: int = REWIND) -> int:
    """Positions that a sequence which grew to `length` has let go of."""
    return max(0, length - rewind - WINDOW) // C * C


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


@pytest.fixture(scope="module")
def expected(text: Text) -> np.ndarray[Any, Any]:
    """Outputs of all positions by a pager that keeps everything."""
    return grow(make(window=0).sequence(), text, LENGTH)


@pytest.fixture(scope="module")
def whole(text: Text) -> list[np.ndarray[Any, Any]]:
    """K and V of each layer, all positions."""
    sequence = make(window=0).sequence()
    grow(sequence, text, LENGTH)
    return [p.numpy() for layer in range(LAYERS) for p in sequence.read_kv(layer, 0, LENGTH)]


def grown(pager: Pager, text: Text, length: int = LENGTH, salt: str = "") -> Sequence:
    sequence = pager.sequence(salt=salt)
    grow(sequence, text, length)
    return sequence


def tail_of(whole: list[np.ndarray[Any, Any]], start: int, stop: int) -> list[bytes]:
    return [part[start:stop].tobytes() for part in whole]


# --- Bits


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("rows", [M, 7, 1])
@pytest.mark.parametrize(("pool", "host"), [(4, 8), (6, 64), (30, 0)])
def test_outputs_are_those_of_a_pager_that_keeps_all_whatever_the_pool(
    text: Text, expected: np.ndarray[Any, Any], pool: int, host: int, rows: int, device: str
) -> None:
    if device != "cpu" and (rows, pool) != (7, 6):
        pytest.skip("one of these is enough for a device")
    stop = LENGTH if rows > 1 else 8 * C
    place = device if device == "cpu" else require(device)
    pager = make(pool=pool, host=host, device=place)
    sequence = pager.sequence()
    if place == "cpu":
        outputs = grow(sequence, text, stop, rows)
        assert outputs.tobytes() == expected[:, :stop].tobytes()
    else:
        check_on_device(sequence, text, expected, stop, rows)
    assert sequence.released == released_at(stop)
    assert sequence.released > 0


def check_on_device(
    sequence: Sequence, text: Text, expected: np.ndarray[Any, Any], stop: int, rows: int
) -> None:
    import torch

    from kvpager.pager import ROW_COMMIT

    pager = sequence.pager
    while (start := sequence.length) < stop:
        positions = list(range(start, min(start + rows, stop)))
        n = len(positions)
        with pager.begin_spans([(sequence, start, n, ROW_COMMIT)], text.tokens[positions]) as f:
            for layer in range(LAYERS):
                q, k, v = (
                    torch.from_numpy(part[:n].copy()).to(pager.device)
                    for part in text.rows(layer, positions)
                )
                out = f.attend(layer, q, k, v, scaling=0.25, window=WINDOWS[layer])
                want = expected[layer, positions]
                assert out.cpu().numpy().tobytes() == want.tobytes()
            f.commit()
        pager.check_invariants()


def test_outputs_are_those_of_naive_windowed_attention(
    text: Text, expected: np.ndarray[Any, Any]
) -> None:
    outputs = grow(make(pool=4, host=8).sequence(), text, LENGTH)
    naive = np.stack([[text.naive(layer, p) for p in range(LENGTH)] for layer in range(LAYERS)])
    np.testing.assert_allclose(outputs, naive, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("chunks", [1, 2])
def test_top_k_within_a_window_chooses_what_a_pager_that_keeps_all_chooses(
    text: Text, chunks: int, device: str
) -> None:
    place = device if device == "cpu" else require(device)
    selection = TopK(chunks=chunks, sinks=C, recent=M)
    all_kept = make(window=0, selection=selection).sequence()
    expected = grow(all_kept, text, LENGTH)
    pager = make(pool=6, host=16, selection=selection, device=place)
    sequence = pager.sequence()
    if place != "cpu":
        check_on_device(sequence, text, expected, LENGTH, M)
        return
    assert grow(sequence, text, LENGTH, 5).tobytes() == expected.tobytes()
    q = text.qkv[0, 0, :HEADS]
    assert sequence.released == released_at(LENGTH)
    for window in WINDOWS:
        chosen = sequence.select(1, q, window=window)
        assert chosen == all_kept.select(1, q, window=window)


def test_what_is_held_is_bit_for_bit_what_was_computed(
    text: Text, whole: list[np.ndarray[Any, Any]]
) -> None:
    pager = make(pool=4, host=8)
    sequence = pager.sequence()
    for stop in range(C, LENGTH, 3 * C + 1):
        grow(sequence, text, stop)
        assert kv(sequence) == tail_of(whole, sequence.released, stop)
        assert sequence.length == stop
        assert sequence.tokens.tolist() == text.tokens[:stop].tolist()


# --- What is let go, and what is said of it


def test_a_sequence_lets_go_of_what_neither_window_nor_rewind_reaches(text: Text) -> None:
    for rewind in (0, C, 37, 100, 10**6):
        pager = make(rewind=rewind, pool=30)
        sequence = pager.sequence()
        for stop in range(1, LENGTH, 13):
            grow(sequence, text, stop)
            kept = max(rewind, C)
            assert sequence.released == released_at(stop, kept)
            earliest = sequence.earliest_trim
            assert earliest == (sequence.released + WINDOW if sequence.released else 0)
            assert earliest <= max(0, stop - kept)
        assert pager.stats()["chunks_released"] * C == sequence.released


def test_the_ledger_has_an_entry_for_every_chunk(text: Text) -> None:
    pager = make()
    sequence = grown(pager, text)
    ledger = sequence.ledger()
    assert [info.chunk for info in ledger] == list(range(LENGTH // C + 1))
    gone = sequence.released // C
    assert [info.released for info in ledger] == [c < gone for c in range(len(ledger))]
    for info in ledger[:gone]:
        assert (info.start, info.stop) == (info.chunk * C, info.chunk * C + C)
        assert (info.sealed, info.provenance, info.references) == (True, "exact", 0)
        assert not any((info.resident, info.on_host, info.on_disk, info.in_snapshot))
        assert "released" in repr(info)
    assert sequence.residency()["tiers"].tolist()[:gone] == [0] * gone
    assert all(sequence.residency()["tiers"][gone:])


def test_reading_pinning_and_selecting_what_was_let_go_is_refused_and_says_why(text: Text) -> None:
    pager = make()
    sequence = grown(pager, text)
    before, released = state(sequence), sequence.released
    said = rf"positions \[0, {released}\) were let go behind the window of {WINDOW} tokens"
    for step in (
        lambda: sequence.read_kv(0, released - 1, LENGTH),
        lambda: sequence.read_kv(1, 0, 1),
        lambda: sequence.pin(0, LENGTH),
        lambda: sequence.select(0, text.qkv[0, 0, :HEADS]),
        lambda: sequence.select(0, text.qkv[0, 0, :HEADS], position=released, window=2),
        lambda: read(sequence, text, [released + WINDOW - 2]),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            step()
    assert state(sequence) == before
    assert sequence.read_kv(0, 0, 0)[0].shape == (0, 1, DIM)
    sequence.pin(released, released + C).release()


def test_rows_that_only_read_see_what_they_saw(text: Text, expected: np.ndarray[Any, Any]) -> None:
    sequence = grown(make(), text)
    for positions in ([LENGTH - 1], [sequence.earliest_trim - 1, LENGTH - 2]):
        outputs = read(sequence, text, positions)
        assert outputs.tobytes() == expected[:, positions].tobytes()


@pytest.mark.parametrize("window", [None, WINDOW + 1])
def test_a_layer_that_looks_further_back_than_the_pager_is_refused(
    text: Text, window: int | None
) -> None:
    pager = make()
    sequence = pager.sequence()
    with pager.begin([sequence] * M, range(M), text.tokens[:M], [0] * M) as forward:
        q, k, v = text.rows(0, list(range(M)))
        with pytest.raises(
            InvalidArgumentError, match=f"window: {window or 0} of layer 0.*1 to 40"
        ):
            forward.attend(0, q, k, v, scaling=0.25, window=window)
        for layer in range(LAYERS):  # the forward can go on
            forward.attend(layer, q, k, v, scaling=0.25, window=WINDOW)
        forward.commit()
    assert sequence.length == M


def test_without_a_window_nothing_is_let_go(text: Text) -> None:
    pager = make(window=0)
    sequence = grown(pager, text)
    assert (sequence.released, sequence.earliest_trim) == (0, 0)
    assert pager.stats()["chunks_released"] == 0
    sequence.trim(3)


@pytest.mark.parametrize("window", [-1, 2**40 + 1])
def test_a_window_out_of_range_is_refused(window: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"window: {window}, expected 0 to"):
        make(window=window)


# --- Trims


@pytest.mark.parametrize("rewind", [0, 50])
def test_trims_go_back_as_far_as_promised_and_the_rest_can_be_written_anew(
    text: Text, expected: np.ndarray[Any, Any], rewind: int
) -> None:
    other = Text(seed=1)
    other.tokens[:LENGTH] = text.tokens
    for position in range(LENGTH - max(rewind, C), LENGTH + 1, 5):
        pager = make(rewind=rewind, pool=30)
        sequence = grown(pager, text)
        sequence.trim(position)
        pager.check_invariants()
        assert sequence.length == position
        assert read(sequence, text, [position - 1]).tobytes() == (
            expected[:, [position - 1]].tobytes()
        )
        assert grow(sequence, text, LENGTH).tobytes() == expected[:, position:].tobytes()


@pytest.mark.parametrize("share", ["pool", "disk"])
def test_a_trim_behind_the_horizon_is_refused_and_changes_nothing(
    text: Text, share: str, tmp_path: Path
) -> None:
    disk = {"disk_bytes": 32 * CHUNK, "disk_path": str(tmp_path)} if share == "disk" else {}
    pager = make(pool=4, host=2 if disk else 8, **disk)
    sequence = grown(pager, text)
    before = state(sequence)
    earliest, released = sequence.earliest_trim, sequence.released
    for position in (1, C, released - 1, released, released + 1, earliest - 1):
        with pytest.raises(
            InvalidArgumentError,
            match=rf"trim position: {position} .*positions \[0, {released}\) were let go behind "
            rf"the window of {WINDOW} tokens.*expected 0 or {earliest} to {LENGTH}",
        ):
            sequence.trim(position)
        assert state(sequence) == before
    sequence.trim(earliest)
    assert sequence.length == earliest


def test_a_trim_to_nothing_is_always_granted(text: Text, expected: np.ndarray[Any, Any]) -> None:
    pager = make()
    sequence = grown(pager, text)
    sequence.trim(0)
    pager.check_invariants()
    assert (sequence.length, sequence.released, sequence.earliest_trim) == (0, 0, 0)
    assert sequence.ledger() == []
    assert grow(sequence, text, LENGTH).tobytes() == expected.tobytes()


def test_trims_that_follow_each_other_do_not_reach_further_back(text: Text) -> None:
    sequence = grown(make(rewind=40, pool=30), text)
    earliest = sequence.earliest_trim
    sequence.trim(LENGTH - 20)
    sequence.trim(earliest)
    assert sequence.earliest_trim == earliest
    with pytest.raises(InvalidArgumentError, match="expected 0 or"):
        sequence.trim(earliest - 1)


# --- Sharing


def test_a_fork_keeps_what_it_needs_when_its_parent_goes_on(
    text: Text, expected: np.ndarray[Any, Any]
) -> None:
    pager = make(pool=4, host=2 * MOST + 4)
    parent = pager.sequence()
    grow(parent, text, 6 * C + 3)
    child = parent.fork()
    held = kv(child)
    assert child.released == parent.released > 0
    grow(parent, text, LENGTH)
    assert parent.released > child.released
    assert kv(child) == held
    outputs = grow(child, text, LENGTH, 9)
    assert outputs.tobytes() == expected[:, 6 * C + 3 :].tobytes()
    assert child.released == parent.released


def test_a_fork_of_which_nothing_was_let_go_still_reads_all(text: Text) -> None:
    pager = make(pool=4)
    parent = pager.sequence()
    grow(parent, text, 3 * C)
    child = parent.fork()
    grow(parent, text, LENGTH)
    assert child.released == 0
    assert child.read_kv(0, 0, 3 * C)[0].shape[0] == 3 * C
    parent.close()
    child.trim(1)


def test_pinned_chunks_stay_until_they_are_unpinned(text: Text) -> None:
    pager = make(pool=12)
    sequence = grown(pager, text, 5 * C)
    start = sequence.released
    pin = sequence.pin(start, start + 1)
    grow(sequence, text, 12 * C)
    assert sequence.released == start
    assert sequence.ledger()[start // C].resident
    pin.release()
    pager.check_invariants()
    assert sequence.released == released_at(12 * C)


def test_a_save_in_flight_keeps_its_chunks_and_their_bytes(
    text: Text, whole: list[np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    pager = make(pool=4, host=16)
    sequence = grown(pager, text, 8 * C + 2)
    start, stop = sequence.released, sequence.length
    content = sequence.freeze()
    session = sequence.session_text({"n": 1}, content)
    grow(sequence, text, LENGTH)
    sequence.close()
    pager.check_invariants()
    DirectoryStore(tmp_path / "store").save(
        "turn", content, fingerprint=pager.fingerprint_json, session=session
    )
    del content
    pager.check_invariants()
    assert pager.stats()["records"] == pager.stats()["cached_records"]
    restored = make().restore(SnapshotInfo.of(DirectoryStore(tmp_path / "store").open("turn")))
    assert (restored.released, restored.length) == (start, stop)
    assert kv(restored) == tail_of(whole, start, stop)


# --- Prefixes


def test_a_prefix_whose_beginning_is_forgotten_is_adopted(
    text: Text, expected: np.ndarray[Any, Any]
) -> None:
    pager = make(pool=4, host=MOST + 2)
    grown(pager, text).close()
    assert pager.stats()["chunks_forgotten"] > 0
    sequence = pager.sequence()
    adopted = sequence.adopt_prefix(text.tokens)
    pager.check_invariants()
    assert adopted == LENGTH // C * C
    assert sequence.released == released_at(adopted)
    assert sequence.tokens.tolist() == text.tokens[:adopted].tolist()
    assert read(sequence, text, [adopted - 1]).tobytes() == expected[:, [adopted - 1]].tobytes()
    outputs = grow(sequence, text, LENGTH)
    assert outputs.tobytes() == expected[:, adopted:].tobytes()


def test_a_prefix_is_adopted_no_further_than_its_window_is_there(text: Text) -> None:
    pager = make(pool=4, host=64)
    grown(pager, text, 10 * C).close()
    other = text.tokens.copy()
    other[3 * C] += 1  # from here on it is another text
    for tokens, most in ((text.tokens[: 7 * C + 9], 7 * C), (other, 3 * C), (other[:5], 0)):
        sequence = pager.sequence()
        assert sequence.adopt_prefix(tokens) == most
        assert sequence.released == released_at(most)
        assert sequence.length == most
        sequence.close()
    lacking = make(pool=4, host=MOST + 1)
    grown(lacking, text).close()
    sequence = lacking.sequence()
    assert sequence.adopt_prefix(text.tokens[: 10 * C]) == 0  # all of it is forgotten
    assert sequence.released == 0
    lacking.check_invariants()


# --- Admission


def test_a_text_much_longer_than_all_tiers_runs_in_a_bounded_budget(tmp_path: Path) -> None:
    long = Text(seed=5, length=60 * C)
    for pool, host, disk in ((3, MOST, 0), (3, 2, MOST - 2), (2 + MOST, 0, 0)):
        options = {"disk_bytes": disk * CHUNK, "disk_path": str(tmp_path)} if disk else {}
        pager = make(pool=pool, host=host, **options)
        sequence = pager.sequence()
        sequence.reserve(60 * C)
        assert pager.stats()["reserved_chunks"] == MOST
        grow(sequence, long, 60 * C)
        assert pager.stats()["home_chunks"] == MOST
        assert sequence.released == released_at(60 * C)
        with pytest.raises(CapacityError, match="reserve: 60 more chunks"):
            make(window=0, pool=pool, host=host, **options).sequence().reserve(60 * C)


def test_a_promise_is_kept_chunk_by_chunk_beside_others(text: Text) -> None:
    pager = make(pool=5, host=2 * MOST)
    a, b = pager.sequence(), pager.sequence()
    a.reserve(LENGTH)
    b.reserve(LENGTH)
    with pytest.raises(CapacityError, match="reserve: 1 more"):
        pager.sequence().reserve(C)
    others = Text(seed=9)
    for stop in range(C, LENGTH, 11):
        grow(a, text, stop)
        grow(b, others, stop, 3)
        if stop + MOST * C < LENGTH:  # all of the room is still promised
            with pytest.raises(CapacityError, match="reserve: 1 more"):
                pager.sequence().reserve(C)
    assert pager.stats()["reserved_chunks"] <= 2 * MOST
    a.reserve(a.length)
    b.reserve(b.length)
    assert pager.stats()["reserved_chunks"] == 0


def test_a_fork_is_refused_where_its_parents_promise_could_not_be_kept(text: Text) -> None:
    pager = make(pool=6, host=MOST)
    parent = pager.sequence()
    parent.reserve(LENGTH)
    grow(parent, text, 8 * C)
    before = state(parent)
    with pytest.raises(CapacityError, match="fork: "):
        parent.fork()
    pager.check_invariants()
    after = state(parent)
    assert after == before
    grow(parent, text, LENGTH)
    roomy = make(pool=6, host=2 * MOST)
    parent = roomy.sequence()
    parent.reserve(LENGTH)
    grow(parent, text, 8 * C)
    child = parent.fork()
    grow(parent, text, LENGTH)
    assert child.released == released_at(8 * C)


def test_an_append_that_fails_leaves_the_sequence_as_it_was_or_at_what_was_added(
    text: Text,
) -> None:
    k, v = text.qkv[:, :, HEADS : HEADS + 1].copy(), text.qkv[:, :, HEADS + 1 :].copy()
    k[:, 12 * C + 3] = np.nan
    pager = make(pool=8)
    sequence = pager.sequence()
    with pytest.raises(NonFiniteError, match=f"position {12 * C + 3}"):
        sequence.append(text.tokens, k, v, provenance="exact")
    assert sequence.length == 0
    sequence.append(text.tokens[: 9 * C], k[:, : 9 * C], v[:, : 9 * C], provenance="exact")
    with pytest.raises(NonFiniteError):  # a trim by three chunks: more than is kept for it
        sequence.append(text.tokens[9 * C :], k[:, 9 * C :], v[:, 9 * C :], provenance="exact")
    pager.check_invariants()
    assert sequence.length in (9 * C, 12 * C)
    assert sequence.tokens.tolist() == text.tokens[: sequence.length].tolist()
    assert pager.stats()["reserved_chunks"] == 0


# --- Snapshots


@pytest.fixture
def saved(text: Text, tmp_path: Path) -> Path:
    grown(make(), text, 12 * C + 7, salt="tenant").save(tmp_path / "turn", session={"n": 1})
    return tmp_path / "turn"


@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_snapshot_has_what_was_held_and_the_ids_of_the_rest(
    text: Text,
    expected: np.ndarray[Any, Any],
    whole: list[np.ndarray[Any, Any]],
    tmp_path: Path,
    kind: str,
) -> None:
    stop = 12 * C + 7
    pager = make()
    sequence = grown(pager, text, stop)
    released = sequence.released
    if kind == "file":
        sequence.save(tmp_path / "turn", session={"n": 1})
        info = open_snapshot(tmp_path / "turn")
    else:
        store, content = DirectoryStore(tmp_path / "store"), sequence.freeze()
        store.save(
            "turn",
            content,
            fingerprint=pager.fingerprint_json,
            session=sequence.session_text({"n": 1}, content),
        )
        info = SnapshotInfo.of(store.open("turn"))
    assert info.tokens.tolist() == text.tokens[:stop].tolist()
    assert info.tokens.dtype == info.released_tokens.dtype == np.int32
    assert info.released_tokens.tolist() == text.tokens[:released].tolist()
    assert len(info.reader.tokens) == stop - released
    assert info.session["n"] == 1
    other = make(pool=4, host=8)
    restored = other.restore(info)
    other.check_invariants()
    assert (restored.length, restored.released) == (stop, released)
    assert restored.earliest_trim == sequence.earliest_trim
    assert restored.tokens.tolist() == text.tokens[:stop].tolist()
    assert kv(restored) == tail_of(whole, released, stop)
    hashes = [[info.chain_hash for info in s.ledger()] for s in (restored, sequence)]
    assert hashes[0] == hashes[1]
    outputs = grow(restored, text, LENGTH)
    assert outputs.tobytes() == expected[:, stop:].tobytes()
    assert restored.released == released_at(LENGTH)


def test_what_was_released_stays_proven_over_many_saves(
    text: Text, expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    path, length = tmp_path / "turn", 0
    for stop in range(5 * C + 1, LENGTH, 4 * C - 3):
        pager = make(pool=5, host=16)
        sequence = pager.restore(open_snapshot(path)) if length else pager.sequence()
        assert grow(sequence, text, stop).tobytes() == expected[:, length:stop].tobytes()
        sequence.save(path)
        length = stop


def test_a_file_that_has_all_can_be_restored_by_a_windowed_pager(
    text: Text, expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    stop = 12 * C + 7
    grown(make(window=0), text, stop).save(tmp_path / "turn")
    info = open_snapshot(tmp_path / "turn")
    assert info.released is None
    assert info.released_tokens.tolist() == []
    pager = make(pool=4, host=8)
    sequence = pager.restore(info)
    assert sequence.released == 0
    sequence.trim(10 * C + 1)  # there is no horizon yet
    grow(sequence, text, LENGTH)
    assert sequence.released == released_at(LENGTH)
    sequence.close()
    restored = pager.restore(info, upto=6 * C + 1)
    outputs = grow(restored, text, LENGTH)
    assert outputs.tobytes() == expected[:, 6 * C + 1 :].tobytes()


def test_parts_of_a_snapshot_are_counted_by_the_whole_text(
    text: Text, whole: list[np.ndarray[Any, Any]], saved: Path
) -> None:
    info = open_snapshot(saved)
    released, stop = len(info.released_tokens), 12 * C + 7
    earliest = released + WINDOW
    pager = make(host=30)
    for upto in (earliest, earliest + 1, stop - 7, stop - 1, stop):
        part = pager.restore(info, upto=upto, salt="tenant")
        assert (part.length, part.released) == (upto, released)
        assert kv(part) == tail_of(whole, released, upto)
        part.close()
    assert pager.restore(info, upto=0, salt="tenant").released == 0
    for upto in (1, released, earliest - 1):
        with pytest.raises(
            InvalidArgumentError, match=f"upto: {upto}, expected 0 or {earliest} to {stop}"
        ):
            pager.restore(info, upto=upto, salt="tenant")
    with pytest.raises(InvalidArgumentError, match=f"upto is {stop + 1}"):
        pager.restore(info, upto=stop + 1, salt="tenant")
    pager.check_invariants()


def test_a_part_behind_the_horizon_cannot_be_frozen(text: Text) -> None:
    sequence = grown(make(), text)
    earliest = sequence.earliest_trim
    with pytest.raises(InvalidArgumentError, match=f"upto: {earliest - 1} .*expected {earliest}"):
        sequence.freeze(earliest - 1)
    assert len(sequence.freeze(earliest).tokens) == WINDOW


@pytest.mark.parametrize("window", [0, WINDOW + 1, 4 * WINDOW])
def test_a_pager_that_would_look_behind_what_is_saved_refuses_the_window(
    saved: Path, window: int
) -> None:
    pager = make(window=window)
    with pytest.raises(FingerprintMismatchError, match=f"window of {WINDOW} tokens") as caught:
        pager.restore(open_snapshot(saved), salt="tenant")
    assert caught.value.field == "window"
    assert pager.stats()["sequences"] == 0
    pager.check_invariants()


def test_a_pager_of_a_smaller_window_restores_what_a_larger_one_saved(
    text: Text, whole: list[np.ndarray[Any, Any]], saved: Path
) -> None:
    sequence = make(window=24).restore(open_snapshot(saved), salt="tenant")
    assert sequence.earliest_trim == sequence.released + 24
    assert kv(sequence) == tail_of(whole, sequence.released, 12 * C + 7)


def test_chunks_that_were_not_exact_are_proven_as_what_they_were(
    text: Text, tmp_path: Path
) -> None:
    pager = make(pool=8, host=30)
    sequence = pager.sequence()
    grow(sequence, text, 3 * C)
    k, v = text.qkv[:, :, HEADS : HEADS + 1], text.qkv[:, :, HEADS + 1 :]
    rest = slice(3 * C, LENGTH)
    sequence.append(text.tokens[rest], k[:, rest], v[:, rest], provenance="decode")
    gone = sequence.released // C
    kinds = ["exact"] * 3 + ["decode"] * (LENGTH // C + 1 - 3)
    assert gone > 4
    assert [info.provenance for info in sequence.ledger()] == kinds
    sequence.save(tmp_path / "turn")
    info = open_snapshot(tmp_path / "turn")
    assert info.released is not None
    assert info.released.provenance == (3, gone - 3, 0)
    other = make(pool=8, host=30)
    restored = other.restore(info)
    assert [info.provenance for info in restored.ledger()] == kinds
    assert kv(restored) == kv(sequence)
    worse = other.restore(info, provenance="approximate")
    assert {info.provenance for info in worse.ledger()} == {"approximate"}
    worse.trim(worse.earliest_trim)
    assert worse.ledger()[-1].provenance == "approximate"
    other.check_invariants()
    sequence.trim(sequence.earliest_trim)
    assert sequence.ledger()[-1].provenance == "decode"
    sequence.trim(0)
    grow(sequence, text, C + 1)
    assert sequence.ledger()[-1].provenance == "exact"


def with_session(saved: Path, **values: object) -> SnapshotInfo:
    """The same snapshot with other words in its session section."""
    info = open_snapshot(saved)
    session = {**info.session, **values}
    text = json.dumps({key: value for key, value in session.items() if value is not ...})
    out = saved.with_name("forged")
    from kvpager import _core

    writer = _core.SnapshotWriter(str(out), info.reader.layout)
    chunks = np.arange(info.reader.chunks)
    writer.write_content(info.reader, chunks, info.reader.fingerprint, text)
    writer.publish()
    writer.discard()
    return open_snapshot(out)


def ids(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"released_tokens": 7}, "released_tokens is int"),
        ({"released_tokens": None}, "released_tokens is NoneType"),
        ({"released_tokens": ...}, "released_tokens is NoneType"),
        ({"released_tokens": "no*base64"}, "released_tokens is not base64"),
        ({"released_tokens": "é"}, "released_tokens is not base64"),
        ({"released_tokens": ""}, "has 0 bytes"),
        ({"released_tokens": ids([1] * (C - 1))}, "has 60 bytes"),
        ({"released_tokens": ids([1] * C)[:-4]}, "has 63 bytes|not base64"),
        ({"released_tokens": ids([-1] + [1] * (8 * C - 1))}, "has the id -1"),
        ({"released_provenance": ...}, "released_provenance is None"),
        ({"released_provenance": [8, 0]}, "released_provenance is"),
        ({"released_provenance": [9, 0, 0]}, "expected three counts"),
        ({"released_provenance": [9, -1, 0]}, "expected three counts"),
        ({"released_provenance": [8.0, 0, 0]}, "expected three counts"),
        ({"released_provenance": [True] * 8}, "expected three counts"),
        ({"released_window": ...}, "released_window is None"),
        ({"released_window": 0}, "released_window is 0"),
        ({"released_window": True}, "released_window is True"),
        ({"released_window": 2**80}, "released_window is 1208925819614629174706176"),
        ({"released_window": "40"}, "released_window is '40'"),
    ],
)
def test_a_malformed_field_is_damage_and_named(
    saved: Path, values: dict[str, object], said: str
) -> None:
    with pytest.raises(CorruptSnapshotError, match=said):
        with_session(saved, **values)


def test_forged_tokens_are_not_those_that_the_chain_proves(text: Text, saved: Path) -> None:
    released = len(open_snapshot(saved).released_tokens)
    pager = make()
    true = text.tokens[:released].tolist()
    for forged, counts in (
        ([true[0] + 1, *true[1:]], [released // C, 0, 0]),
        ([*true[:-1], true[-1] + 1], [released // C, 0, 0]),
        (true[C:], [released // C - 1, 0, 0]),
        ([*true, *true[:C]], [released // C + 1, 0, 0]),
        (true, [released // C - 1, 1, 0]),
    ):
        info = with_session(saved, released_tokens=ids(forged), released_provenance=counts)
        with pytest.raises(FingerprintMismatchError, match="salt: chunk 0") as caught:
            pager.restore(info, salt="tenant")
        assert caught.value.field == "salt"
        assert pager.stats()["records"] == 0
        pager.check_invariants()
    assert pager.restore(with_session(saved), salt="tenant").length == 12 * C + 7
    # Who leaves all of it out, or takes too little for the window, gets no sequence either.
    none = {"released_tokens": ..., "released_provenance": ..., "released_window": ...}
    with pytest.raises(FingerprintMismatchError, match="salt: chunk 0"):
        pager.restore(with_session(saved, **none), salt="tenant")
    with pytest.raises(FingerprintMismatchError, match=r"window: .* holds"):
        make(window=5 * C).restore(with_session(saved, released_window=999), salt="tenant")


def test_damage_is_told_by_its_place_in_the_text(text: Text, saved: Path) -> None:
    info = open_snapshot(saved)
    released = len(info.released_tokens)
    with saved.open("r+b") as file:  # the second chunk of the payload
        file.seek(4096 + CHUNK + 5)
        byte = file.read(1)
        file.seek(4096 + CHUNK + 5)
        file.write(bytes([byte[0] ^ 1]))
    pager = make()
    sequence = pager.restore(open_snapshot(saved), salt="tenant")
    with pytest.raises(CorruptSnapshotError, match="of the file is chunk") as caught:
        sequence.read_kv(0, released, sequence.length)
    error: Any = caught.value
    assert error.chunk == released // C + 1
    assert (error.start, error.stop) == (released + C, released + 2 * C)
    damaged = [info.chunk for info in sequence.ledger() if info.damaged]
    assert damaged == [error.chunk]
    content = sequence.freeze()
    with pytest.raises(CorruptSnapshotError) as caught:
        content_bytes(content, saved.with_name("copy"))
    found: Any = caught.value
    assert (found.chunk, found.start, found.stop) == (error.chunk, error.start, error.stop)


def content_bytes(content: Any, path: Path) -> None:
    from kvpager import _core

    writer = _core.SnapshotWriter(str(path), content.layout)
    try:
        writer.write_content(content, np.arange(content.chunks), "{}", "{}")
    finally:
        writer.discard()


def test_a_snapshot_whose_window_fits_in_its_tail_goes_round(tmp_path: Path) -> None:
    """No sealed chunk is left then, and no chain hash in the file."""
    from kvpager import Layout, PagerConfig

    layout = Layout(1, 1, 16, 16, chunk_tokens=64)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 100, 64 * 3 + 60)
    k, v = random.standard_normal((2, 1, len(tokens), 1, 16), dtype=np.float32)

    def pager() -> Pager:
        config = PagerConfig(64 * 8, chunk_tokens=64, rewind_tokens=0)
        return Pager(layout, config, rows=16, window=8, fingerprint={}, threads=1)

    sequence = pager().sequence()
    sequence.append(tokens, k, v)
    while sequence.released < 64 * 2:
        sequence.append(tokens[:1], k[:, :1], v[:, :1])
    sequence.trim(sequence.earliest_trim)
    sequence.save(tmp_path / "turn")
    restored = pager().restore(open_snapshot(tmp_path / "turn"))
    assert restored.tokens.tolist() == sequence.tokens.tolist()
    assert restored.released == sequence.released
