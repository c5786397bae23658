"""Damaged snapshots: named where they are needed, or computed again with the same bits."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from bits import assert_same_session
from damage import damage_chunk, damage_summary, flip, packs, sections
from reference_models import CHUNK, build, make_engine, prompt

import kvpager
from kvpager import CorruptSnapshotError, InvalidArgumentError, TopK
from kvpager._runtime.scheduling.recompute import recomputing_damage
from kvpager.stores import DirectoryStore, SaveReport

LENGTH = 100  # six sealed chunks, and a tail of four tokens
TAIL = 6
TOP_K = TopK(chunks=2, sinks=0, recent=32)


@pytest.fixture(scope="module")
def model():
    return build("llama")


def write(model, path, ids, **options):
    with make_engine(model, **options) as engine, engine.session() as session:
        session.prefill(ids)
        next(session.generate(1, eos=None, stream="tokens"))
        session.save(path)


@pytest.fixture(scope="module")
def originals(model, tmp_path_factory):
    """Files of the same session, with dense attention and with selection."""
    folder = tmp_path_factory.mktemp("snapshots")
    write(model, folder / "dense", prompt(LENGTH))
    write(model, folder / "topk", prompt(LENGTH), selection=TOP_K)
    return folder


@pytest.fixture
def copy(originals, tmp_path):
    def copy(name="dense", to="turn"):
        (tmp_path / to).write_bytes((originals / name).read_bytes())
        return tmp_path / to

    return copy


@pytest.fixture
def sound(model, originals, closing):
    """An undamaged restore, in an engine of its own: chunks would be shared in one."""

    def sound(name="dense", **options):
        return closing(make_engine(model, **options)).restore(originals / name)

    return sound


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


LONGER = prompt(20, seed=1)


def go_on(session):
    """A turn: what the session held is read, new tokens are computed, others are decoded."""
    session.append(LONGER)
    return session.generate(4, eos=None).tokens.tolist()


def test_the_first_use_of_a_damaged_chunk_names_chunk_tokens_and_layer(copy, engine):
    path = copy()
    again = engine.restore(path)
    other = engine.session()
    other.prefill(prompt(40, seed=7))
    damage_chunk(path, engine, 3, layer=1)
    tokens, forwards = again.tokens.tolist(), engine.core.runner.forwards
    for _ in range(2):
        with pytest.raises(CorruptSnapshotError, match=r'tokens \[48, 64\).*"recompute"') as found:
            again.append(LONGER)
        error = found.value
        assert (error.chunk, error.layer, error.start, error.stop) == (3, 1, 48, 64)
    assert engine.core.runner.forwards == forwards
    assert again.tokens.tolist() == tokens
    assert again.recomputed_tokens == 0
    assert [info.chunk for info in again.ledger() if info.damaged] == [3]
    engine.pager.check_invariants()
    other.append(prompt(20, seed=8))  # nobody else is touched
    again.sequence.read_kv(2, 64, again.committed)  # nor are other chunks
    again.trim(48)
    again.append(prompt(LENGTH)[48:])
    cold = engine.session()
    cold.prefill(prompt(LENGTH))
    assert_same_session(again, cold, "what did not need the chunk")


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "chunks", [[0], [3], [5], [0, 1, 2, 3, 4, 5], [1, 4], [TAIL], [0, 3, TAIL]], ids=str
)
def test_recomputed_chunks_have_the_bits_that_were_saved(
    model, copy, sound, closing, caplog, chunks, layer
):
    path, expected = copy(), sound()
    engine = closing(make_engine(model))
    for chunk in chunks:
        damage_chunk(path, engine, chunk, layer)
    again = engine.restore(path, on_corrupt="recompute")
    assert (again.restored_tokens, again.restored_tokens_consumed) == (LENGTH, 0)
    assert again.pending == expected.pending
    with caplog.at_level(logging.WARNING, "kvpager"):
        assert go_on(again) == go_on(expected)
    assert_same_session(again, expected, f"chunks {chunks}")
    assert again.restored_tokens_consumed == LENGTH
    sealed = [chunk for chunk in chunks if chunk != TAIL]
    assert again.recomputed_tokens == CHUNK * len(sealed) + (LENGTH % CHUNK) * (TAIL in chunks)
    for chunk in sealed:
        if TAIL not in chunks:
            assert f"tokens [{chunk * CHUNK}, {chunk * CHUNK + CHUNK}) were computed again" in (
                caplog.text
            )
    assert not any(info.damaged for info in again.ledger())
    engine.pager.check_invariants()


def test_a_damaged_tail_is_computed_again_inside_restore(copy, engine, sound, caplog):
    path = copy()
    damage_chunk(path, engine, TAIL)
    with pytest.raises(CorruptSnapshotError, match=r"tokens \[96, 100\)") as found:
        engine.restore(path)
    assert (found.value.chunk, found.value.start, found.value.stop) == (TAIL, 96, LENGTH)
    assert engine.stats()["sequences"] == 0
    with caplog.at_level(logging.WARNING, "kvpager"):
        again = engine.restore(path, on_corrupt="recompute")
    assert "tokens [96, 100) were computed again" in caplog.text
    assert again.recomputed_tokens == 4
    assert again.restored_tokens_consumed == 0
    with pytest.raises(kvpager.RestoreNotConsumedError):
        again.prefill(prompt(50))
    assert_same_session(again, sound(), "tail")


def test_a_snapshot_that_is_only_a_damaged_tail_is_computed_again(model, tmp_path, closing):
    write(model, tmp_path / "short", prompt(9))
    expected = closing(make_engine(model)).restore(tmp_path / "short")
    expected_tokens = expected.tokens.tolist()
    assert_continues = go_on(expected)
    engine = closing(make_engine(model))
    damage_chunk(tmp_path / "short", engine, 0)
    again = engine.restore(tmp_path / "short", on_corrupt="recompute")
    assert again.tokens.tolist() == expected_tokens
    assert again.recomputed_tokens == 9
    assert go_on(again) == assert_continues
    assert_same_session(again, expected, "tail only")


def test_damage_found_in_the_middle_of_decoding_is_repaired_there(
    model, copy, sound, closing, tmp_path, originals
):
    """With selection, a chunk is read when some row chooses it; without a host tier, each time."""
    path, expected = copy("topk"), sound("topk", selection=TOP_K)
    engine = closing(make_engine(model, selection=TOP_K, host_bytes=0, pool_tokens=256))
    again = engine.restore(path, on_corrupt="recompute")
    stream, other = (
        again.generate(24, eos=None, stream="tokens"),
        expected.generate(24, eos=None, stream="tokens"),
    )
    assert next(stream) == next(other)
    for chunk in range(6):
        damage_chunk(path, engine, chunk, layer=chunk % 3)
    engine.pager.evict_all()
    assert next(stream) == next(other)
    early = again.recomputed_tokens
    assert early > 0
    assert list(stream) == list(other)
    again.save(tmp_path / "whole")  # reads what no row has chosen
    assert again.recomputed_tokens == 6 * CHUNK
    assert_same_session(again, expected, "decoding")


@pytest.mark.parametrize("payload", [False, True])
def test_damaged_summaries_are_made_again_from_their_chunks(model, copy, sound, closing, payload):
    path, expected = copy("topk"), sound("topk", selection=TOP_K)
    engine = closing(make_engine(model, selection=TOP_K))
    for chunk in (0, 4):
        damage_summary(path, engine, chunk)
        if payload:
            damage_chunk(path, engine, chunk)
    again = engine.restore(path, on_corrupt="recompute")
    assert go_on(again) == go_on(expected)
    assert again.recomputed_tokens == 2 * CHUNK * payload
    assert_same_session(again, expected, "summaries")


def test_a_damaged_summary_alone_needs_no_permission(model, copy, sound, closing):
    path, expected = copy("topk"), sound("topk", selection=TOP_K)
    engine = closing(make_engine(model, selection=TOP_K))
    damage_summary(path, engine, 2)
    assert go_on(engine.restore(path)) == go_on(expected)


def test_chunks_beyond_the_end_of_a_file_that_was_truncated_meanwhile_are_damaged_chunks(
    model, copy, sound, closing
):
    path, expected = copy(), sound()
    engine = closing(make_engine(model))
    again, other = engine.restore(path, on_corrupt="recompute"), engine.restore(path)
    os.truncate(path, 4096 + 2 * engine.layout.chunk_bytes + 100)
    with pytest.raises(CorruptSnapshotError) as found:
        other.append(LONGER)
    assert found.value.chunk == 2
    assert go_on(again) == go_on(expected)
    assert again.recomputed_tokens == 4 * CHUNK
    assert_same_session(again, expected, "truncated")


def test_a_file_overwritten_meanwhile_is_damage_too(model, copy, sound, closing):
    path, expected = copy(), sound()
    again = closing(make_engine(model)).restore(path, on_corrupt="recompute")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert go_on(again) == go_on(expected)
    assert again.recomputed_tokens == 6 * CHUNK
    assert_same_session(again, expected, "overwritten")


@pytest.mark.parametrize("section", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("on_corrupt", ["fail", "recompute"])
def test_damaged_metadata_fail_always(copy, engine, section, on_corrupt):
    path = copy()
    flip(path, sections(path)[section][0] + 1)
    with pytest.raises(CorruptSnapshotError) as found:
        engine.restore(path, on_corrupt=on_corrupt)
    assert found.value.chunk is None
    assert engine.stats()["sequences"] == 0


def test_a_truncated_file_fails_at_restore(copy, engine):
    path = copy()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptSnapshotError, match="turn"):
        engine.restore(path, on_corrupt="recompute")


@pytest.mark.parametrize("chunk", [2, TAIL])
def test_an_approximate_restore_is_not_recomputed_and_says_why(
    model, copy, closing, monkeypatch, chunk
):
    path = copy()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    engine = closing(make_engine(model))
    damage_chunk(path, engine, chunk)
    with pytest.raises(CorruptSnapshotError, match=r'tokens.*cannot help.*"approximate"') as found:
        engine.restore(path, on_mismatch="approximate", on_corrupt="recompute").append(LONGER)
    assert (found.value.chunk, found.value.start) == (chunk, chunk * CHUNK)
    engine.pager.check_invariants()


def test_chunks_that_were_computed_elsewhere_are_not_recomputed(model, tmp_path, closing):
    engine, path = closing(make_engine(model)), tmp_path / "turn"
    layout = engine.layout
    sequence = engine.pager.sequence()
    k, v = torch.randn(2, layout.layers, 40, layout.kv_heads, layout.k_dim).unbind(0)
    sequence.append(prompt(40), k, v, provenance="decode")
    sequence.save(path)
    sequence.close()
    damage_chunk(path, engine, 1)
    again = engine.restore(path, on_corrupt="recompute")
    with pytest.raises(CorruptSnapshotError, match=r'cannot help.*"decode"'):
        again.append(LONGER)
    assert again.recomputed_tokens == 0


@pytest.mark.parametrize(("length", "chunk"), [(40, 1), (40, 2), (9, 0)])
def test_computed_bits_that_are_not_the_saved_ones_are_refused(
    model, tmp_path, closing, length, chunk
):
    """K/V that somebody called exact and that are not: the checksums know."""
    engine, path = closing(make_engine(model)), tmp_path / "turn"
    layout = engine.layout
    sequence = engine.pager.sequence()
    k, v = torch.randn(2, layout.layers, length, layout.kv_heads, layout.k_dim).unbind(0)
    sequence.append(prompt(length), k, v, provenance="exact")
    sequence.save(path)
    damage_chunk(path, engine, chunk)
    fresh = closing(make_engine(model))
    with pytest.raises(CorruptSnapshotError, match=r"tokens.*not what was saved") as found:
        fresh.restore(path, on_corrupt="recompute").append(LONGER)
    assert found.value.chunk == chunk
    fresh.pager.check_invariants()


def test_only_the_damaged_sessions_of_a_packed_forward_are_repaired(model, tmp_path, closing):
    def sessions(engine, **options):
        restored = [engine.restore(tmp_path / f"{i}", **options) for i in range(3)]
        cold = engine.session()
        cold.prefill(prompt(50, seed=40))
        return [*restored, cold]

    def turn(engine, sessions):
        engine.prefill_many(
            (session, np.concatenate([session.tokens, prompt(10 + i, seed=50 + i)]))
            for i, session in enumerate(sessions)
        )
        return [token for _, token in engine.generate_many(sessions, 6, eos=None)]

    for i in range(3):
        write(model, tmp_path / f"{i}", prompt(70 + 7 * i, seed=i))
    wide = {"pool_tokens": 512}
    expected_engine = closing(make_engine(model, **wide))
    expected = sessions(expected_engine)
    tokens = turn(expected_engine, expected)
    engine = closing(make_engine(model, **wide))
    damage_chunk(tmp_path / "0", engine, 2)
    damage_chunk(tmp_path / "2", engine, 0)
    damage_chunk(tmp_path / "2", engine, 3, layer=2)
    again = sessions(engine, on_corrupt="recompute")
    assert turn(engine, again) == tokens
    assert [session.recomputed_tokens for session in again] == [CHUNK, 0, 2 * CHUNK, 0]
    for i, (a, b) in enumerate(zip(again, expected)):
        assert_same_session(a, b, f"session {i}")
    engine.pager.check_invariants()


def test_a_session_that_must_fail_does_so_beside_one_that_is_repaired(model, tmp_path, closing):
    for i in range(2):
        write(model, tmp_path / f"{i}", prompt(70, seed=i))
    engine = closing(make_engine(model, pool_tokens=512))
    for i in range(2):
        damage_chunk(tmp_path / f"{i}", engine, 1)
    failing = engine.restore(tmp_path / "0")
    repaired = engine.restore(tmp_path / "1", on_corrupt="recompute")
    with pytest.raises(CorruptSnapshotError, match=r"tokens \[16, 32\)"):
        list(engine.generate_many([failing, repaired], 3, eos=None))
    assert failing.recomputed_tokens == 0
    assert (failing.length, repaired.length) == (71, 71)
    failing.close()
    repaired.generate(3, eos=None).tokens.tolist()
    assert repaired.recomputed_tokens == CHUNK


def test_a_session_that_restored_nothing_does_not_fail_for_anothers_file(model, copy, closing):
    path = copy()
    engine = closing(make_engine(model))
    restored = engine.restore(path)
    damage_chunk(path, engine, 2)
    cold = engine.session()
    cold.prefill(prompt(120))  # shares the restored session's chunks
    assert engine.stats()["prefix_tokens_reused"]
    whole = closing(make_engine(model)).session()
    whole.prefill(prompt(120))
    assert_same_session(cold, whole, "cold")
    assert cold.recomputed_tokens == CHUNK
    restored.append(LONGER)  # it is healed for all
    assert not restored.recomputed_tokens


def outcome(saved):
    return saved if isinstance(saved, SaveReport) else saved.result()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_save_repairs_what_it_copies(model, copy, originals, closing, tmp_path, wait, layer):
    path = copy()
    engine = closing(make_engine(model))
    for chunk in (1, 5):
        damage_chunk(path, engine, chunk, layer)
    failing = engine.restore(path)
    with pytest.raises(CorruptSnapshotError, match=r"tokens \[16, 32\).*recompute") as found:
        outcome(failing.save(tmp_path / "copy", wait=wait))
    assert found.value.start == CHUNK
    assert not (tmp_path / "copy").exists()
    failing.close()
    again = engine.restore(path, on_corrupt="recompute")
    outcome(again.save(tmp_path / "copy", wait=wait))
    assert again.recomputed_tokens == 2 * CHUNK
    assert (tmp_path / "copy").read_bytes() == (originals / "dense").read_bytes()


def test_trimming_into_pinning_and_saving_a_part_of_a_damaged_chunk_repair_it(
    model, copy, sound, closing, tmp_path
):
    expected = sound()
    expected.trim(70)
    steps = {
        "trim": lambda session: session.trim(70),
        "pin": lambda session: session.pin(64, 80).release(),
        "save": lambda session: session.save(tmp_path / "part", upto=70),
    }
    for name, step in steps.items():
        path = copy(to=name)
        engine = closing(make_engine(model))
        damage_chunk(path, engine, 4)
        with pytest.raises(CorruptSnapshotError) as found:
            step(engine.restore(path))
        assert (found.value.chunk, found.value.stop) == (4, 80)
        again = engine.restore(path, on_corrupt="recompute")
        step(again)
        assert again.recomputed_tokens == CHUNK, name
        again.trim(70)
        assert_same_session(again, expected, name)


def test_a_fork_does_as_its_parent_does(copy, engine):
    path = copy()
    damage_chunk(path, engine, 2)
    failing, again = engine.restore(path), engine.restore(path, on_corrupt="recompute")
    with pytest.raises(CorruptSnapshotError):
        go_on(failing.fork())
    twin = again.fork()
    go_on(twin)
    assert (twin.recomputed_tokens, again.recomputed_tokens) == (CHUNK, 0)


def test_where_there_is_no_room_to_keep_a_chunk_the_error_says_so(model, copy, closing):
    path = copy()
    engine = closing(make_engine(model, host_bytes=0, pool_tokens=128, summary_bytes="1MiB"))
    damage_chunk(path, engine, 2)
    again = engine.restore(path, on_corrupt="recompute")
    other = engine.session()
    other.prefill(prompt(5 * CHUNK, seed=20))  # all the homes there are
    with pytest.raises(CorruptSnapshotError, match=r"computing it again failed.*bytes") as found:
        again.logits  # noqa: B018
    assert found.value.chunk == 2
    engine.pager.check_invariants()
    other.close()
    again.logits  # noqa: B018
    assert again.recomputed_tokens == CHUNK


def test_a_store_is_told_of_damage_and_the_next_save_writes_the_chunk_again(
    model, tmp_path, closing
):
    store = DirectoryStore(tmp_path / "store")
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(LENGTH))
    session.save("turn", store=store)
    other_engine = closing(make_engine(model))
    damage_chunk(packs(store)[0], engine, 2)
    again = other_engine.restore("turn", store=store, on_corrupt="recompute")
    again.append(LONGER)
    assert again.recomputed_tokens == CHUNK
    report = again.save("turn-2", store=store)
    assert report.chunks_written == 3  # the damaged one, a new one, the tail
    third = closing(make_engine(model)).restore("turn-2", store=store)
    session.append(LONGER)
    third.logits  # noqa: B018
    assert_same_session(third, session, "saved again")


def test_sessions_in_threads_repair_one_file_together(model, copy, sound, closing, tmp_path):
    path, expected = copy(), sound()
    tokens = go_on(expected)
    engine = closing(make_engine(model, pool_tokens=512, host_bytes=0))
    for chunk in range(6):
        damage_chunk(path, engine, chunk, layer=chunk % 3)
    sessions = [engine.restore(path, on_corrupt="recompute") for _ in range(6)]
    saves = [session.save(tmp_path / f"{i}", wait=False) for i, session in enumerate(sessions[:3])]
    with ThreadPoolExecutor(len(sessions)) as pool:
        produced = list(pool.map(go_on, sessions))
    assert produced == [tokens] * 6
    for i, handle in enumerate(saves):
        handle.result()
        again = engine.restore(tmp_path / f"{i}")
        assert again.length == LENGTH + 1
    for session in sessions:
        assert_same_session(session, expected, "in threads")
    assert engine.stats()["chunks_healed"] == 6
    engine.pager.check_invariants()


@pytest.mark.parametrize("failures", [1, 2])
def test_damage_that_another_thread_has_repaired_meanwhile_costs_one_repetition(engine, failures):
    session, calls = engine.session(), []
    session.prefill(prompt(20))

    def work():
        calls.append(1)
        if len(calls) <= failures:
            error = CorruptSnapshotError("chunk 0 was damaged")
            error.chunk = 0
            raise error
        return "done"

    if failures == 1:
        assert recomputing_damage(engine.core, [session.sequence], work) == "done"
    else:
        with pytest.raises(CorruptSnapshotError):
            recomputing_damage(engine.core, [session.sequence], work)
    assert len(calls) == 2


def test_other_words_for_on_corrupt_are_refused(copy, engine):
    with pytest.raises(InvalidArgumentError, match="on_corrupt is 'ignore'"):
        engine.restore(copy(), on_corrupt="ignore")


def test_every_bit_of_a_chunks_payload_is_looked_at(model, originals, tmp_path, closing):
    """Flips at random places, each found where it is."""
    random = np.random.default_rng(0)
    raw = (originals / "dense").read_bytes()
    engine = closing(make_engine(model))
    size = engine.layout.chunk_bytes
    for i in range(40):
        chunk = int(random.integers(6))
        at = 4096 + chunk * size + int(random.integers(size))
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(random.integers(8))
        path = tmp_path / f"{i}"
        path.write_bytes(damaged)
        with engine.restore(path) as failing:
            with pytest.raises(CorruptSnapshotError) as found:
                failing.logits  # noqa: B018
            assert found.value.chunk == chunk
        assert engine.stats()["records"] == 0  # nothing sound is left to share
