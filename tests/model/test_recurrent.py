"""Sessions of models with recurrent layers: whatever led to a text, its bits are a cold run's.

A cold run is a prefill by an engine that has seen nothing. Forwards of another number of rows, or
from another state, give other bits with these models (one test says so), so that a provisional row
or a stale state left where it must not be is seen.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from apart import apart
from bits import assert_same_bits
from recurrent_models import CHUNK, build_recurrent, make_recurrent_engine
from reference_models import prompt

from kvpager._model.watch.looks import only_looks
from kvpager.companions import NeedsCheckpoint, Ok
from kvpager.errors import CapacityError, InvalidArgumentError, NonFiniteError
from kvpager.stores import DirectoryStore

# A hybrid, one without attention, and one of single-row forwards.
KINDS = ("qwen3_next", "mamba2", pytest.param("jamba", marks=pytest.mark.deep))
EVERY = 2  # chunks from one checkpoint to the next
LENGTH = 5 * CHUNK + 9


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return build_recurrent(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return build_recurrent("qwen3_next")


@pytest.fixture
def engine(model, closing):
    return closing(make_recurrent_engine(model, pool_tokens=512, checkpoint_chunks=EVERY))


@pytest.fixture
def hybrid_engine(hybrid, closing):
    return closing(make_recurrent_engine(hybrid, pool_tokens=512, checkpoint_chunks=EVERY))


@pytest.fixture(scope="module")
def cold_run(model):
    with make_recurrent_engine(model, pool_tokens=512) as engine:
        yield _cold_runs(engine)


@pytest.fixture(scope="module")
def hybrid_cold_run(hybrid):
    with make_recurrent_engine(hybrid, pool_tokens=512) as engine:
        yield _cold_runs(engine)


def _cold_runs(engine):
    """K/V of all layers, by layer, and the last logits, where nothing of the text was seen."""

    def run(ids):
        with apart(engine) as session:
            session.prefill(ids)
            layers = range(engine.layout.layers)
            kv = [session.sequence.read_kv(layer, 0, len(ids)) for layer in layers]
            return kv, session.logits

    return run


def assert_as_cold(session, cold_run, what):
    """Sealed K/V, and the logits after the prompt, which the session must be at the end of."""
    tokens = session.tokens if session.pending is None else session.tokens[:-1]
    logits = session.logits  # computes what is owed
    kv, expected = cold_run(tokens)
    assert_same_bits(logits, expected, f"{what}: logits")
    sealed = len(tokens) // CHUNK * CHUNK
    for layer, pair in enumerate(kv):
        ours = session.sequence.read_kv(layer, 0, sealed)
        for name, a, b in zip(("keys", "values"), ours, pair):
            assert_same_bits(a, b[:sealed], f"{what}: {name} of layer {layer}")
    chunks = session.ledger()[: sealed // CHUNK]
    assert [chunk.provenance for chunk in chunks] == ["exact"] * len(chunks)


def test_rows_of_another_forward_have_other_bits(hybrid_engine, hybrid_cold_run):
    """Otherwise the tests below would prove nothing."""
    session = hybrid_engine.session()
    session.prefill(prompt(LENGTH))
    session.generate(5, eos=None).tokens.tolist()
    kv, _ = hybrid_cold_run(session.tokens[:-1])
    ours = session.sequence.read_kv(1, 5 * CHUNK, session.committed)[0]
    assert (ours != kv[1][0][5 * CHUNK :]).any()


def test_what_generation_seals_and_what_follows_it_is_a_cold_runs(engine, cold_run):
    session = engine.session()
    session.prefill(prompt(LENGTH))
    session.generate(2 * CHUNK, eos=None).tokens.tolist()
    session.append(prompt(CHUNK + 3, seed=1))
    assert_as_cold(session, cold_run, "a turn after a generated one")
    engine.pager.check_invariants()


def test_a_prompt_fed_in_pieces_is_a_cold_runs(engine, cold_run):
    session = engine.session()
    for end in (3, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, LENGTH):
        session.prefill(prompt(LENGTH)[:end])
        assert_as_cold(session, cold_run, f"{end} tokens")


@pytest.mark.parametrize("position", [0, CHUNK - 1, 2 * CHUNK, 3 * CHUNK + 1, LENGTH - 1])
def test_a_text_that_was_cut_and_goes_on_otherwise_is_a_cold_runs(engine, cold_run, position):
    session = engine.session()
    session.prefill(prompt(LENGTH))
    session.generate(CHUNK, eos=None).tokens.tolist()
    session.trim(position)
    if position:
        assert_as_cold(session, cold_run, f"cut at {position}")
    session.append(prompt(CHUNK + 5, seed=position))
    assert_as_cold(session, cold_run, f"cut at {position} and continued")
    engine.pager.check_invariants()


def test_a_cut_costs_no_more_tokens_than_lie_between_checkpoints(hybrid_engine):
    session = hybrid_engine.session()
    session.prefill(prompt(12 * CHUNK + 3))
    for position in range(11 * CHUNK + 7, 0, -13):
        before = hybrid_engine.core.runner.rows_used
        session.trim(position)
        session.logits  # noqa: B018  # computes what is owed
        assert hybrid_engine.core.runner.rows_used - before <= EVERY * CHUNK


def test_an_edited_text_is_a_cold_runs_and_its_beginning_is_kept(engine, cold_run):
    session = engine.session()
    ids = prompt(LENGTH)
    session.prefill(ids)
    edited = np.concatenate([ids[: 4 * CHUNK + 2], [7, 8, 9], ids[4 * CHUNK + 5 :]])
    reuse = session.update(edited)
    assert reuse.changed == 4 * CHUNK + 2
    assert reuse.reused >= 4 * CHUNK
    assert_as_cold(session, cold_run, "an edited text")


def test_a_text_generated_again_is_what_it_was(engine, cold_run):
    session = engine.session()
    session.prefill(prompt(LENGTH))
    first = session.generate(CHUNK + 4, eos=None).tokens.tolist()
    assert session.regenerate(CHUNK + 4, eos=None).tokens.tolist() == first
    session.append([5])
    assert_as_cold(session, cold_run, "a text generated twice")


def test_forks_go_their_own_ways_from_one_state(engine, cold_run):
    session = engine.session()
    session.prefill(prompt(LENGTH))
    twin = session.fork()
    session.append(prompt(CHUNK, seed=1))
    twin.generate(4, eos=None).tokens.tolist()
    twin.append(prompt(CHUNK, seed=2))
    assert_as_cold(session, cold_run, "a session that was forked")
    assert_as_cold(twin, cold_run, "its fork")


def test_a_prompt_that_begins_like_another_goes_on_from_its_state(hybrid_engine, hybrid_cold_run):
    common = prompt(6 * CHUNK)
    first = hybrid_engine.session()
    first.prefill(np.concatenate([common, prompt(20, seed=1)]))
    first.close()
    before = hybrid_engine.core.runner.rows_used
    second = hybrid_engine.session()
    second.prefill(np.concatenate([common, prompt(20, seed=2)]))
    assert hybrid_engine.core.runner.rows_used - before == 20
    assert_as_cold(second, hybrid_cold_run, "a prompt with a known beginning")
    assert hybrid_engine.stats()["checkpoints_restored"] >= 1


def test_a_prompt_that_is_known_to_its_end_needs_no_forward(hybrid_engine, hybrid_cold_run):
    ids = prompt(5 * CHUNK)  # whose last state is kept because it ends there
    first = hybrid_engine.session()
    first.prefill(ids)
    before = hybrid_engine.core.runner.forwards
    second = hybrid_engine.session()
    second.prefill(ids)
    assert_as_cold(second, hybrid_cold_run, "a prompt that was known")
    assert hybrid_engine.core.runner.forwards == before


def test_chunks_without_a_state_are_computed_again(hybrid, closing, hybrid_cold_run):
    engine = closing(make_recurrent_engine(hybrid, pool_tokens=512, checkpoint_bytes=0))
    first = engine.session()
    first.prefill(prompt(LENGTH))
    second = engine.session()
    second.prefill(np.concatenate([prompt(LENGTH)[: 4 * CHUNK], prompt(9, seed=3)]))
    assert_as_cold(second, hybrid_cold_run, "K/V were there, a state was not")
    assert engine.stats()["checkpoint_states"] == 0
    assert engine.stats()["state_tokens_recomputed"] >= 4 * CHUNK
    first.trim(3 * CHUNK + 2)
    assert_as_cold(first, hybrid_cold_run, "cut without checkpoints")


def test_states_say_where_a_text_can_be_cut(hybrid_engine):
    session = hybrid_engine.session()
    session.prefill(prompt(LENGTH))
    states = session.transcript.states
    assert states.length == LENGTH
    assert states.trim(LENGTH + 3) == Ok()
    assert states.trim(3 * CHUNK + 1) == NeedsCheckpoint(2 * CHUNK)
    assert states.length == LENGTH  # which changed nothing
    assert states.trim(5 * CHUNK) == Ok()
    assert states.length == 5 * CHUNK
    assert states.trim(CHUNK) == NeedsCheckpoint(0)
    states.reset()
    assert states.length == 0


def test_the_ledger_says_behind_which_chunks_a_state_is_kept(hybrid_engine):
    session = hybrid_engine.session()
    session.prefill(prompt(LENGTH))
    places = [chunk.stop for chunk in session.ledger() if chunk.checkpoint]
    assert places == [2 * CHUNK, 4 * CHUNK, 5 * CHUNK]  # every second, and the last whole one
    assert "checkpoint" in repr(session.ledger()[1])
    for place in places:
        with session.fork() as fork:
            fork.trim(place)
            assert fork.committed == place


def test_chunks_in_a_store_are_not_taken_without_their_states(
    hybrid, closing, tmp_path, hybrid_cold_run
):
    store = DirectoryStore(tmp_path)
    with make_recurrent_engine(hybrid, pool_tokens=512) as engine, engine.session() as session:
        session.prefill(prompt(LENGTH))
        session.save("chat", store=store)
    engine = closing(make_recurrent_engine(hybrid, pool_tokens=512, store=store))
    session = engine.session()
    session.prefill(prompt(LENGTH))
    assert session.restored_tokens == 0
    assert_as_cold(session, hybrid_cold_run, "beside a store")


def test_sessions_that_take_turns_do_not_touch_one_another(engine, cold_run):
    sessions = [engine.session() for _ in range(2)]
    for i, session in enumerate(sessions):
        session.prefill(prompt(2 * CHUNK + 5 * i + 1, seed=i))
    told = {id(session): [] for session in sessions}
    for session, token in engine.generate_many(sessions, CHUNK + 4, eos=None):
        told[id(session)].append(token)
    for i, session in enumerate(sessions):
        with engine.session() as alone:
            alone.prefill(prompt(2 * CHUNK + 5 * i + 1, seed=i))
            assert alone.generate(CHUNK + 4, eos=None).tokens.tolist() == told[id(session)]
        session.append([5])
        assert_as_cold(session, cold_run, f"session {i} of two")


def test_scheduled_requests_have_the_tokens_they_would_have_alone(engine):
    prompts = [prompt(length, seed=length) for length in (7, 3 * CHUNK, 2 * CHUNK + 5, CHUNK + 1)]
    completions = engine.run(prompts, CHUNK + 3, eos=None, max_sessions=3)
    for ids, completion in zip(prompts, completions):
        with engine.session() as alone:
            alone.prefill(ids)
            assert completion.tokens.tolist() == alone.generate(CHUNK + 3, eos=None).tokens.tolist()


def test_tokens_do_not_depend_on_the_pool(model, engine, closing):
    small = closing(make_recurrent_engine(model, pool_tokens=4 * CHUNK, checkpoint_bytes=0))
    texts = []
    for one in (engine, small):
        session = one.session()
        session.prefill(prompt(LENGTH))
        texts.append(session.generate(2 * CHUNK, eos=None).tokens.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rows", ["chunk", "tail", "one"])
def test_a_forward_that_fails_leaves_the_state_as_it_was(engine, model, cold_run, rows):
    """It fails in its last layer, when others have taken their steps."""
    session = engine.session()
    session.prefill(prompt(2 * CHUNK + 3))
    more = {"chunk": 2 * CHUNK, "tail": 5, "one": 0}[rows]
    if not more:
        session.generate(1, eos=None).tokens.tolist()
    held = session.transcript.states.at(session.committed)
    before = [tensor.clone() for tensor in held.tensors]
    layers = model.get_decoder().layers
    handle = layers[-1].register_forward_hook(only_looks(_fail))
    with pytest.raises(RuntimeError, match="as planned"):
        session.append(prompt(more, seed=1)) if more else next(
            session.generate(2, eos=None, stream="tokens")
        )
    handle.remove()
    for one, other in zip(held.tensors, before):
        assert_same_bits(one, other, "the state before a forward that failed")
    session.append(prompt(CHUNK, seed=2))
    assert_as_cold(session, cold_run, f"after a failed forward of {rows}")


def test_a_forward_that_is_not_committed_leaves_no_state(engine, cold_run, monkeypatch):
    session = engine.session()
    session.prefill(prompt(2 * CHUNK + 3))
    with monkeypatch.context() as patch:
        patch.setattr("kvpager.pager.Forward.commit", _fail)
        with pytest.raises(RuntimeError, match="as planned"):
            session.append(prompt(3 * CHUNK, seed=1))
    session.append(prompt(3 * CHUNK, seed=2))
    assert_as_cold(session, cold_run, "after a commit that failed")


def test_an_interrupt_after_a_commit_costs_a_state_and_no_bit(engine, cold_run, monkeypatch):
    session = engine.session()
    session.prefill(prompt(2 * CHUNK + 3))
    with monkeypatch.context() as patch:
        patch.setattr("kvpager._runtime.recurrent.cursor.StateCursor.advance", _fail)
        with pytest.raises(RuntimeError, match="as planned"):
            session.append(prompt(3 * CHUNK, seed=1))
    session.prefill(np.concatenate([session.tokens, prompt(7, seed=2)]))
    assert_as_cold(session, cold_run, "after an interrupt")


def _fail(*args, **kwargs):
    raise RuntimeError("as planned")


def test_a_state_that_is_not_finite_is_refused_and_not_kept(hybrid, closing, hybrid_cold_run):
    engine = closing(make_recurrent_engine(hybrid, pool_tokens=512))
    session = engine.session()
    session.prefill(prompt(CHUNK))
    taken = engine.core.facts.recurrence.taken
    poisoned = []

    def taken_after_poison(cache, position, hidden):
        if not poisoned:
            layer = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
            layer.recurrent_states[0][0, 0, 0, 0] = float("nan")
            poisoned.append(position)
        return taken(cache, position, hidden)

    engine.core.facts.recurrence.taken = taken_after_poison
    with pytest.raises(NonFiniteError, match=r"state of layer 0 \(recurrent_states.0\)"):
        session.append(prompt(CHUNK, seed=1))
    assert session.committed == CHUNK
    session.append(prompt(CHUNK, seed=1))
    assert_as_cold(session, hybrid_cold_run, "after a state that was not finite")


def test_sampled_tokens_are_drawn_by_position(engine):
    texts = []
    for cut in (None, CHUNK + 3):
        session = engine.session()
        session.prefill(prompt(CHUNK + 3))
        options = {"temperature": 0.8, "seed": 5, "eos": None}
        text = session.generate(10, **options).tokens.tolist()
        if cut is not None:
            text = session.regenerate(10, **options).tokens.tolist()
        texts.append(text)
    assert texts[0] == texts[1]


def test_scores_are_those_of_the_forwards_that_prefill_runs(engine):
    ids = prompt(LENGTH)
    score = engine.score(ids)
    session = engine.session()
    for end in (CHUNK, 3 * CHUNK):
        session.prefill(ids[:end])
        expected = torch.log_softmax(session.logits.double(), -1)[int(ids[end])]
        assert abs(float(score.logprobs[end - 1]) - float(expected)) < 1e-4


def test_without_exactness_a_text_goes_on_from_its_live_state(model, closing):
    engine = closing(
        make_recurrent_engine(model, pool_tokens=512, exact=False, checkpoint_chunks=EVERY)
    )
    session = engine.session()
    session.prefill(prompt(CHUNK + 5))
    session.generate(3, eos=None).tokens.tolist()
    before = engine.core.runner.rows_used
    session.append(prompt(4, seed=1))
    assert engine.core.runner.rows_used - before == 5  # the pending token, and four
    session.trim(CHUNK + 2)
    session.append(prompt(3 * CHUNK, seed=2))
    session.generate(CHUNK, eos=None).tokens.tolist()
    assert engine.stats()["checkpoint_states"] > 0
    assert engine.core.checkpoints.held(engine.pager.chain_hashes(session.tokens)) == []


def test_a_prompt_that_does_not_fit_is_refused_and_the_session_stays(hybrid, closing):
    engine = closing(
        make_recurrent_engine(hybrid, pool_tokens=4 * CHUNK, host_bytes=0, disk_bytes=0)
    )
    session = engine.session()
    session.prefill(prompt(2 * CHUNK))
    with pytest.raises(CapacityError):
        session.append(prompt(20 * CHUNK, seed=1))
    session.append(prompt(5, seed=2))
    assert session.length == 2 * CHUNK + 5


def test_a_stream_of_a_session_that_was_emptied_is_refused(hybrid_engine):
    session = hybrid_engine.session()
    session.prefill(prompt(CHUNK))
    stream = session.generate(4, eos=None, stream="tokens")
    next(stream)
    session.trim(0)
    with pytest.raises(InvalidArgumentError, match="the session is empty"):
        next(stream)


def test_speculation_is_refused(hybrid_engine):
    session = hybrid_engine.session()
    session.prefill(prompt(CHUNK))
    with pytest.raises(InvalidArgumentError, match="exact"):
        session.generate(4, speculate="prompt-lookup")


def test_other_rows_than_a_chunks_are_refused(hybrid):
    with pytest.raises(InvalidArgumentError, match="a chunk at a time"):
        make_recurrent_engine(hybrid, rows=CHUNK * 2)
