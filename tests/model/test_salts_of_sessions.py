"""Sessions of several salts on one engine: they share nothing, and each is its own engine's."""

from __future__ import annotations

import pytest
from bits import assert_same_session
from drafts import draft_of, drafted_engine
from recurrent_models import build_recurrent, make_recurrent_engine
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import DirectoryStore, FingerprintMismatchError, InvalidArgumentError

TEXT = prompt(5 * CHUNK + 6)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=512))


def computed(session):
    before = session.tokens_computed
    session.prefill(TEXT)
    return session.tokens_computed - before


def test_sessions_of_another_salt_share_no_chunk_and_those_of_one_share(engine):
    assert computed(engine.session()) == len(TEXT)
    assert computed(engine.session(salt="a")) == len(TEXT)
    assert computed(engine.session(salt="b")) == len(TEXT)
    assert computed(engine.session(salt="a")) == 6
    assert computed(engine.session(salt="")) == 6
    with pytest.raises(InvalidArgumentError, match="salt is 5"):
        engine.session(salt=5)


def test_a_session_of_a_salt_has_the_bits_and_names_of_an_engine_of_that_salt(
    model, engine, closing
):
    own = closing(make_engine(model, salt="a")).session()
    own.prefill(TEXT)
    session = engine.session(salt="a")
    session.prefill(TEXT)
    assert_same_session(session, own, "of a salt")
    assert session.sequence.salt == own.sequence.salt
    tokens = TEXT.tolist()
    assert engine.pager.chain_hashes(tokens, session.sequence.salt) == own.core.pager.chain_hashes(
        tokens, own.sequence.salt
    )


@pytest.mark.parametrize("length", [5, len(TEXT)])
def test_a_snapshot_is_restored_by_either_engine_and_under_no_other_salt(
    model, engine, closing, tmp_path, length
):
    own = closing(make_engine(model, salt="a"))
    for number, (saver, reader, given, wrong) in enumerate(
        ((engine, own, {"salt": "a"}, {"salt": "b"}), (own, engine, {}, {}))
    ):
        path = tmp_path / f"{number}.kvsnap"
        session = saver.session(**given)
        session.prefill(TEXT[:length])
        session.save(path)
        for restored in (reader.restore(path, salt="a"), saver.restore(path, **given)):
            assert {chunk.provenance for chunk in restored.ledger()} == {"exact"}
            assert_same_session(restored, session, "restored")
        for other in (wrong or {"salt": "b"}, {"salt": ""}):
            with pytest.raises(FingerprintMismatchError) as refused:
                saver.restore(path, **other, on_mismatch="approximate")
            assert refused.value.field == "salt"


def test_a_fork_and_a_saved_fork_keep_the_salt(engine, tmp_path):
    session = engine.session(salt="a")
    session.prefill(TEXT)
    twin = session.fork()
    assert twin.sequence.salt == session.sequence.salt
    twin.save(tmp_path / "twin.kvsnap")
    with pytest.raises(FingerprintMismatchError):
        engine.restore(tmp_path / "twin.kvsnap")


def test_prefixes_and_lists_of_a_store_are_those_of_the_salt(model, closing, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    with make_engine(model) as engine:
        for salt in ("a", "b"):
            session = engine.session(salt=salt)
            session.prefill(TEXT if salt == "a" else TEXT[: 2 * CHUNK])
            session.save(f"of-{salt}", store=store)
            assert [one.name for one in engine.snapshots(store, salt=salt)] == [f"of-{salt}"]
            with pytest.raises(InvalidArgumentError, match="another salt"):
                _save(engine, f"of-{salt}", store)
        assert engine.snapshots(store) == []
    fresh = closing(make_engine(model, store=store))
    assert computed(fresh.session(salt="b")) == len(TEXT) - 2 * CHUNK
    assert computed(fresh.session(salt="a")) == 6
    assert computed(fresh.session()) == len(TEXT)
    assert computed(closing(make_engine(model, salt="a", store=store)).session()) == 6


def _save(engine, name, store):
    session = engine.session(salt="c")
    session.prefill(TEXT[:5])
    session.save(name, store=store)


def test_requests_of_a_salt_share_with_sessions_of_it(engine):
    engine.session(salt="a").prefill(TEXT)
    found = []
    with engine.scheduler() as scheduler:
        for salt in ("a", None, "b"):
            request = scheduler.submit(TEXT, 2, eos=None, salt=salt)
            while not scheduler.idle:
                scheduler.step()
            found.append(request.completion.cached_tokens)
        session = engine.session()
        with pytest.raises(InvalidArgumentError, match="salt is given with a session"):
            scheduler.submit(TEXT, 2, session=session, salt="a")
    assert found == [5 * CHUNK, 0, 0]


def test_a_drafts_cache_has_the_salt_of_its_text(model, closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    engine = closing(drafted_engine(model, model))
    session = engine.session(salt="a")
    session.prefill(TEXT)
    session.generate(12, eos=None, speculate="draft")
    assert draft_of(session).transcript.sequence.salt == session.sequence.salt
    session.save(path)
    restored = engine.restore(path, salt="a")
    assert draft_of(restored).length == draft_of(session).length > 0
    assert draft_of(restored.fork()).transcript.sequence.salt == session.sequence.salt


def test_states_of_recurrent_layers_are_those_of_the_salt(closing, tmp_path):
    path = str(tmp_path / "chat.kvsnap")
    model = build_recurrent("qwen3_next")
    engine = closing(make_recurrent_engine(model, checkpoint_chunks=2))
    session = engine.session(salt="a")
    assert computed(session) == len(TEXT)
    assert computed(engine.session()) == len(TEXT)
    session.save(path)
    own = closing(make_recurrent_engine(model, checkpoint_chunks=2, salt="a"))
    restored = own.restore(path)
    assert own.core.transcripts.of(restored.sequence).states._saved is not None
    assert_same_session(restored, session, "of a salt")
    with pytest.raises(FingerprintMismatchError):
        engine.restore(path)
