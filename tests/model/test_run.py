"""Many prompts at once: each gets what it would have alone, and nobody pays for another's fault."""

from __future__ import annotations

import numpy as np
import pytest
from apart import Oracle, alone, apart, ids_of, logprob_bits
from bits import assert_same_session
from reference_models import VOCAB, build, make_engine, prompt

from kvpager import InvalidArgumentError, NonFiniteError
from kvpager._model.watch.looks import only_looks
from kvpager.sampling import seed_after

LENGTHS = (5, 70, 1, 121, 33, 16, 48, 90)
NEW = 12


@pytest.fixture(scope="module")
def model():
    return build("qwen3")


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model, pool_tokens=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def references(engine, prompts):
    """Of each prompt: the session that ran it alone, and its tokens."""
    return [alone(engine, ids, NEW, temperature=1.0, seed=seed) for seed, ids in enumerate(prompts)]


def run(engine, prompts, **options):
    settings = {"temperature": 1.0, "seed": range(len(prompts)), "eos": None, "logprobs": True}
    return engine.run(prompts, NEW, **{**settings, **options})


def assert_as_alone(completions, references, finish="length"):
    assert [completion.index for completion in completions] == list(range(len(references)))
    for completion, (_, tokens) in zip(completions, references):
        assert completion.finish_reason == finish, completion.error
        assert completion.tokens.dtype == np.int32
        assert completion.tokens.tolist() == ids_of(tokens)
        assert completion.logprobs.dtype == np.float32
        assert completion.logprobs.tobytes() == logprob_bits(tokens)


@pytest.mark.parametrize("max_sessions", [1, 3, None])
@pytest.mark.parametrize("speculate", [None, "prompt-lookup"])
def test_every_prompt_gets_the_bits_it_has_alone(
    engine, prompts, references, max_sessions, speculate
):
    completions = run(
        engine, prompts, max_sessions=max_sessions, speculate=speculate, keep_sessions=True
    )
    assert_as_alone(completions, references)
    for completion, (session, _) in zip(completions, references):
        assert_same_session(completion.session, session, f"prompt {completion.index}")
        completion.session.close()


@pytest.mark.parametrize("options", [{"pool_tokens": 64}, {"host_bytes": "480KiB"}], ids=str)
def test_a_pool_or_budget_for_one_at_a_time_gives_the_same_tokens(
    model, prompts, references, options, closing
):
    engine = closing(make_engine(model, **options))
    assert_as_alone(run(engine, prompts), references)
    stats = engine.stats()
    assert stats["sequences"] == stats["open_blocks"] == stats["reserved_chunks"] == 0


def test_sessions_go_on_beside_prompts(engine, prompts):
    expected, tokens = alone(engine, prompts[1], NEW, temperature=1.0, seed=5)
    reserved = engine.stats()["reserved_chunks"]
    session = apart(engine)
    session.prefill(prompts[1])
    first = session.generate(4, temperature=1.0, seed=5, eos=None).tokens.tolist()
    completions = engine.run(
        [prompts[0], session, prompts[3]], NEW - 4, temperature=1.0, eos=None, logprobs=True
    )
    assert first + completions[1].tokens.tolist() == ids_of(tokens)
    assert completions[1].session is session
    assert completions[1].prompt_tokens == len(prompts[1]) + 4
    assert completions[0].session is None
    assert_same_session(session, expected, "a session in company")
    assert not session.closed
    assert engine.stats()["reserved_chunks"] == reserved


def test_completions_say_how_they_ended_and_how_long_it_took(engine, prompts, references):
    tokens = ids_of(references[1][1])
    ended = run(engine, prompts[1:2], seed=1, eos=tokens[3])[0]
    assert (ended.finish_reason, ended.tokens.tolist()) == (
        "eos",
        tokens[: tokens.index(tokens[3]) + 1],
    )
    stopped = run(engine, prompts[1:2], seed=1, stop=[tokens[4:6]])[0]
    assert (stopped.finish_reason, stopped.tokens.tolist()) == ("stop", tokens[:6])
    assert stopped.prompt_tokens == LENGTHS[1]
    assert 0 < stopped.first_token_s <= stopped.total_s
    assert run(engine, prompts[1:2], logprobs=False)[0].logprobs is None


def test_progress_counts_prompts_and_what_they_produce(engine, prompts):
    calls = []
    ended = run(engine, prompts[:3], progress=lambda *call: calls.append(call))
    total = sum(LENGTHS[:3]) + 3 * NEW
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    tokens = ended[1].tokens.tolist()
    calls.clear()
    run(engine, prompts[1:2], seed=1, eos=tokens[0], progress=lambda *call: calls.append(call))
    assert calls[-1] == (LENGTHS[1] + 1, LENGTHS[1] + 1)  # what was not needed is not to come


def test_tokens_are_told_as_they_are_produced(engine, prompts, references):
    told = {index: [] for index in range(3)}
    run(engine, prompts[:3], on_token=lambda request, token: told[request.index].append(token))
    assert list(told.values()) == [tokens for _, tokens in references[:3]]


def test_a_request_cancelled_from_on_token_ends_with_that_token(engine, prompts, references):
    def stop_second(request, token):
        if request.index == 1 and len(request.tokens) == 4:
            request.cancel()

    reserved = engine.stats()["reserved_chunks"]
    completions = run(engine, prompts[:3], on_token=stop_second)
    assert completions[1].finish_reason == "cancelled"
    assert completions[1].tokens.tolist() == ids_of(references[1][1])[:4]
    assert_as_alone([completions[0]], references[:1])
    assert completions[2].tokens.tolist() == ids_of(references[2][1])
    assert engine.stats()["reserved_chunks"] == reserved


@pytest.mark.parametrize("count", [2, 5])  # within a burst
def test_a_request_cancelled_in_the_middle_of_a_burst_ends_with_that_token(
    engine, prompts, references, count
):
    def stop(request, token):
        if len(request.tokens) == count:
            request.cancel()

    session, tokens = references[1]
    completion = run(
        engine, prompts[1:2], seed=1, on_token=stop, speculate=lambda: Oracle(session.tokens)
    )[0]
    assert completion.finish_reason == "cancelled"
    assert completion.tokens.tolist() == ids_of(tokens)[:count]
    assert completion.speculation.accepted


@pytest.mark.parametrize(
    ("interruption", "keep_sessions"), [(KeyboardInterrupt, False), (SystemExit, True)]
)
def test_an_interruption_leaves_nothing_behind(engine, prompts, interruption, keep_sessions):
    before = engine.stats()
    session = apart(engine)
    session.prefill(prompts[1])
    reserved = engine.stats()["reserved_chunks"]
    told = []

    def interrupt(request, token):
        told.append(token)
        if len(told) == 20:
            raise interruption

    with pytest.raises(interruption) as caught:  # who holds it, holds all that its frames refer to
        run(
            engine,
            [*prompts, session],
            on_token=interrupt,
            keep_sessions=keep_sessions,
            seed=0,
        )
    stats = engine.stats()
    assert stats["sequences"] == before["sequences"] + 1
    assert stats["reserved_chunks"] == reserved
    assert caught.value is not None
    tokens = session.tokens
    whole = apart(engine)
    whole.prefill(tokens)
    session.prefill(tokens)
    assert_same_session(session, whole, "a given session, interrupted")
    session.close()
    whole.close()
    after = engine.stats()
    for name in ("sequences", "open_blocks", "reserved_chunks"):
        assert after[name] == before[name], name
    engine.pager.check_invariants()


def test_keys_that_are_not_finite_end_the_request_they_belong_to(
    model, engine, prompts, references
):
    """In prompt 3 alone, whose token at a position beyond all others poisons its own row."""
    poisoned = VOCAB - 1
    embedding = model.get_input_embeddings()

    def poison(module, arguments, output):
        output[arguments[0] == poisoned] = float("nan")
        return output

    chosen = [0, 1, 3, 4]
    asked = [prompts[i].copy() for i in chosen]
    asked[2][60] = poisoned
    assert not any((ids == poisoned).any() for i, ids in enumerate(asked) if i != 2)
    handle = embedding.register_forward_hook(only_looks(poison))
    try:
        completions = run(engine, asked, seed=chosen)
    finally:
        handle.remove()
    assert completions[2].finish_reason == "error"
    assert isinstance(completions[2].error, NonFiniteError)
    for completion, i in zip(completions, chosen):
        if i != 3:
            assert completion.tokens.tolist() == ids_of(references[i][1])
    engine.pager.check_invariants()


class Faulty:
    """A proposer that fails."""

    def propose(self, tokens, count):
        raise ZeroDivisionError


def test_a_proposer_that_misbehaves_ends_the_requests_that_have_one(engine, prompts, references):
    completions = run(engine, prompts[:2], speculate=Faulty)
    for completion, (_, tokens) in zip(completions, references):
        assert completion.finish_reason == "error"
        assert "Faulty.propose raised ZeroDivisionError" in str(completion.error)
        assert completion.tokens.tolist() == ids_of(tokens)[: len(completion.tokens)]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1, VOCAB]], {}, rf"prompts\[0\]\[1\] is {VOCAB}"),
        ([[1], "text"], {}, r"prompts\[1\] is text"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([1, 2], {}, r"prompts\[0\] has shape"),
        ([[1]], {"seed": [1, 2]}, "seed has 2 values"),
        ([[1]], {"seed": -1}, "seed is -1"),
        ([[1]], {"max_sessions": 0}, "max_sessions is 0"),
        ([[1]], {"logprobs": 1}, "logprobs is 1"),
        ([[1]], {"on_token": 1}, "on_token is 1"),
        ([[1]], {"speculate": "guess"}, "speculate is 'guess'"),
        ([[1]], {"temperature": -1}, "temperature is -1"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(
    engine, prompts, options, message
):
    forwards = engine.core.runner.forwards
    with pytest.raises(InvalidArgumentError, match=message):
        engine.run(prompts, 3, **options)
    assert engine.core.runner.forwards == forwards


def test_a_session_twice_or_empty_or_closed_is_refused(engine):
    session = engine.session()
    with pytest.raises(InvalidArgumentError, match=r"prompts\[0\]: the session is empty"):
        engine.run([session], 3)
    session.prefill(prompt(5))
    with pytest.raises(InvalidArgumentError, match=r"prompts\[1\]: the session is in another"):
        engine.run([session, session], 3)
    session.close()
    with pytest.raises(InvalidArgumentError, match="session is closed"):
        engine.run([session], 3)


def test_no_prompts_are_no_work(engine):
    assert engine.run([], 5) == []


def test_the_seeds_of_several_completions_follow_from_the_first_also_of_a_fresh_one(closing):
    engine = closing(make_engine(build("llama")))
    seeds = [one.seed for one in engine.run([prompt(20)], 3, n=3, temperature=1.0)]
    assert seeds == [seeds[0], seed_after(seeds[0]), seed_after(seed_after(seeds[0]))]
