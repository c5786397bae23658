"""Whatever fails belongs to the request it comes from: the others go on, and nothing loops."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers
from drafts import draft_of
from reference_models import COMMON, VOCAB, build, make_engine, prompt

from kvpager import InvalidArgumentError, UnsupportedModelError

POISON = 299  # a token id
NEW = 4


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=2, eos_token_id=None
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=256))


def poisoned(length):
    ids = prompt(length)
    ids[-1] = POISON
    return ids


def failing_run(engine, monkeypatch, fails):
    """The engine's forwards raise where `fails` says so of a batch."""
    run = engine.core.runner.run

    def watched(batch):
        if fails(batch):
            raise IndexError("index out of range in self")
        return run(batch)

    monkeypatch.setattr(engine.core.runner, "run", watched)


def test_a_forward_that_fails_is_found_by_halving_and_the_others_go_on(engine, monkeypatch):
    prompts = [prompt(20, seed=i) for i in range(5)]
    expected = engine.run(prompts, NEW, eos=None)
    failing_run(engine, monkeypatch, lambda b: (b.tokens[: b.used] == POISON).any())
    found = engine.run([*prompts[:2], poisoned(33), *prompts[2:]], NEW, eos=None)
    assert [completion.finish_reason for completion in found] == ["length"] * 2 + ["error"] + [
        "length"
    ] * 3
    assert isinstance(found[2].error, IndexError)
    for ours, theirs in zip(found[:2] + found[3:], expected):
        assert ours.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("error", [IndexError, UnsupportedModelError])
def test_what_fails_for_everyone_ends_everyone(engine, monkeypatch, error):
    def fails(batch):
        raise error("for everyone")

    monkeypatch.setattr(engine.core.runner, "run", fails)
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(prompt(20, seed=i), NEW) for i in range(4)]
        for _ in range(5):
            scheduler.step()
        assert scheduler.idle
    assert [request.completion.finish_reason for request in requests] == ["error"] * 4
    assert {type(request.completion.error) for request in requests} == {error}
    assert engine.stats()["reserved_chunks"] == 0


def test_a_callback_that_raises_ends_its_request(engine):
    def on_token(request, token):
        if request.index == 1 and len(request.tokens) == 2:
            raise ZeroDivisionError("the owner's")

    first, second = engine.run([prompt(20), prompt(30)], NEW, eos=None, on_token=on_token)
    assert (first.finish_reason, len(first.tokens)) == ("length", NEW)
    assert (second.finish_reason, len(second.tokens)) == ("error", 2)
    assert isinstance(second.error, ZeroDivisionError)


def test_a_proposer_that_raises_ends_its_request(engine):
    class Proposer:
        def propose(self, tokens, most):
            if len(tokens) > 21 and tokens[0] == prompt(20)[0]:
                raise LookupError("no idea")
            return []

    found = engine.run([prompt(20), prompt(20, seed=1)], 6, eos=None, speculate=Proposer)
    assert [completion.finish_reason for completion in found] == ["error", "length"]
    assert "LookupError: no idea" in str(found[0].error)


def test_new_requests_are_served_after_one_that_failed(engine, monkeypatch):
    failing_run(engine, monkeypatch, lambda b: (b.tokens[: b.used] == POISON).any())
    with engine.scheduler(max_sessions=1) as scheduler:
        bad, good = scheduler.submit(poisoned(20), NEW), scheduler.submit(prompt(20), NEW)
        for _ in range(10):
            scheduler.step()
        assert [bad.completion.finish_reason, good.completion.finish_reason] == ["error", "length"]


def test_a_draft_that_fails_leaves_the_text_without_guesses(model, closing, monkeypatch):
    engine = closing(make_engine(model, pool_tokens=256, draft=model))
    (expected,) = engine.run([prompt(20)], NEW, eos=None)

    def fails(batch):
        raise IndexError("the draft's")

    monkeypatch.setattr(engine.draft.core.runner, "run", fails)
    (found,) = engine.run([prompt(20)], NEW, eos=None, speculate="draft")
    assert found.finish_reason == "length"
    assert found.tokens.tolist() == expected.tokens.tolist()


# Positions.

LIMIT = 64


def short(limit=LIMIT):
    config = transformers.LlamaConfig(**COMMON | {"max_position_embeddings": limit})
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_texts_beyond_a_models_positions_are_refused_at_the_call(closing):
    engine = closing(make_engine(short()))
    long = prompt(LIMIT + 1)
    session = engine.session()
    session.prefill(long[:-1])
    session.trim(40)
    text = session.tokens.tolist()
    calls = [
        lambda: session.prefill(np.append(session.tokens, long)),
        lambda: session.update(long),
        lambda: session.generate(LIMIT - 39, stream="tokens"),
        lambda: session.regenerate(LIMIT - 9, from_position=10, stream="tokens"),
        lambda: engine.scheduler().submit(prompt(50), 15),
        lambda: engine.score(prompt(LIMIT + 2)),
        lambda: engine.assemble([long]),
        lambda: engine.cache_segment(long),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"positions for 64 .*beyond_max_positions"):
            call()
    assert session.tokens.tolist() == text
    assert len(session.generate(LIMIT - 40, eos=None).tokens.tolist()) == LIMIT - 40
    assert engine.score(prompt(LIMIT + 1)).logprobs.size == LIMIT


def test_one_text_beyond_a_models_positions_fails_alone_in_a_run(closing):
    engine = closing(make_engine(short()))
    seen = []
    prompts = [prompt(10), prompt(50), prompt(LIMIT + 1), prompt(12)]
    done = engine.run(prompts, 15, n=2, on_token=lambda request, _: seen.append(request.index))
    assert [each.index for each in done] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [each.finish_reason == "error" for each in done] == [False] * 2 + [True] * 4 + [
        False
    ] * 2
    for each in done[2:6]:
        assert isinstance(each.error, InvalidArgumentError)
        expected = rf"prompts\[{each.index}\] with max_new_tokens comes to .* positions for 64"
        assert re.search(expected, str(each.error))
        assert each.tokens.size == 0
    assert set(seen) == {0, 1, 6, 7}
    for each in (done[0], done[6]):
        (alone,) = engine.run([prompts[each.index]], 15, seed=each.seed)
        assert alone.tokens.tolist() == each.tokens.tolist()


def test_a_run_gives_a_session_back_whose_text_is_too_long(closing):
    engine = closing(make_engine(short()))
    session = closing(engine.session())
    session.prefill(prompt(60))
    refused, done = engine.run([session, prompt(5)], 15)
    assert (refused.finish_reason, refused.session) == ("error", session)
    assert done.finish_reason != "error"
    assert session.generate(4, eos=None).tokens.size == 4


def test_an_engine_goes_beyond_rotary_positions_if_told_to(closing):
    engine = closing(make_engine(short(), beyond_max_positions=True))
    with engine.session() as session:
        session.prefill(prompt(LIMIT + 10))
        session.generate(3, eos=None).tokens.tolist()
    same = closing(make_engine(short()))
    assert engine.fingerprint == same.fingerprint


@pytest.mark.parametrize("option", [False, True])
def test_learned_positions_have_an_end(gpt2, option):
    with make_engine(gpt2, beyond_max_positions=option) as engine:
        _, refused = engine.run([prompt(20), prompt(LIMIT + 6)], NEW)
        assert "learned positions for 64" in str(refused.error)
        assert "beyond_max_positions" not in str(refused.error)
        first, second = engine.run([prompt(LIMIT - NEW), prompt(20)], NEW, eos=None)
        assert {first.finish_reason, second.finish_reason} == {"length"}


def test_a_draft_stops_where_its_positions_end(closing):
    target = short(limit=4096)
    engine = closing(make_engine(target, pool_tokens=256, draft=short()))
    (expected,) = engine.run([prompt(50)], 30, eos=None)
    with engine.session() as session:
        session.prefill(prompt(50))
        assert (
            session.generate(30, eos=None, speculate="draft").tokens.tolist()
            == expected.tokens.tolist()
        )
        assert session.speculation.proposed > 0
        assert 50 < draft_of(session).transcript.length <= LIMIT
