"""Room that is held below the pool is given back at each end of what it was held for."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import CapacityError, NonFiniteError, PagerError

LONG = 40 * CHUNK  # tokens nobody gets to


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=256))


@pytest.fixture
def session(engine):
    with engine.session() as session:
        session.prefill(prompt(40))
        yield session


def held(engine):
    """Chunks promised to sequences that have not come."""
    return engine.stats()["reserved_chunks"]


def eos_of(session, count):
    """The token that a greedy continuation has at `count` first, and how many come up to it."""
    with session.fork() as twin:
        tokens = twin.generate(count, eos=None).tokens.tolist()
    return tokens[-1], tokens.index(tokens[-1]) + 1


def test_a_text_that_ends_early_holds_no_more_room(engine, session):
    eos, count = eos_of(session, 4)
    stream = session.generate(LONG, eos=eos, stream="tokens")
    assert held(engine) > 20
    assert len(list(stream)) == count
    assert held(engine) == 0


def test_room_is_given_back_with_the_last_token_not_after_it(engine, session):
    """Whoever looks for the end of a text in its tokens never asks for the one after it."""
    _, count = eos_of(session, 4)
    token, _ = eos_of(session, 4)
    stream = session.generate(LONG, eos=token, stream="tokens")
    for _ in range(count):
        next(stream)
    assert held(engine) == 0


def test_stop_sequences_end_the_room_too(engine, session):
    token, count = eos_of(session, 4)
    assert len(session.generate(LONG, eos=None, stop=[[token]]).tokens.tolist()) == count
    assert held(engine) == 0


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("way", ["dropped", "closed", "raised"])
def test_an_abandoned_stream_holds_no_room(engine, session, taken, way):
    def consume():
        stream = session.generate(LONG, eos=None, stream="tokens")
        for _ in range(taken):
            next(stream)
        assert held(engine) > 20
        if way == "closed":
            stream.close()
            assert held(engine) == 0
        if way == "raised":
            raise KeyError("the consumer's")

    with suppress(KeyError):
        consume()
    gc.collect()
    assert held(engine) == 0


def test_three_idle_sessions_leave_room_for_a_fourth(model):
    """They asked for much, got 25 tokens each, and nobody holds their streams any more."""
    chunk_bytes = 3 * 2 * 4 * 32 * 4 * CHUNK
    with make_engine(model, pool_tokens=256, host_bytes=85 * chunk_bytes) as engine:
        idle = []
        for seed in range(4):
            session = engine.session()
            session.prefill(prompt(40, seed=seed))
            stream = session.generate(30 * CHUNK, eos=None, stream="tokens")
            for _ in range(25):
                next(stream)
            idle.append(session)
        assert [len(session.tokens) for session in idle] == [65] * 4


def test_each_stream_of_many_gives_its_room_back_when_it_ends(engine):
    sessions = [engine.session() for _ in range(3)]
    engine.prefill_many((session, prompt(40, seed=i)) for i, session in enumerate(sessions))
    token, count = eos_of(sessions[0], 3)
    stream = engine.generate_many(sessions, 10 * CHUNK, eos=token)
    before = held(engine)
    for session, _ in stream:
        if session is sessions[0] and session.length == 40 + count:
            break
    assert held(engine) <= before - 9
    stream.close()
    assert held(engine) == 0


def test_a_refused_call_for_many_holds_nothing_for_the_first(model):
    chunk_bytes = 3 * 2 * 4 * 32 * 4 * CHUNK
    with make_engine(model, pool_tokens=256, host_bytes=40 * chunk_bytes) as engine:
        sessions = [engine.session() for _ in range(2)]
        engine.prefill_many((session, prompt(40, seed=i)) for i, session in enumerate(sessions))
        with pytest.raises(CapacityError):
            engine.generate_many(sessions, 30 * CHUNK)
        assert held(engine) == 0
        with pytest.raises(CapacityError):
            engine.prefill_many((one, prompt(30 * CHUNK, seed=i)) for i, one in enumerate(sessions))
        assert held(engine) == 0


def test_a_stream_that_replaces_another_keeps_its_own_room(engine, session):
    stream = session.generate(10 * CHUNK, eos=None, stream="tokens")
    next(stream)
    stream = session.generate(
        20 * CHUNK, eos=None, stream="tokens"
    )  # the first is collected after this call
    gc.collect()
    assert held(engine) >= 19
    del stream
    gc.collect()
    assert held(engine) == 0


def test_a_text_regenerated_or_scored_or_refused_holds_nothing(engine, session):
    session.generate(5, eos=None).tokens.tolist()
    next(session.regenerate(LONG, eos=None, stream="tokens"))
    gc.collect()
    assert held(engine) == 0
    engine.score(prompt(60))
    with pytest.raises(PagerError):
        session.regenerate(10**6)
    assert held(engine) == 0


def test_a_prefill_that_fails_holds_nothing(engine, session, monkeypatch):
    run = engine.core.runner.run
    calls = []

    def fails(batch):
        calls.append(batch)
        if len(calls) > 1:
            raise NonFiniteError("the second forward")
        return run(batch)

    monkeypatch.setattr(engine.core.runner, "run", fails)
    with pytest.raises(NonFiniteError):
        session.prefill(prompt(40 + 10 * CHUNK))
    assert held(engine) == 0
    with pytest.raises(PagerError):
        engine.score(prompt(200))
    assert held(engine) == 0


def test_a_forward_that_fails_ends_the_stream_and_its_room(engine, session, monkeypatch):
    stream = session.generate(LONG, eos=None, stream="tokens")
    next(stream)

    def fails(batch):
        raise NonFiniteError("made up")

    monkeypatch.setattr(engine.core.runner, "run", fails)
    with pytest.raises(NonFiniteError):
        next(stream)
    assert held(engine) == 0


def test_requests_that_end_early_hold_nothing(engine, session):
    token, _ = eos_of(session, 4)
    kept = engine.run([prompt(40), session], LONG, eos=token, keep_sessions=True)
    assert {completion.finish_reason for completion in kept} == {"eos"}
    assert held(engine) == 0
    with engine.scheduler() as scheduler:
        request = scheduler.submit(prompt(200, seed=5), LONG, keep_session=True)
        scheduler.step()
        assert held(engine) > 20
        request.cancel()
        scheduler.step()
        assert held(engine) == 0


def test_assembled_texts_hold_nothing(engine):
    engine.cache_segment(prompt(50), "a")
    with engine.assemble([prompt(20, seed=1), "a", prompt(9, seed=2)]):
        assert held(engine) == 0


def test_speculation_and_its_draft_hold_nothing(model, closing):
    engine = closing(make_engine(model, pool_tokens=512, draft=model))
    with engine.session() as session:
        session.prefill(prompt(40))
        stream = session.generate(LONG, eos=None, speculate="draft", stream="tokens")
        for _ in range(6):
            next(stream)
        stream.close()
        assert held(engine) == held(engine.draft) == 0
