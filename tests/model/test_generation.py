"""How tokens are chosen, when generation ends, and that neither depends on company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_models import build, make_engine, prompt

from kvpager import Agreement, GeneratedToken, InvalidArgumentError, NonFiniteError
from kvpager.sampling import Sampling, log_probability, uniform


@pytest.fixture(scope="module")
def engine():
    with make_engine(build("qwen3"), pool_tokens=512) as engine:
        yield engine


@pytest.fixture
def session(engine):
    with engine.session() as session:
        session.prefill(prompt(40))
        yield session


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_of_equals():
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, -torch.inf])
    assert Sampling().choose(logits, 0) == 1


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    sampling = Sampling(temperature=0.7, seed=5)
    drawn = np.bincount([sampling.choose(logits, p) for p in range(20000)], minlength=4) / 20000
    expected = torch.softmax(logits / 0.7, 0).numpy()
    np.testing.assert_allclose(drawn, expected, atol=0.012)
    assert drawn[3] == 0


def test_a_draw_depends_on_seed_and_position_alone():
    assert uniform(3, 17) == uniform(3, 17)
    values = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(values) == 400
    assert all(0 <= value < 1 for value in values)
    # Fixed for ever: a session saved by one version goes on in the next.
    assert uniform(0, 0) == float.fromhex("0x1.7a5d3204726c0p-7")
    assert uniform(7, 123456) == float.fromhex("0x1.53fe8fbca2874p-2")
    assert uniform(2**64 - 1, 5) == float.fromhex("0x1.da091acab6812p-2")


def test_top_k_keeps_the_k_most_likely_and_the_lowest_ids_of_equals():
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    sampling = Sampling(temperature=5.0, top_k=2, seed=1)
    assert {sampling.choose(logits, p) for p in range(200)} == {1, 2}
    many_equals = torch.arange(4000) % 3 / 2
    assert {sampling.choose(many_equals, p) for p in range(200)} == {2, 5}
    assert Sampling(temperature=1.0, top_p=1e-6).choose(many_equals, 0) == 2


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    plain = [Sampling(1.0, seed=2).choose(logits, p) for p in range(100)]
    for top_k in (50, 1000):
        assert [Sampling(1.0, top_k=top_k, seed=2).choose(logits, p) for p in range(100)] == plain


def test_a_temperature_next_to_zero_is_greedy():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    assert {Sampling(temperature=1e-310, seed=s).choose(logits, 5) for s in range(20)} == {2}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(temperature=1.0, top_p=top_p, seed=4)
        assert {sampling.choose(logits, p) for p in range(400)} == kept


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(value):
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(NonFiniteError, match="position 9"):
            sampling.choose(torch.tensor([0.0, value, 1.0]), 9)
    with pytest.raises(NonFiniteError):
        Sampling().choose(torch.full((3,), -torch.inf), 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"seed": [1, 2]}, "seed has 2 values"),
        ({"eos": "dot"}, "eos is 'dot'"),
        ({"eos": [2, -1]}, r"eos\[1\] is -1"),
        ({"stop": [[]]}, r"stop\[0\] is empty"),
        ({"stop": [[1], [10**6]]}, r"stop\[1\]\[0\]"),
    ],
)
def test_arguments_out_of_range_are_refused_at_the_call(session, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        session.generate(3, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, session, **options: session.generate(4, **options, stream="tokens"),
        lambda engine, session, **options: session.regenerate(
            4, from_position=1, **options, stream="tokens"
        ),
        lambda engine, session, **options: engine.generate_many([session], 4, **options),
        lambda engine, session, **options: engine.run([[1, 2]], 4, **options),
        lambda engine, session, **options: engine.scheduler().submit([1, 2], 4, **options),
    ],
    ids=["generate", "regenerate", "generate_many", "run", "submit"],
)
def test_an_option_that_is_unknown_is_refused_with_the_nearest_there_is(engine, session, call):
    before = session.tokens
    with pytest.raises(InvalidArgumentError, match="no option 'temprature'; did you mean temperat"):
        call(engine, session, temprature=1.0)
    assert np.array_equal(session.tokens, before)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_a_generation_of_no_tokens_is_refused(session, count):
    with pytest.raises(InvalidArgumentError, match="max_new_tokens is"):
        session.generate(count)


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(engine, session):
    def draw(seed):
        with session.fork() as fork:
            return fork.generate(20, temperature=1.0, seed=seed, eos=None).tokens.tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_interrupted_sampling_draws_what_uninterrupted_does(session):
    with session.fork() as fork:
        whole = fork.generate(12, temperature=1.0, seed=6, eos=None).tokens.tolist()
    pieces = []
    for count in (1, 5, 2, 4):
        pieces += session.generate(count, temperature=1.0, seed=6, eos=None, stream="tokens")
    assert pieces == whole


def test_the_sessions_seed_is_the_one_used_last(session):
    with session.fork() as fork:
        whole = fork.generate(8, temperature=1.0, seed=77, eos=None).tokens.tolist()
    first = session.generate(4, temperature=1.0, seed=77, eos=None).tokens.tolist()
    assert first + session.generate(4, temperature=1.0, eos=None).tokens.tolist() == whole


def test_company_changes_no_token(engine):
    alone = []
    for seed in range(5):
        with engine.session() as session:
            session.prefill(prompt(30 + seed, seed))
            alone.append(session.generate(10, temperature=1.0, seed=seed, eos=None).tokens.tolist())
    sessions = [engine.session() for _ in range(5)]
    engine.prefill_many((s, prompt(30 + i, i)) for i, s in enumerate(sessions))
    together = {id(session): [] for session in sessions}
    for session, token in engine.generate_many(
        sessions, 10, temperature=1.0, seed=range(5), eos=None
    ):
        together[id(session)].append(token)
    assert [together[id(session)] for session in sessions] == alone
    for session in sessions:
        session.close()


def test_more_sessions_than_rows_take_turns(closing):
    engine = closing(make_engine(build("llama"), pool_tokens=1024))
    sessions = [engine.session() for _ in range(engine.rows + 3)]
    engine.prefill_many((s, prompt(4, i)) for i, s in enumerate(sessions))
    counts = dict.fromkeys(map(id, sessions), 0)
    for session, _ in engine.generate_many(sessions, 2, eos=None):
        counts[id(session)] += 1
    assert set(counts.values()) == {2}


def test_an_end_token_is_produced_and_ends_generation(session):
    with session.fork() as fork:
        whole = fork.generate(10, eos=None).tokens.tolist()
    end = whole[3]
    assert session.generate(10, eos=end).tokens.tolist() == whole[: whole.index(end) + 1]
    assert session.pending == end


def test_the_models_own_end_token_is_the_default(session, engine, monkeypatch):
    with session.fork() as fork:
        whole = fork.generate(10, eos=None).tokens.tolist()
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [whole[2], 1])
    assert session.generate(10).tokens.tolist() == whole[: whole.index(whole[2]) + 1]


def test_a_stop_sequence_is_produced_and_ends_generation(session):
    with session.fork() as fork:
        whole = fork.generate(10, eos=None).tokens.tolist()
    produced = session.generate(10, eos=None, stop=[[299, 299, 299], whole[4:6]]).tokens.tolist()
    end = next(i for i in range(len(whole)) if whole[i : i + 2] == whole[4:6]) + 2
    assert produced == whole[:end]


def test_tokens_are_streamed_as_they_are_produced(engine, session):
    before = engine.core.runner.forwards
    stream = session.generate(5, eos=None, stream="tokens")
    assert engine.core.runner.forwards == before
    for count in range(5):
        next(stream)
        assert engine.core.runner.forwards == before + count


def test_logprobs_come_with_the_tokens_and_are_those_of_a_score(engine, session):
    prompt_tokens = session.length
    with session.fork() as fork:
        plain = fork.generate(12, temperature=1.0, seed=4, eos=None).tokens.tolist()
    told = list(
        session.generate(12, temperature=1.0, seed=4, eos=None, logprobs=True, stream="tokens")
    )
    assert all(isinstance(token, GeneratedToken) for token in told)
    assert [token.id for token in told] == plain
    seen = np.array([token.logprob for token in told], dtype=np.float32)
    assert [float(value) for value in seen] == [token.logprob for token in told]  # no rounding
    score = engine.score(session.tokens)
    assert score.logprobs[prompt_tokens - 1 :].tobytes() == seen.tobytes()
    agreement = score.against(seen)
    assert agreement == Agreement(
        tokens=12, differing=0, max_abs_delta=0.0, approx_kl=0.0, clip_fraction=0.0
    )
    assert "0 of 12 log-probabilities differ" in str(agreement)
    assert score.against([token.logprob for token in told]) == agreement


def test_logprobs_are_the_models_whatever_the_sampling(session):
    """Of a greedy token under a low temperature the sampler's own would be near zero."""
    logits = session.logits
    token = next(
        session.generate(1, temperature=0.01, top_k=1, eos=None, logprobs=True, stream="tokens")
    )
    assert token.logprob == np.float32(log_probability(logits, token.id))
    assert token.logprob < -0.5


def test_logprobs_of_several_sessions_come_with_their_sessions(engine, session):
    others = [session.fork() for _ in range(2)]
    alone = list(session.generate(5, eos=None, logprobs=True, stream="tokens"))
    for other, token in engine.generate_many(others, 5, eos=None, logprobs=True):
        assert token == alone[other.length - 41]
    for other in others:
        other.close()


def test_an_agreement_counts_bits_and_measures_the_rest(engine, session):
    told = list(
        session.generate(10, temperature=1.0, seed=4, eos=None, logprobs=True, stream="tokens")
    )
    score = engine.score(session.tokens)
    seen = np.array([token.logprob for token in told], dtype=np.float32)
    seen[3] = np.nextafter(seen[3], np.float32(0))
    seen[7] -= np.float32(0.5)
    agreement = score.against(seen)
    delta = (score.logprobs[-10:].astype(np.float64) - seen)[[3, 7]]
    assert (agreement.tokens, agreement.differing) == (10, 2)
    assert agreement.max_abs_delta == delta[1]
    assert agreement.clip_fraction == 0.1
    np.testing.assert_allclose(
        agreement.approx_kl, np.sum(np.exp(delta) - 1 - delta) / 10, rtol=1e-9
    )


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([], r"shape \[0\]"),
        ([0.0] * 60, r"shape \[60\]; expected \[k\] with k from 1 to 42"),
        ([[0.0]], r"shape \[1, 1\]"),
        ([1, 2], "no float32"),
        ([0.1], "no float32"),
    ],
)
def test_log_probabilities_that_cannot_be_those_of_a_generation_are_refused(
    engine, session, logprobs, message
):
    session.generate(3, eos=None).tokens.tolist()
    with pytest.raises(InvalidArgumentError, match=message):
        engine.score(session.tokens).against(logprobs)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_logprobs_is_true_or_false(session, value):
    with pytest.raises(InvalidArgumentError, match="logprobs is"):
        session.generate(3, logprobs=value)
