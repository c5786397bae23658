"""A draft model guesses: the tokens and bits are those of plain decode, in fewer forwards."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest
from apart import alone, apart, ids_of, logprob_bits
from bits import assert_same_session
from drafts import Seen, draft_of, drafted_engine, noisy, shallow
from reference_models import CHUNK, SHIPPED, build, make_engine, prompt

from kvpager import InvalidArgumentError
from kvpager.drafts import DraftModel

IDS = prompt(45, 3)
NEW = 40
GREEDY = {}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    """A draft that is the model itself: every guess is right."""
    with drafted_engine(model, model) as engine:
        yield engine


@pytest.fixture(scope="module")
def often(model):
    """A draft that is right now and then."""
    with drafted_engine(model, noisy(model, 0.05)) as engine:
        yield engine


def drafted(engine, ids, count, **options):
    """A session of its own that was continued with guesses, and its tokens with logprobs."""
    return alone(engine, ids, count, speculate="draft", **options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["itself", "with noise", "without a layer", "another model"])
def test_drafted_text_has_the_tokens_and_the_bits_of_plain_decode(model, draft, options):
    drafts = {
        "itself": lambda: model,
        "with noise": lambda: noisy(model, 0.05),
        "without a layer": lambda: shallow(model, 2),
        "another model": lambda: build("qwen3"),
    }
    with drafted_engine(model, drafts[draft]()) as engine:
        plain, expected = alone(engine, IDS, NEW, **options)
        session, tokens = drafted(engine, IDS, NEW, **options)
        assert tokens == expected
        assert_same_session(session, plain, draft)
        stats = session.speculation
        assert stats.tokens == stats.forwards + stats.accepted
        assert stats.proposed > 0
        if draft == "itself":  # with the same draws, guesses that were sampled are right as well
            assert stats.acceptance == 1
            assert stats.tokens_per_forward > 3
        elif draft == "with noise":
            assert 0 < stats.accepted < stats.proposed


def test_the_shipped_model_without_its_last_layer_guesses_for_it():
    model = build(SHIPPED)
    with drafted_engine(model, shallow(model, 1)) as engine:
        plain, expected = alone(engine, prompt(60, 1), 24)
        session, tokens = drafted(engine, prompt(60, 1), 24)
        assert tokens == expected
        assert_same_session(session, plain, "shipped")


def test_a_bare_model_takes_its_paging_from_the_engine(model):
    with make_engine(model, pool_tokens=512, draft=shallow(model, 1)) as engine:
        ours, theirs = engine.config, engine.draft.config
        assert (theirs.pool_tokens, theirs.chunk_tokens, theirs.host_bytes) == (
            ours.pool_tokens,
            ours.chunk_tokens,
            ours.host_bytes,
        )
        assert engine.draft.rows == engine.rows
        assert theirs.exact is False
        _, expected = alone(engine, IDS, 8)
        assert drafted(engine, IDS, 8)[1] == expected


def test_a_draft_has_options_of_its_own(model):
    options = {"pool_tokens": 64 * 4, "chunk_tokens": 64, "rows": 16, "exact": "all"}
    with drafted_engine(model, model, draft_options=options) as engine:
        assert {name: getattr(engine.draft.config, name) for name in options} == options
        _, expected = alone(engine, IDS, NEW, **SAMPLED)
        session, tokens = drafted(engine, IDS, NEW, **SAMPLED)
        assert tokens == expected
        assert session.speculation.acceptance == 1


@pytest.mark.parametrize("exact", ["all", "reuse", False])
def test_a_draft_guesses_in_any_mode(model, exact):
    with drafted_engine(model, model, draft_options={"exact": exact}) as engine:
        _, expected = alone(engine, IDS, NEW)
        session, tokens = drafted(engine, IDS, NEW)
        assert tokens == expected
        assert session.speculation.acceptance == 1


# Many sessions.


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_completions_with_a_draft_are_those_of_each_prompt_alone(often, options):
    prompts = [prompt(length, length) for length in (5, 16, 33, 70, 21)]
    with Seen(often) as seen:
        completions = often.run(prompts, 20, eos=None, logprobs=True, speculate="draft", **options)
    for ids, completion in zip(prompts, completions):
        _, expected = alone(often, ids, 20, **options)
        assert completion.tokens.tolist() == ids_of(expected)
        assert completion.logprobs.tobytes() == logprob_bits(expected)
    assert 0 < seen.speculation_accepted < seen.speculation_proposed
    assert often.draft.stats()["sequences"] == 0


def test_sessions_of_one_forward_share_the_drafts_forwards(engine):
    def run(count):
        with Seen(engine) as seen:
            engine.run([prompt(20, seed) for seed in range(count)], 24, eos=None, speculate="draft")
        return seen

    one, eight = run(1), run(8)
    assert eight.speculation_accepted > 2 * one.speculation_accepted
    assert eight.draft_forwards < 3 * one.draft_forwards


def test_more_sessions_than_the_draft_has_rows_are_guessed_for_in_turns(model):
    draft_options = {"rows": 2, "chunk_tokens": CHUNK, "pool_tokens": 512}
    with drafted_engine(model, model, draft_options=draft_options) as engine:
        prompts = [prompt(9, seed) for seed in range(5)]
        completions = engine.run(prompts, 12, eos=None, speculate="draft")
        for ids, completion in zip(prompts, completions):
            assert completion.tokens.tolist() == ids_of(alone(engine, ids, 12)[1])
            assert completion.speculation.accepted == completion.speculation.proposed > 0


def test_drafted_looked_up_and_plain_sessions_go_together(often):
    ids = np.tile(prompt(9, 3), 5)
    ways = ["draft", "prompt-lookup", None, "draft"]
    with often.scheduler() as scheduler:
        requests = [scheduler.submit(ids, 20, eos=None, speculate=way) for way in ways]
        while not scheduler.idle:
            scheduler.step()
    _, expected = alone(often, ids, 20)
    for way, request in zip(ways, requests):
        assert request.completion.tokens.tolist() == ids_of(expected)
        assert bool(request.completion.speculation.proposed) == (way is not None)


def test_a_request_that_waited_again_has_the_tokens_it_would_have_had(model, closing):
    """Who gives its chunks up loses its companion too, and both are computed again."""
    often = closing(drafted_engine(model, noisy(model, 0.05), linear="torch"))
    prompts = [prompt(40, seed) for seed in range(3)]
    with often.scheduler() as scheduler:
        requests = [
            scheduler.submit(ids, 40, eos=None, speculate="draft", **SAMPLED) for ids in prompts
        ]
        while len(requests[2].tokens) < 5:
            scheduler.step()
        scheduler._make_room()
        assert [request.state for request in requests] == ["decoding", "decoding", "waiting"]
        assert often.draft.stats()["sequences"] == 2  # the third's companion went with it
        while not scheduler.idle:
            scheduler.step()
    for ids, request in zip(prompts, requests):
        expected = ids_of(alone(often, ids, 40, **SAMPLED)[1])
        assert request.completion.tokens.tolist() == expected
    assert requests[2].completion.speculation.accepted


def test_threads_guess_for_their_sessions_at_once(often):
    expected = [alone(often, prompt(30, seed), 30)[1] for seed in range(3)]
    results = [None] * 3

    def work(seed):
        results[seed] = drafted(often, prompt(30, seed), 30)[1]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


# What its owner does with a session meanwhile.


@pytest.mark.parametrize("taken", [1, 6, 13])
def test_a_stream_goes_on_over_appends_trims_and_forks(often, taken):
    texts = []
    for way in ("draft", None):
        session = apart(often)
        session.prefill(IDS)
        stream = session.generate(NEW, eos=None, speculate=way, **SAMPLED, stream="tokens")
        tokens = list(islice(stream, taken))
        session.append([9, 8, 7])
        tokens += islice(stream, 4)
        session.trim(session.length - 5)
        tokens += islice(stream, 4)
        session.update(np.concatenate([session.tokens[:30], prompt(20, 8)]))
        tokens += islice(stream, 4)
        with session.fork() as twin:
            tokens += twin.generate(7, eos=None, speculate=way, stream="tokens")
            twin.trim(20)
            tokens += twin.generate(7, eos=None, speculate=way, stream="tokens")
        tokens += islice(stream, 4)
        texts.append((tokens, session))
    (ours, session), (theirs, plain) = texts
    assert ours == theirs
    assert_same_session(session, plain, "gone on")


def test_a_fork_goes_on_with_the_companion_of_its_origin(engine):
    session, _ = drafted(engine, prompt(150, 2), 10)
    with session.fork() as twin:
        assert draft_of(twin).length == draft_of(session).length > 140
        with Seen(engine) as seen:
            twin.generate(12, eos=None, speculate="draft").tokens.tolist()
        assert seen.speculation_accepted > 0
        assert seen.draft_tokens_fed < 40
    assert draft_of(session).length > 140
    session.generate(12, eos=None, speculate="draft").tokens.tolist()
    assert session.speculation.acceptance == 1


def test_a_closed_session_gives_the_drafts_chunks_back(model):
    with drafted_engine(model, model) as engine:
        with engine.session() as session:
            session.prefill(IDS)
            session.generate(8, eos=None, speculate="draft").tokens.tolist()
            assert engine.draft.stats()["sequences"] == 1
        assert engine.draft.stats()["sequences"] == 0
        forgotten = engine.session()
        forgotten.prefill(IDS)
        forgotten.generate(8, eos=None, speculate="draft").tokens.tolist()
        del forgotten
        assert engine.draft.stats()["sequences"] == 0


def test_closing_the_engine_closes_the_draft(model):
    draft = build("llama", num_hidden_layers=1)
    engine = make_engine(model, draft=draft)
    inner = engine.draft
    engine.close()
    assert inner.closed
    assert draft.config._attn_implementation != "kvpager"


def test_nothing_is_guessed_after_a_guess_that_ends_the_text(engine, monkeypatch):
    _, tokens = alone(engine, IDS, NEW)
    end = ids_of(tokens)[5]
    session = apart(engine)
    session.prefill(IDS)
    produced = session.generate(NEW, eos=end, speculate="draft").tokens.tolist()
    assert produced == ids_of(tokens)[: ids_of(tokens).index(end) + 1]
    assert session.speculation.proposed == session.speculation.accepted
    assert len(draft_of(session).transcript.tokens) <= session.length


# Arguments.


def test_a_draft_of_another_vocabulary_is_refused(model):
    other = build("llama", vocab_size=320)
    with pytest.raises(InvalidArgumentError, match=r"draft: its vocabulary has 320 .* has 300"):
        make_engine(model, draft=other)
    make_engine(model).close()  # and the model is given back


@pytest.mark.parametrize("exact", ["reuse", False])
def test_a_draft_needs_a_target_whose_rows_do_not_depend_on_their_company(model, exact):
    with pytest.raises(InvalidArgumentError, match=r'draft is given, but .*use exact="all"'):
        make_engine(model, exact=exact, draft=model)


def test_guessing_by_a_draft_that_is_not_there_is_refused(model):
    with make_engine(model) as engine:
        session = engine.session()
        session.prefill(IDS)
        with pytest.raises(InvalidArgumentError, match=r"no draft model; make it with .*draft="):
            session.generate(4, speculate="draft")


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), "cheap", True])
def test_a_cost_that_cannot_be_is_refused(model, cost):
    with pytest.raises(InvalidArgumentError, match=r"DraftModel\.guess_cost is"):
        DraftModel(model, guess_cost=cost)


def test_an_option_that_is_none_is_refused(model):
    with pytest.raises(InvalidArgumentError, match="pool_token"):
        DraftModel(model, pool_token=64)


def test_what_a_guess_costs_is_by_default_told_from_the_parameters(model):
    with make_engine(model, draft=shallow(model, 1)) as engine:
        assert 0.3 < engine.core.drafter.guess_cost < 0.5  # one layer of three, and the head
    with make_engine(model, draft=DraftModel(model, guess_cost=0.25)) as engine:
        assert engine.core.drafter.guess_cost == 0.25


def test_a_draft_is_closed_with_its_engine_and_not_before(model, closing):
    engine = closing(make_engine(model, draft=DraftModel(model)))
    with pytest.raises(InvalidArgumentError, match="the draft of another engine"):
        engine.draft.close()
    session = engine.session()
    session.prefill(prompt(20))
    session.generate(8, speculate="draft", eos=None)
    session.trim(10)
    draft = engine.draft
    engine.close()
    assert draft.closed
    draft.close()
