"""A new session starts from what a store knows of its prompt, without being told."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
from bits import assert_same_session
from damage import damage_chunk, flip, packs, sections
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import CapacityError, StorageError
from kvpager.stores import DirectoryStore

COMMON = prompt(70)  # four chunks and six tokens


def with_end(length, seed):
    return np.concatenate([COMMON, prompt(length, seed)])


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def store(model, tmp_path):
    """What a process before this one left: a conversation that begins with COMMON."""
    store = DirectoryStore(tmp_path / "store")
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(with_end(30, seed=1))
        session.save("before", store=store)
    return store


@pytest.fixture
def start(model, store, closing):
    """Makes an engine over the store."""

    def start(**options):
        return closing(make_engine(model, **{"store": store, **options}))

    return start


@pytest.fixture
def cold(model, closing):
    """A session of an engine without a store."""

    def cold(ids):
        session = closing(make_engine(model, pool_tokens=512)).session()
        session.prefill(ids)
        return session

    return cold


def test_a_session_starts_from_the_longest_prefix_of_any_snapshot(start, cold):
    engine = start()
    ids = with_end(40, seed=2)
    session = engine.session()
    session.prefill(ids)
    assert (session.restored_tokens, session.restored_tokens_consumed) == (64, 64)
    assert engine.core.runner.forwards == 2  # 46 tokens that the store has not
    whole = cold(ids)
    assert (
        session.generate(5, eos=None).tokens.tolist() == whole.generate(5, eos=None).tokens.tolist()
    )
    assert_same_session(session, whole, "from a prefix")
    assert session.recomputed_tokens == 0


def test_a_prompt_the_store_has_whole_computes_no_tokens(start, cold):
    engine = start()
    session = engine.session()
    session.prefill(COMMON[:64])
    assert engine.stats()["rows_committed"] == 0
    assert session.restored_tokens_consumed == 64
    assert_same_session(session, cold(COMMON[:64]), "whole")


def test_the_rest_of_a_conversation_is_found_too(start, cold):
    engine = start()
    session = engine.session()
    ids = np.concatenate([with_end(30, seed=1), prompt(20, seed=3)])
    session.prefill(ids)
    assert session.restored_tokens == 96
    assert_same_session(session, cold(ids), "the whole conversation")


def test_what_the_pager_has_itself_is_not_read_from_the_store(start, store):
    engine = start()
    first, second = engine.session(), engine.session()
    first.prefill(with_end(60, seed=2))
    read = engine.stats()["snapshot_bytes_read"]
    second.prefill(with_end(60, seed=2))
    assert second.restored_tokens == 0
    assert engine.stats()["snapshot_bytes_read"] == read
    third = engine.session()
    third.prefill(with_end(30, seed=1))  # here the store knows more
    assert third.restored_tokens == 96


def test_a_prompt_that_differs_early_finds_nothing(start):
    engine = start()
    session = engine.session()
    ids = with_end(30, seed=1)
    ids[3] += 1
    session.prefill(ids)
    assert session.restored_tokens == session.restored_tokens_consumed == 0
    assert session.length == 100


@pytest.mark.parametrize("other", ["salt", "weights", "rows"])
def test_another_salt_model_or_numerics_find_nothing(model, store, closing, other):
    if other == "weights":
        changed = build("llama")
        with torch.no_grad():
            changed.lm_head.weight[0, 0] += 1
        engine = closing(make_engine(changed, store=store))
    else:
        options = {"salt": {"salt": "tenant"}, "rows": {"small_rows": "fixed"}}[other]
        engine = closing(make_engine(model, store=store, **options))
    session = engine.session()
    session.prefill(with_end(30, seed=1))
    assert session.restored_tokens == 0


def test_a_salt_finds_its_own(model, store, closing, cold):
    with make_engine(model, salt="tenant") as engine, engine.session() as session:
        session.prefill(with_end(30, seed=1))
        session.save("tenants", store=store)
    session = closing(make_engine(model, store=store, salt="tenant")).session()
    session.prefill(with_end(40, seed=2))
    assert session.restored_tokens_consumed == 64
    assert_same_session(session, cold(with_end(40, seed=2)), "salted")


def test_several_prompts_of_one_call_start_from_the_store(start, cold):
    engine = start(pool_tokens=256)
    prompts = [with_end(20 + i, seed=i + 5) for i in range(3)]
    sessions = [engine.session() for _ in prompts]
    calls = []
    engine.prefill_many(
        zip(sessions, prompts), progress=lambda done, total: calls.append((done, total))
    )
    assert calls[0] == (3 * 64, sum(map(len, prompts)))
    assert [session.restored_tokens_consumed for session in sessions] == [64, 0, 0]
    assert engine.stats()["prefix_tokens_reused"] == 128
    for session, ids in zip(sessions, prompts):
        assert_same_session(session, cold(ids), "one of several")


def test_a_damaged_chunk_of_a_prefix_is_computed_again(start, store, cold, caplog):
    ids = with_end(40, seed=2)
    whole = cold(ids)
    engine = start()
    damage_chunk(packs(store)[0], engine, 2)
    session = engine.session()
    with caplog.at_level(logging.WARNING, "kvpager"):
        session.prefill(ids)
    assert "tokens [32, 48) were computed again" in caplog.text
    assert session.recomputed_tokens == CHUNK
    assert_same_session(session, whole, "damaged prefix")
    # The store was told: from now on the prefix ends before it.
    later = start().session()
    later.prefill(ids)
    assert later.restored_tokens == 32
    assert_same_session(later, whole, "shorter prefix")


@pytest.mark.parametrize("what", ["removed", "truncated", "metadata", "garbage", "folder"])
def test_a_store_that_lost_its_packs_costs_tokens_and_no_error(start, store, cold, what):
    ids = with_end(40, seed=2)
    engine = start()
    (pack,) = packs(store)
    if what == "removed":
        pack.unlink()
    elif what == "truncated":
        pack.write_bytes(pack.read_bytes()[:5000])
    elif what == "metadata":
        flip(pack, sections(pack)[7][0] + 10)
    elif what == "garbage":
        pack.write_bytes(b"not a snapshot")
    else:
        pack.unlink()
        pack.mkdir()
    session = engine.session()
    session.prefill(ids)
    assert session.restored_tokens == 0
    assert_same_session(session, cold(ids), what)


class Broken:
    """A store whose look-up fails, or finds what it should not."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def find_prefix(self, hashes):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(hashes)


@pytest.mark.parametrize("error", [StorageError("the disk is gone"), OSError("no such device")])
def test_a_look_up_that_fails_is_a_warning(start, cold, caplog, error):
    broken = Broken(error)
    session = start(store=broken).session()
    with caplog.at_level(logging.WARNING, "kvpager"):
        session.prefill(COMMON)
    assert str(error) in caplog.text
    assert broken.asked == 1
    assert_same_session(session, cold(COMMON), "without the store")


def test_other_tokens_under_a_known_hash_are_not_taken(start, store, cold, caplog):
    """Hashes find, token ids decide."""
    liar = Broken(lambda hashes: store.open("before"))
    session = start(store=liar).session()
    ids = prompt(120, seed=77)
    with caplog.at_level(logging.WARNING, "kvpager"):
        session.prefill(ids)
    assert "token ids" in caplog.text
    assert session.restored_tokens == 0
    assert_same_session(session, cold(ids), "a lie")


def test_a_prefix_whose_summaries_do_not_fit_is_left_alone(start, cold, caplog):
    each = start().stats()["summary_bytes_per_chunk"]
    # Room for what the prompt needs in homes, taken by another session when the prefix is found.
    engine = start(summary_bytes=9 * each, host_bytes=0, pool_tokens=160)
    other = engine.session()
    other.prefill(prompt(6 * CHUNK, seed=9))
    session = engine.session()
    with caplog.at_level(logging.WARNING, "kvpager"):
        session.prefill(COMMON[:50])
    assert_same_session(session, cold(COMMON[:50]), "no room")


def test_a_refused_admission_leaves_the_session_empty(start):
    engine = start(host_bytes=0)
    session = engine.session()
    with pytest.raises(CapacityError, match="bytes"):
        session.prefill(with_end(400, seed=2))
    assert (session.length, session.restored_tokens) == (0, 0)
    session.prefill(with_end(20, seed=2))
    assert session.restored_tokens_consumed == 64


def test_a_session_that_started_from_the_store_lives_as_any_other(start, cold):
    engine = start(pool_tokens=256)
    session = engine.session()
    session.prefill(with_end(40, seed=2))
    fork = session.fork()
    fork.append(prompt(10, seed=6))
    session.trim(40)
    session.append(prompt(30, seed=7))
    whole = cold(np.concatenate([COMMON[:40], prompt(30, seed=7)]))
    assert_same_session(session, whole, "trimmed")
    with session.pin(0, 40):
        engine.pager.evict_all()
        assert [info.resident for info in session.ledger()[:2]] == [True, True]
    del session, fork
    gc.collect()
    engine.pager.check_invariants()
    after = engine.stats()
    assert (after["sequences"], after["open_blocks"], after["pinned_blocks"]) == (0, 0, 0)


def test_a_trimmed_session_finds_its_prefix_again(start):
    engine = start()
    session = engine.session()
    session.prefill(prompt(20, seed=8))
    session.trim(0)
    session.prefill(with_end(10, seed=3))
    assert session.restored_tokens_consumed == 64


def test_turns_saved_by_one_process_start_the_next_ones(model, store, closing, cold):
    """Every turn ends with a save, and the next begins in another engine."""
    ids = with_end(5, seed=4)
    for turn in range(3):
        engine = closing(make_engine(model, store=store))
        session = engine.session()
        session.prefill(ids)
        assert session.restored_tokens >= len(ids) // CHUNK * CHUNK - (64 if turn == 0 else 32)
        session.generate(12, eos=None).tokens.tolist()
        session.save(f"turn-{turn}", store=store)
        ids = np.concatenate([session.tokens, prompt(9, seed=turn)])
        engine.close()
    whole = cold(with_end(5, seed=4))
    whole.generate(12, eos=None).tokens.tolist()
    whole.append(prompt(9, seed=0))
    whole.generate(12, eos=None).tokens.tolist()
    assert whole.tokens.tolist() == ids[: whole.length].tolist()
