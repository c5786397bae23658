"""How many tokens of a prompt a request computed, and how many it found: to the token."""

from __future__ import annotations

import numpy as np
import pytest
from damage import damage_chunk
from recurrent_models import CHUNK as STATE_CHUNK
from recurrent_models import build_recurrent, make_recurrent_engine
from reference_models import CHUNK, build, make_engine, prompt

from kvpager.stores import DirectoryStore

TEXT = prompt(5 * CHUNK + 6)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=512))


def counts(engine, given, **options):
    """(cached, computed) tokens of one request."""
    with engine.scheduler() as scheduler:
        request = scheduler.submit(given, 3, eos=None, **options)
        while not scheduler.idle:
            scheduler.step()
    done = request.completion
    assert done.error is None
    assert done.cached_tokens + done.computed_tokens == done.prompt_tokens
    return done.cached_tokens, done.computed_tokens


def test_what_no_one_has_is_computed_and_what_the_pool_has_is_found(engine):
    assert counts(engine, TEXT) == (0, len(TEXT))
    assert counts(engine, TEXT) == (5 * CHUNK, 6)
    other = np.concatenate([TEXT[: 2 * CHUNK + 3], prompt(20, 1)])
    assert counts(engine, other) == (2 * CHUNK, 23)


def test_prompts_of_one_batch_share_what_the_first_one_computes(engine):
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(TEXT, 2, eos=None) for _ in range(3)]
        while not scheduler.idle:
            scheduler.step()
    found = [(r.completion.cached_tokens, r.completion.computed_tokens) for r in requests]
    assert found == [(0, len(TEXT)), (5 * CHUNK, 6), (5 * CHUNK, 6)]


def test_a_prefix_in_the_store_is_found(engine, model, tmp_path, closing):
    store = DirectoryStore(tmp_path / "store")
    with engine.session() as session:
        session.prefill(TEXT)
        session.save("before", store=store)
    assert counts(closing(make_engine(model, store=store)), TEXT) == (5 * CHUNK, 6)


def test_what_a_given_session_holds_is_found_and_its_pending_token_computed(engine):
    session = engine.session()
    session.prefill(TEXT)
    longer = np.concatenate([TEXT, prompt(9, 2)])
    assert counts(engine, longer, session=session) == (len(TEXT), 9)
    assert session.pending is not None
    assert counts(engine, session) == (len(longer) + 2, 1)
    assert counts(engine, TEXT[:20], session=session) == (20, 0)


def test_a_damaged_chunk_of_a_restored_session_was_computed(engine, model, tmp_path, closing):
    path = tmp_path / "chat.kvsnap"
    with engine.session() as session:
        session.prefill(TEXT)
        session.save(path)
    fresh = closing(make_engine(model))
    with fresh.restore(path) as session:
        assert counts(fresh, session) == (len(TEXT), 0)
    damage_chunk(path, engine, 2)
    fresh = closing(make_engine(model))
    with fresh.restore(path, on_corrupt="recompute") as session:
        assert counts(fresh, session) == (len(TEXT) - CHUNK, CHUNK)


def test_states_of_recurrent_layers_decide_what_is_found(closing):
    text = prompt(4 * STATE_CHUNK + 5)
    engine = closing(make_recurrent_engine(build_recurrent("qwen3_next"), checkpoint_chunks=2))
    assert counts(engine, text) == (0, len(text))
    assert counts(engine, text) == (4 * STATE_CHUNK, 5)


def test_a_request_that_starts_again_counts_no_token_twice(model, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes="16MiB"))
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(prompt(40, i), 20, eos=None) for i in range(2)]
        while requests[1].state != "decoding":
            scheduler.step()
        assert requests[1].suspend()
        scheduler._remove(requests[1])
        scheduler._waiting.add(requests[1])
        while not scheduler.idle:
            scheduler.step()
    for request in requests:
        done = request.completion
        assert (done.cached_tokens, done.computed_tokens) == (0, 40)


def test_a_request_that_was_never_admitted_found_and_computed_nothing(engine):
    with engine.scheduler() as scheduler:
        request = scheduler.submit(TEXT, 3)
        request.cancel()
        scheduler.step()
    assert (request.completion.cached_tokens, request.completion.computed_tokens) == (0, 0)
