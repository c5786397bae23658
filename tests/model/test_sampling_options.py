"""Penalties, bias, processors and configs: alone, packed, speculated, restored and in forks."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from apart import Oracle
from reference_models import CHUNK, VOCAB, build, make_engine, prompt
from transformers import GenerationConfig

from kvpager import CorruptSnapshotError, InvalidArgumentError, NonFiniteError
from kvpager.sampling import Sampling, top_log_probabilities

IDS = np.tile(prompt(9, 3), 4)
NEW = 24
COUNTING = {"presence_penalty": 0.8, "frequency_penalty": 0.6, "begin_suppress_tokens": [5, 6]}
EVERY = {"repetition_penalty": 1.3, "logit_bias": {7: 0.9, 8: float("-inf")}, **COUNTING}
KINDS = {
    "greedy": EVERY,
    "sampled": {"temperature": 1.0, "min_p": 0.02, "seed": 7, **EVERY},
    "repetition": {"repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def engine():
    with make_engine(build("llama"), pool_tokens=1024) as engine:
        yield engine


@pytest.fixture(params=KINDS)
def options(request):
    return {"eos": None, **KINDS[request.param]}


def begun(engine, ids=IDS):
    session = engine.session()
    session.prefill(ids)
    return session


def told(session, count=NEW, **options):
    return list(session.generate(count, stream="tokens", **options))


def by_hand(engine, options, count=NEW, ids=IDS):
    """The text token by token, from the session's own logits and the formulas of `Sampling`."""
    with begun(engine, ids) as session:
        named = {name: value for name, value in options.items() if name != "eos"}
        suppressed = tuple(named.pop("begin_suppress_tokens", ()))
        counts = "presence_penalty" in named
        sampling = Sampling(
            **named, begin_suppress_tokens=suppressed, start=len(ids) if counts else 0
        )
        for _ in range(count):
            tokens = session.tokens
            token = sampling.choose(session.logits, len(tokens), tokens)
            session.append([token])
        return session.tokens[len(ids) :].tolist()


def test_a_text_is_chosen_from_the_logits_and_the_tokens_before(engine, options):
    text = told(begun(engine), **options)
    assert text == by_hand(engine, options)
    assert text != told(begun(engine), eos=None)
    assert 8 not in text or "logit_bias" not in options
    if "begin_suppress_tokens" in options:
        assert text[0] not in (5, 6)


def test_speculation_changes_no_token_of_a_text_with_penalties(engine, options):
    plain = told(begun(engine), **options)
    for wrong in (0, 3):
        session = begun(engine)
        text = [*IDS.tolist(), *plain]
        assert told(session, speculate=lambda w=wrong, t=text: Oracle(t, w), **options) == plain
        assert session.speculation.accepted > 3
    assert told(begun(engine), speculate="prompt-lookup", **options) == plain


def test_a_draft_model_guesses_with_the_same_penalties(engine, options):
    plain = told(begun(engine), **options)
    with make_engine(engine.model, pool_tokens=512, draft=build("llama")) as drafting:
        session = begun(drafting)
        assert told(session, speculate="draft", **options) == plain
        assert session.speculation.acceptance > 0.9  # both models are the same


def test_company_changes_no_token_of_a_text_with_penalties(engine, options):
    prompts = [IDS, IDS[:20], prompt(31, 5)]
    alone = [told(begun(engine, ids), **options) for ids in prompts]
    sessions = [begun(engine, ids) for ids in prompts]
    together = {session: [] for session in sessions}
    for session, token in engine.generate_many(sessions, NEW, **options):
        together[session].append(token)
    assert list(together.values()) == alone
    runs = engine.run(prompts, NEW, speculate="prompt-lookup", **options)
    assert [run.tokens.tolist() for run in runs] == alone


@pytest.mark.parametrize("speculate", [None, "prompt-lookup"])
@pytest.mark.parametrize("stops", [0, 9])
def test_a_text_that_was_interrupted_goes_on_as_if_it_was_not(
    engine, options, tmp_path, speculate, stops
):
    """Also after a save, in a fork, and twice in a row: penalties count the earlier tokens too."""
    whole = told(begun(engine), **options)
    session = begun(engine)
    stream = session.generate(NEW, stream="tokens", speculate=speculate, **options)
    first = list(islice(stream, stops))
    session.save(tmp_path / "saved")
    fork = session.fork()
    seed = {"seed": options["seed"]} if "seed" in options else {}
    going_on = {**options, **seed, "speculate": speculate}
    rest = [
        told(one, NEW - stops, **going_on)
        for one in (fork, engine.restore(tmp_path / "saved"), session)
    ]
    assert [first + one for one in rest] == [whole] * 3
    twice = engine.restore(tmp_path / "saved")
    assert first + told(twice, 5, **going_on) + told(twice, 3, **going_on) == whole[: stops + 8]
    twice.save(tmp_path / "again")
    last = engine.restore(tmp_path / "again")
    assert told(last, NEW - stops - 8, **going_on) == whole[stops + 8 :]
    assert last.sampling == session.sampling


def test_the_next_turn_counts_its_own_tokens_alone(engine):
    options = {"eos": None, "presence_penalty": 3.0, "frequency_penalty": 3.0}
    session = begun(engine)
    told(session, **options)
    session.append(prompt(5, seed=9))
    text = session.tokens
    assert told(session, **options) == by_hand(engine, options, ids=text)
    again = list(session.regenerate(NEW, stream="tokens", **options))
    assert again == by_hand(engine, options, ids=text)


def test_requests_that_had_to_make_room_go_on_with_their_penalties(engine, closing):
    small = closing(make_engine(engine.model, pool_tokens=8 * CHUNK, host_bytes=0))
    owners = [begun(small, prompt(5)) for _ in range(3)]
    waited = False
    with small.scheduler() as scheduler:
        requests = [scheduler.submit(prompt(10, n), 20, eos=None, **EVERY) for n in range(5)]
        while not scheduler.idle:
            scheduler.step()
            waited |= any(len(one.tokens) and one.state == "waiting" for one in requests)
    assert waited
    assert len(owners) == 3
    for n, request in enumerate(requests):
        expected = told(begun(engine, prompt(10, n)), 20, eos=None, **EVERY)
        assert request.completion.tokens.tolist() == expected


def test_a_session_without_new_options_is_saved_with_the_bytes_it_had(engine, tmp_path):
    session = begun(engine)
    told(session, 5, eos=None, temperature=0.5, seed=3)
    session.save(tmp_path / "saved")
    raw = (tmp_path / "saved").read_bytes()
    assert b'"sampling":{"seed":3,"temperature":0.5,"top_k":0,"top_p":1.0}' in raw.replace(
        b" ", b""
    )
    assert not any(name.encode() in raw for name in ("min_p", "penalty", "bias", '"start"'))


class Recorder:
    """A processor that forbids a token, and records what it was called with."""

    def __init__(self, forbidden=None, raises_at=None):
        self.calls = []
        self.forbidden = forbidden
        self.raises_at = raises_at

    def __call__(self, input_ids, scores):
        assert input_ids.dtype == torch.int64
        assert scores.dtype == torch.float32
        assert scores.shape == (1, VOCAB)
        self.calls.append(input_ids[0].tolist())
        if len(self.calls) == self.raises_at:
            raise RuntimeError("no more")
        if self.forbidden is not None:
            scores[0, self.forbidden] = -torch.inf
        return scores


@pytest.mark.parametrize("speculate", ["none", "oracle", "prompt-lookup"])
def test_processors_see_each_text_once_and_in_order(engine, options, speculate):
    plain = told(begun(engine), **options)
    forbidden = plain[3]
    expected = {**options, "logit_bias": options.get("logit_bias", {}) | {forbidden: -np.inf}}
    expected = told(begun(engine), **expected)
    recorder, session = Recorder(forbidden), begun(engine)
    text = [*IDS.tolist(), *expected]
    ways = {"none": None, "oracle": lambda: Oracle(text, 4), "prompt-lookup": "prompt-lookup"}
    found = told(session, logits_processor=[recorder], speculate=ways[speculate], **options)
    assert found == expected
    assert recorder.calls == [text[: len(IDS) + n] for n in range(NEW)]
    if speculate == "oracle":
        assert session.speculation.accepted > 3


def test_processors_see_each_text_once_although_guesses_were_dropped(engine, tmp_path):
    plain = told(begun(engine), eos=None)
    recorder, session = Recorder(), begun(engine)
    text = [*IDS.tolist(), *plain]
    stream = session.generate(
        NEW,
        stream="tokens",
        eos=None,
        speculate=lambda: Oracle(text, 0),
        logits_processor=[recorder],
    )
    found = []
    for token in stream:
        found.append(token)
        session.save(tmp_path / "saved")  # drops the guesses that were accepted
    assert found == plain
    assert recorder.calls == [text[: len(IDS) + n] for n in range(NEW)]


@pytest.mark.parametrize("speculates", [False, True])
def test_a_processor_that_raises_leaves_the_session_as_it_was_before_that_token(engine, speculates):
    plain = told(begun(engine), eos=None)
    text = [*IDS.tolist(), *plain]
    for produced in range(4, 12):  # the last and other guesses of a forward among them
        session, recorder = begun(engine), Recorder(raises_at=produced + 1)
        stream = session.generate(
            NEW,
            stream="tokens",
            eos=None,
            speculate=(lambda: Oracle(text, 0)) if speculates else None,
            logits_processor=[recorder],
        )
        with pytest.raises(InvalidArgumentError, match=r"\[0\], Recorder, raised RuntimeError"):
            list(stream)
        assert session.tokens.tolist() == text[: len(IDS) + produced]
        assert len(recorder.calls) == produced + 1
    assert told(session, NEW - produced, eos=None) == plain[produced:]


def test_a_processor_that_fails_ends_its_own_request_alone(engine):
    plain = [told(begun(engine, ids), eos=None) for ids in (IDS, IDS[:20])]
    with engine.scheduler() as scheduler:
        good = scheduler.submit(IDS, NEW, eos=None, logits_processor=[Recorder()])
        bad = scheduler.submit(
            IDS[:20],
            NEW,
            eos=None,
            speculate=lambda: Oracle([*IDS[:20].tolist(), *plain[1]], 0),
            logits_processor=[Recorder(raises_at=3)],
        )
        while not scheduler.idle:
            scheduler.step()
    assert good.completion.tokens.tolist() == plain[0]
    assert isinstance(bad.completion.error, InvalidArgumentError)
    assert bad.completion.tokens.tolist() == plain[1][:2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None; expected scores"),
        (torch.zeros(VOCAB), r"returned a tensor \[300\]"),
    ],
)
def test_processors_that_return_no_scores_are_refused(engine, returned, message):
    session = begun(engine)
    with pytest.raises(InvalidArgumentError, match=message):
        told(session, logits_processor=[lambda ids, scores: returned])
    with pytest.raises(NonFiniteError, match="after bias, penalties and processors"):
        told(session, logits_processor=[lambda ids, scores: scores * torch.nan])
    assert session.length == len(IDS)


def test_processors_of_transformers_work_as_they_are(engine):
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    text = [*IDS.tolist(), *told(begun(engine), eos=None, logits_processor=processors)]
    before = set(zip(IDS.tolist(), IDS[1:].tolist()))
    pairs = list(zip(text[len(IDS) - 1 :], text[len(IDS) :]))
    assert len(set(pairs)) == len(pairs)
    assert not before & set(pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias has token id 300; expected ids from 0 to 299"),
        ({"suppress_tokens": [1, VOCAB]}, r"suppress_tokens\[1\] is 300"),
        ({"begin_suppress_tokens": [-1]}, r"begin_suppress_tokens\[0\] is -1"),
        ({"logits_processor": [3]}, r"logits_processor\[0\] is 3"),
        ({"logits_processor": 3}, "logits_processor is 3; expected a list"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs is True"),
        ({"top_logprobs": 2}, "logprobs=True with it"),
        ({"min_p": 2}, "min_p is 2"),
        ({"generation_config": "mine"}, "generation_config is 'mine'"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),
        ({"presense_penalty": 1}, "did you mean presence_penalty"),
    ],
)
def test_options_are_checked_at_the_call(engine, options, message):
    session = begun(engine)
    with pytest.raises(InvalidArgumentError, match=message):
        session.generate(3, **options)
    assert session.length == len(IDS)


def test_numbers_of_numpy_and_torch_are_taken_everywhere(engine):
    plain = {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.125, "top_logprobs": 2}
    expected = told(begun(engine), eos=None, seed=3, logprobs=True, **plain)
    for made in (np.array, torch.tensor, lambda value: np.array(value)[()]):
        given = {name: made(value) for name, value in plain.items()}
        found = told(begun(engine), eos=None, seed=3, logprobs=True, **given)
        assert found == expected


def test_log_probabilities_and_alternatives_are_those_of_the_raw_logits(engine, options):
    session = begun(engine)
    found = told(session, 8, logprobs=True, top_logprobs=4, **options)
    score = engine.score(session.tokens)
    text = session.tokens
    for n, token in enumerate(found):
        assert np.float32(token.logprob) == score.logprobs[len(IDS) + n - 1]
        with begun(engine, text[: len(IDS) + n]) as until:
            assert token.top == top_log_probabilities(until.logits, 4)
    assert all(not token.top for token in told(session, 2, logprobs=True, **options))
    asked = {"logprobs": True, "top_logprobs": 4, **options}
    whole = begun(engine).generate(8, **asked)
    (run,) = engine.run([IDS], 8, **asked)
    assert whole.top_logprobs == run.top_logprobs == [token.top for token in found]
    assert begun(engine).generate(2, logprobs=True, eos=None).top_logprobs is None


def test_a_generation_config_is_the_options_it_stands_for(engine):
    config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.2,
        suppress_tokens=[4, 5],
        sequence_bias={(9,): 1.5},
        max_new_tokens=NEW,
    )
    options = {"temperature": 0.8, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}
    named = {**options, "suppress_tokens": [4, 5], "logit_bias": {9: 1.5}, "seed": 5, "eos": None}
    expected = told(begun(engine), **named)
    assert told(begun(engine), seed=5, eos=None, generation_config=config) == expected
    asked = {"seed": 5, "eos": None, "generation_config": config}
    assert begun(engine).generate(**asked).tokens.tolist() == expected  # as long as it says
    assert begun(engine).generate(3, **asked).tokens.tolist() == expected[:3]
    assert engine.run([IDS], **asked)[0].tokens.tolist() == expected
    assert told(begun(engine), seed=5, eos=None, temperature=0, generation_config=config) == told(
        begun(engine), **{**named, "temperature": 0}
    )


def test_a_length_and_strings_that_end_a_text_are_passed_on(engine):
    session = begun(engine)
    with pytest.raises(InvalidArgumentError, match="max_new_tokens is None"):
        session.generate()
    strings = GenerationConfig(stop_strings=["END"], max_new_tokens=4)
    with pytest.raises(
        InvalidArgumentError, match=r"stop\[0\] is 'END', but the engine has no tok"
    ):
        session.generate(generation_config=strings)
    assert session.length == len(IDS)


def test_the_models_own_config_is_the_default_where_it_samples(engine, monkeypatch):
    greedy = told(begun(engine), eos=None)
    own = GenerationConfig(do_sample=True, temperature=0.9, top_k=11, eos_token_id=None)
    monkeypatch.setattr(engine.model, "generation_config", own)
    expected = told(begun(engine), seed=4, eos=None, temperature=0.9, top_k=11)
    assert expected != greedy
    for config in ({}, {"generation_config": "auto"}, {"generation_config": "model"}):
        assert told(begun(engine), seed=4, eos=None, **config) == expected
    assert engine.run([IDS], NEW, seed=4, eos=None)[0].tokens.tolist() == expected
    for options in ({"temperature": 0}, {"generation_config": None}):
        assert told(begun(engine), seed=4, eos=None, **options) == greedy
    hotter = told(begun(engine), seed=4, eos=None, temperature=3.0)  # named ones come first
    assert hotter == told(begun(engine), seed=4, eos=None, temperature=3.0, top_k=11)


def test_without_do_sample_the_models_own_config_is_used_on_request_alone(engine, monkeypatch):
    greedy = told(begun(engine), eos=None)
    own = GenerationConfig(temperature=0.9, suppress_tokens=greedy[:1], num_beams=2)
    monkeypatch.setattr(engine.model, "generation_config", own)
    assert told(begun(engine), eos=None) == greedy
    with pytest.raises(InvalidArgumentError, match=r"num_beams=2.*or generation_config=None"):
        told(begun(engine), eos=None, generation_config="model")
    own.num_beams = 1
    assert told(begun(engine), eos=None, generation_config="model") != greedy


def test_a_saved_bias_of_a_token_that_is_none_is_refused(engine, tmp_path):
    session = begun(engine)
    told(session, 3, eos=None, logit_bias={7: 1.0})
    session.transcript.sampling = Sampling(logit_bias={VOCAB: 1.0})
    session.save(tmp_path / "saved")
    with pytest.raises(CorruptSnapshotError, match=r"session\.sampling names token id 300"):
        engine.restore(tmp_path / "saved")
    assert json.dumps(Sampling(logit_bias={7: 1.0}).to_json()["logit_bias"]) == '{"7": 1.0}'
