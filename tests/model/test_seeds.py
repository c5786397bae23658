"""Draws are fresh unless a seed is given, and any can be repeated by the seed that was recorded."""

from __future__ import annotations

import pytest
from reference_models import build, make_engine, prompt

IDS = prompt(30)
HOT = {"temperature": 1.0, "eos": None}


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=512))


def begun(engine, ids=IDS):
    session = engine.session()
    session.prefill(ids)
    return session


def test_sampled_runs_of_one_prompt_differ_and_each_can_be_repeated(engine):
    runs = engine.run([IDS] * 6, 12, **HOT)
    texts = [tuple(completion.tokens.tolist()) for completion in runs]
    seeds = [completion.seed for completion in runs]
    assert len(set(texts)) == len(set(seeds)) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    again = engine.run([IDS] * 6, 12, seed=seeds, **HOT)
    assert [tuple(completion.tokens.tolist()) for completion in again] == texts


def test_sessions_draw_differently_and_record_their_seed(engine):
    sessions = [begun(engine) for _ in range(4)]
    texts = [session.generate(12, **HOT).tokens.tolist() for session in sessions]
    assert len(set(map(tuple, texts))) == 4
    seeded = [
        begun(engine).generate(12, seed=s.sampling.seed, **HOT).tokens.tolist() for s in sessions
    ]
    assert seeded == texts


def test_requests_say_their_seed_before_they_run(engine):
    with engine.scheduler() as scheduler:
        fresh, given = scheduler.submit(IDS, 5, **HOT), scheduler.submit(IDS, 5, seed=7, **HOT)
        assert fresh.seed != 7 == given.seed


def test_greedy_text_is_the_same_whatever_the_seed(engine):
    assert len({tuple(c.tokens.tolist()) for c in engine.run([IDS] * 3, 8, eos=None)}) == 1


def test_regenerated_text_is_another(engine):
    session = begun(engine)
    first = session.generate(12, **HOT).tokens.tolist()
    texts = {tuple(first)} | {
        tuple(session.regenerate(12, **HOT, stream="tokens")) for _ in range(4)
    }
    assert len(texts) == 5
    last = session.tokens.tolist()[len(IDS) :]
    assert session.regenerate(12, seed=session.sampling.seed, **HOT).tokens.tolist() == last


def test_an_interrupted_text_goes_on_with_its_draws(engine):
    whole = begun(engine).generate(12, seed=11, **HOT).tokens.tolist()
    session = begun(engine)
    stream = session.generate(12, seed=11, **HOT, stream="tokens")
    first = [next(stream) for _ in range(5)]
    assert first + session.generate(7, **HOT).tokens.tolist() == whole


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("counting", [{}, {"presence_penalty": 1.5}], ids=["", "counting"])
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
def test_a_text_that_failed_between_a_forward_and_its_token_goes_on_with_its_draws(
    engine, tmp_path, tokens, counting, saved
):
    options = {**HOT, **counting}

    class Fails:
        """A processor that changes nothing, and raises once."""

        left = tokens + 1

        def __call__(self, _, scores):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return scores

    whole = begun(engine).generate(12, seed=11, **options).tokens.tolist()
    session = begun(engine)
    with pytest.raises(KeyboardInterrupt):
        session.generate(12, seed=11, logits_processor=[Fails()], **options)
    assert session.length == len(IDS) + tokens
    if saved:
        session.save(tmp_path / "saved")
        session = engine.restore(tmp_path / "saved")
    session.generate(12 - tokens, **options)
    assert session.tokens.tolist()[len(IDS) :] == whole


@pytest.mark.parametrize(
    "options",
    [HOT, {**HOT, "presence_penalty": 1.5}, {"eos": None, "begin_suppress_tokens": [4, 5]}],
    ids=["sampled", "counting", "suppressing"],
)
def test_a_request_in_a_session_is_what_update_and_generate_make(engine, options):
    """Also where a token of an earlier generation is pending, which the prompt goes on behind."""
    sessions = [begun(engine), begun(engine)]
    for session in sessions:
        session.generate(5, seed=3, **HOT, presence_penalty=1.0)
    for text in (
        [*sessions[0].tokens.tolist(), *prompt(9, 1).tolist()],
        IDS[:20].tolist(),
        sessions[0].tokens.tolist()[:-1],
        sessions[0].tokens.tolist(),
    ):
        direct, scheduled = sessions[0].fork(), sessions[1].fork()
        direct.transcript.sampling = scheduled.transcript.sampling = sessions[0].sampling
        direct.update(text)
        expected = direct.generate(8, **options)
        with engine.scheduler() as scheduler:
            request = scheduler.submit(text, 8, session=scheduled, **options)
            while not scheduler.idle:
                scheduler.step()
        assert request.completion.tokens.tolist() == expected.tokens.tolist()
        assert request.completion.seed == expected.seed
        assert scheduled.sampling == direct.sampling


def test_forks_draw_differently_unless_given_a_seed(engine):
    session = begun(engine)
    session.generate(4, seed=3, **HOT).tokens.tolist()
    forks = [session.fork() for _ in range(3)]
    assert (
        len({tuple(fork.generate(12, **HOT, stream="tokens")) for fork in (session, *forks)}) == 4
    )
    session = begun(engine)
    streams = [session, session.fork(), session.fork()]
    told = {one: [] for one in streams}
    for one, token in engine.generate_many(streams, 12, **HOT):
        told[one].append(token)
    assert len(set(map(tuple, told.values()))) == 3
    same = [session.fork() for _ in range(2)]
    assert len({tuple(fork.generate(6, seed=5, **HOT, stream="tokens")) for fork in same}) == 1


@pytest.mark.parametrize("seed", [None, 21])
def test_what_a_restored_session_draws_is_what_the_uninterrupted_one_does(engine, tmp_path, seed):
    """In the middle of a text, in the turns after it, and where text is dropped and drawn again."""
    session = begun(engine)
    session.generate(9, seed=seed, **HOT).tokens.tolist()
    session.save(tmp_path / "saved")
    restored = engine.restore(tmp_path / "saved")
    for turn in range(3):
        ours, theirs = (one.generate(6, **HOT).tokens.tolist() for one in (session, restored))
        assert ours == theirs
        assert session.sampling == restored.sampling
        for one in (session, restored):
            one.append(prompt(5, seed=turn))
    assert (
        session.regenerate(6, from_position=40, **HOT).tokens.tolist()
        == restored.regenerate(6, from_position=40, **HOT).tokens.tolist()
    )


def test_turns_of_a_conversation_have_seeds_of_their_own(engine):
    session = begun(engine)
    seeds = []
    for turn in range(3):
        session.generate(4, **HOT).tokens.tolist()
        seeds.append(session.sampling.seed)
        session.append(prompt(3, seed=turn))
    assert len(set(seeds)) == 3
    session.generate(4, seed=seeds[0], **HOT).tokens.tolist()
    session.append(prompt(3, seed=0))
    session.generate(4, **HOT).tokens.tolist()
    assert session.sampling.seed == seeds[1]  # a conversation can be repeated by its first seed
