"""K/V and logits depend on the tokens up to a position: not on how, where or with whom."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits, assert_same_session
from reference_models import PROMISED, build, make_engine, prompt

from kvpager import TopK

TOPK = TopK(chunks=3, sinks=16, recent=48)
CASES = [(architecture, dtype) for architecture in PROMISED for dtype in ("float32", "bfloat16")]
pytestmark = pytest.mark.usefixtures("kv_dtype")


def fresh_session(engine):
    """A session that shares no chunk with an earlier one of the same tokens."""
    return engine.adopt(engine.pager.sequence(salt=f"apart {engine.core.runner.forwards}"))


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_decoding_token_by_token_gives_the_bits_of_a_prefill(architecture, dtype, closing):
    engine = closing(make_engine(build(architecture, dtype)))
    ids = prompt(110)
    whole, stepwise = engine.session(), fresh_session(engine)
    whole.prefill(ids)
    stepwise.prefill(ids[:20])
    for token in ids[20:]:
        stepwise.append([int(token)])
    assert_same_session(stepwise, whole, "token by token")


@pytest.mark.parametrize("selection", [None, TOPK], ids=["dense", "topk"])
def test_a_prefill_in_pieces_of_any_length_gives_the_same_bits(selection, closing):
    options = {} if selection is None else {"selection": selection}
    engine = closing(make_engine(build("qwen3"), **options))
    ids = prompt(333)
    whole = engine.session()
    whole.prefill(ids)
    random = np.random.default_rng(5)
    for _ in range(3):
        cuts = np.unique(random.integers(1, len(ids), 6)).tolist()
        session = fresh_session(engine)
        for cut in [*cuts, len(ids)]:
            session.prefill(ids[:cut])
        assert_same_session(session, whole, f"pieces up to {cuts}")


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49, 64])
def test_every_length_around_chunk_and_row_boundaries_continues_with_the_same_bits(length, closing):
    engine = closing(make_engine(build("llama")))
    ids = prompt(90)
    whole, session = engine.session(), fresh_session(engine)
    whole.prefill(ids)
    session.prefill(ids[:length])
    session.prefill(ids)
    assert_same_session(session, whole, f"continued at {length}")


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_sessions_packed_into_common_forwards_give_the_bits_of_each_alone(
    architecture, dtype, closing
):
    model = build(architecture, dtype)
    packed, alone = closing(make_engine(model, pool_tokens=256)), closing(make_engine(model))
    prompts = [prompt(length, seed) for seed, length in enumerate((70, 5, 121))]
    sessions = [packed.session() for _ in prompts]
    packed.prefill_many(zip(sessions, prompts))
    produced = {id(session): [] for session in sessions}
    for session, token in packed.generate_many(sessions, 6, eos=None):
        produced[id(session)].append(token)
    for session, ids in zip(sessions, prompts):
        single = alone.session()
        single.prefill(ids)
        assert single.generate(6, eos=None).tokens.tolist() == produced[id(session)]
        assert_same_session(session, single, f"packed, {len(ids)} tokens")


def test_prompts_that_do_not_fit_into_one_forward_together_are_fed_one_after_another(closing):
    model = build("llama")
    engine, roomy = closing(make_engine(model, pool_tokens=64)), closing(make_engine(model))
    prompts = [prompt(17, seed) for seed in range(3)]
    sessions = [engine.session() for _ in prompts]
    for session, ids in zip(sessions, prompts):
        session.prefill(ids[:15])
    # Each has an unsealed chunk and needs another: six blocks at once, of the four there are.
    engine.prefill_many(zip(sessions, prompts))
    for session, ids in zip(sessions, prompts):
        single = roomy.session()
        single.prefill(ids)
        assert_same_session(session, single, "one after another")


@pytest.mark.parametrize("selection", [None, TOPK], ids=["dense", "topk"])
def test_a_pool_of_an_eighth_gives_the_bits_of_one_that_holds_everything(selection, closing):
    options = {} if selection is None else {"selection": selection}
    model = build("smollm3")
    ids = prompt(768)
    small = closing(
        make_engine(model, pool_tokens=96, debug_shuffle_seed=7, debug_poison=True, **options)
    )
    large = closing(make_engine(model, pool_tokens=1024, **options))
    sessions = []
    for engine in (small, large):
        session = engine.session()
        session.prefill(ids)
        assert len(session.generate(8, eos=None).tokens.tolist()) == 8
        sessions.append(session)
    assert small.stats()["chunks_evicted"] > 0
    assert large.stats()["chunks_evicted"] == 0
    assert_same_session(*sessions, "a pool of 96 tokens")


def test_logits_read_again_are_those_of_the_forward_that_made_them(closing):
    engine = closing(make_engine(build("mistral", "bfloat16")))
    session = engine.session()
    session.prefill(prompt(100))
    first = session.logits
    session.append(prompt(9, seed=1))
    session.trim(100)
    assert_same_bits(session.logits, first, "logits after trim")


def test_a_score_is_the_log_probability_that_generation_saw(closing):
    engine = closing(make_engine(build("qwen3", "bfloat16")))
    session = engine.session()
    session.prefill(prompt(60))
    seen = []
    for token in session.generate(10, temperature=1.0, seed=3, eos=None, stream="tokens"):
        logits = session.logits.double().numpy()
        top = logits.max()
        seen.append(np.float32(logits[token] - top - np.log(np.exp(logits - top).sum())))
    again = engine.score(session.tokens).logprobs[-10:]
    assert again.tobytes() == np.array(seen, dtype=np.float32).tobytes()


def test_prefix_reuse_between_sessions_gives_the_bits_of_computing_it(closing):
    engine = closing(make_engine(build("llama", "bfloat16")))
    ids = prompt(130)
    first, second, apart = engine.session(), engine.session(), fresh_session(engine)
    first.prefill(ids)
    forwards = engine.core.runner.forwards
    second.prefill(np.concatenate([ids[:100], prompt(40, seed=9)]))
    assert engine.stats()["prefix_tokens_reused"] == 96
    assert engine.core.runner.forwards - forwards == 2
    apart.prefill(second.tokens)
    assert_same_session(second, apart, "with a shared prefix")


def test_a_salt_shares_nothing(closing):
    model = build("llama")
    ids = prompt(64)
    engine = closing(make_engine(model, salt="tenant a"))
    engine.session().prefill(ids)
    own = engine.core.tenant.namespace
    as_long = own[:-1] + ("x" if own[-1] != "x" else "y")
    for salt in (as_long, "tenant b", "tenant", ""):
        engine.adopt(engine.pager.sequence(salt=salt)).prefill(ids)
        assert engine.stats()["prefix_tokens_reused"] == 0
    engine.session().prefill(ids)
    assert engine.stats()["prefix_tokens_reused"] == 64
