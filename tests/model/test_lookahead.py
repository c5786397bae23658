"""Speculation is seen in time alone: at every point where a caller can stop, and in every bit."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from apart import Oracle, apart, ids_of
from bits import assert_same_bits, assert_same_session
from reference_models import CHUNK, build, make_engine, prompt

import kvpager
from kvpager import InvalidArgumentError

IDS = np.tile(prompt(9, 3), 6)
NEW = 40


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model, pool_tokens=1024) as engine:
        yield engine


class Plain:
    """What decoding token after token gives, at every length."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.options = {"eos": None, **options}
        session = self.session()
        self.tokens = list(session.generate(NEW, logprobs=True, **self.options, stream="tokens"))
        self.text = session.tokens

    def session(self):
        session = apart(self.engine)
        session.prefill(IDS)
        return session

    def after(self, count):
        session = self.session()
        stream = session.generate(NEW, **self.options, stream="tokens")
        for _ in range(count):
            next(stream)
        return session

    def speculating(self, wrong=0, **more):
        session = self.session()
        options = {**self.options, "speculate": lambda: Oracle(self.text, wrong), **more}
        return session, session.generate(NEW, **options, stream="tokens")


GREEDY = {}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def plain(request, engine):
    return Plain(engine, **request.param)


@pytest.mark.parametrize("wrong", [0, 2, 5], ids=["right", "every second wrong", "a fifth wrong"])
def test_speculated_text_has_the_tokens_and_the_bits_of_plain_decode(plain, wrong):
    session, stream = plain.speculating(wrong, logprobs=True)
    assert list(stream) == plain.tokens
    assert_same_session(session, plain.after(NEW), "speculated")
    stats = session.speculation
    assert stats.tokens == stats.forwards + stats.accepted
    assert 0 < stats.accepted <= stats.proposed
    assert (stats.accepted == stats.proposed) == (wrong == 0)


def test_speculation_saves_forwards(engine, plain):
    before = engine.stats()
    session, stream = plain.speculating()
    list(stream)
    after = engine.stats()
    forwards = after["model_forwards"] - before["model_forwards"] - 2  # of the prompt
    assert forwards == session.speculation.forwards
    assert session.speculation.tokens_per_forward > 2.5
    assert after["speculation_forwards"] - before["speculation_forwards"] == forwards
    assert after["speculation_accepted"] - before["speculation_accepted"] == (
        session.speculation.accepted
    )


def test_prompt_lookup_accepts_more_than_one_and_a_half_tokens_per_forward_where_text_repeats(
    engine,
):
    """A model of random weights soon goes round in greedy text."""
    plain, guessing = apart(engine), apart(engine)
    for session in (plain, guessing):
        session.prefill(IDS)
    expected = list(plain.generate(160, eos=None, logprobs=True, stream="tokens"))
    assert list(
        guessing.generate(160, eos=None, logprobs=True, speculate="prompt-lookup", stream="tokens")
    ) == (expected)
    assert_same_session(guessing, plain, "prompt lookup")
    assert guessing.speculation.tokens_per_forward > 1.5


OPERATIONS = {
    "nothing": lambda session: None,
    "append": lambda session: session.append([5, 6, 7]),
    "prefill what is held": lambda session: session.prefill(session.tokens),
    "trim the pending token": lambda session: session.trim(session.length - 1),
    "trim into the prompt": lambda session: session.trim(len(IDS) - 3),
    "trim nothing": lambda session: session.trim(session.length),
    "logits": lambda session: session.logits,
    "ledger": lambda session: session.ledger(),
    "generate with another seed": lambda session: session.generate(
        3, temperature=1.5, seed=99, eos=None
    ).tokens.tolist(),
    "generate greedily": lambda session: session.generate(
        3, temperature=0, eos=None
    ).tokens.tolist(),
    "pin": lambda session: session.pin(0, session.committed).release(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("taken", [2, 11])
def test_a_stream_abandoned_anywhere_leaves_what_plain_decode_leaves(plain, taken, operation):
    session, stream = plain.speculating()
    assert list(islice(stream, taken)) == ids_of(plain.tokens[:taken])
    stream.close()
    expected = plain.after(taken)
    for one in (session, expected):
        OPERATIONS[operation](one)
    assert (session.length, session.committed, session.pending) == (
        expected.length,
        expected.committed,
        expected.pending,
    )
    assert len(session.ledger()) == len(expected.ledger())
    assert_same_session(session, expected, f"{operation} after {taken}")
    rest = [one.generate(5, **plain.options).tokens.tolist() for one in (session, expected)]
    assert rest[0] == rest[1]
    assert_same_session(session, expected, f"{operation} after {taken}, gone on")


@pytest.mark.parametrize("taken", [1, 3, 6])
def test_a_stream_goes_on_over_what_its_owner_does_meanwhile(plain, taken):
    reference = plain.session()
    sessions = [
        plain.speculating(),
        (reference, reference.generate(NEW, **plain.options, stream="tokens")),
    ]
    texts = []
    for session, stream in sessions:
        tokens = [next(stream) for _ in range(taken)]
        session.append([9, 8])
        tokens += [next(stream) for _ in range(3)]
        session.trim(session.length - 2)
        tokens += [next(stream) for _ in range(3)]
        with session.fork() as twin:
            tokens += twin.generate(4, **plain.options).tokens.tolist()
        tokens += [next(stream) for _ in range(4)]
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert_same_session(sessions[0][0], reference, "gone on")


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_a_fork_and_a_save_in_the_middle_of_a_burst_have_what_plain_decode_has(
    plain, taken, tmp_path
):
    session, stream = plain.speculating()
    for _ in range(taken):
        next(stream)
    expected = plain.after(taken)
    for name, one in (("speculated", session), ("plain", expected)):
        one.save(tmp_path / name)
    ours, theirs = (
        kvpager.open_snapshot(tmp_path / name).reader for name in ("speculated", "plain")
    )
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert (ours.slice_checksums == theirs.slice_checksums).all()
    told = [json.loads(one.session) for one in (ours, theirs)]
    for one in told:
        del one["salt_digest"]  # each way has a salt of its own
        if not one["sampling"]["temperature"]:
            del one["sampling"]["seed"]  # a fresh one, which greedy decoding draws nothing with
    assert told[0] == told[1]
    assert_same_session(session.fork(), expected, "fork")
    assert list(stream) == ids_of(plain.tokens[taken:])


def test_at_every_token_the_session_is_as_plain_decode_leaves_it(plain):
    session, stream = plain.speculating()
    reference = plain.session()
    for token, other in zip(stream, reference.generate(NEW, **plain.options, stream="tokens")):
        assert token == other
        assert (session.length, session.committed, session.pending) == (
            reference.length,
            reference.committed,
            reference.pending,
        )
        assert session.tokens.tolist() == reference.tokens.tolist()
        assert_same_bits(session.logits, reference.logits, f"logits at {session.length}")


def test_what_is_ahead_takes_no_block_and_seals_nothing(engine, plain):
    session, stream = plain.speculating()
    reference = plain.session()
    other = reference.generate(NEW, **plain.options, stream="tokens")
    for _ in range(NEW):
        next(stream)
        next(other)
        assert -(-session.sequence.length // CHUNK) == -(-session.committed // CHUNK)
        assert session.sequence.length // CHUNK == session.committed // CHUNK


class CommitError(Exception):
    """What a test throws where a forward commits."""


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_an_interruption_around_the_commit_of_a_burst_tells_nobody_a_token_too_many(
    engine, plain, monkeypatch, when
):
    session, stream = plain.speculating()
    taken = [next(stream)]
    commit = kvpager.pager.Forward.commit

    def interrupted(self, accepted=None, **options):
        if accepted is None:
            return commit(self, accepted, **options)
        if when == "after the commit":
            commit(self, accepted, **options)
        raise CommitError

    with monkeypatch.context() as patch:
        patch.setattr(kvpager.pager.Forward, "commit", interrupted)
        with pytest.raises(CommitError):
            taken.extend(stream)
    told = len(taken)
    assert session.tokens.tolist() == [*IDS, *taken]
    produced = session.generate(NEW - told, **plain.options).tokens.tolist()
    assert produced == ids_of(plain.tokens[told:])
    assert_same_session(session, plain.after(NEW), "interrupted")


def test_eos_and_stop_end_speculated_text_where_they_end_plain_text(plain):
    tokens = ids_of(plain.tokens)
    end = tokens[7]
    session, stream = plain.speculating(eos=end)
    assert list(stream) == tokens[: tokens.index(end) + 1]
    assert session.pending == end
    session, stream = plain.speculating(stop=[tokens[5:8]])
    produced = list(stream)
    assert produced[-3:] == tokens[5:8]
    assert produced == tokens[: len(produced)]
    assert session.pending == produced[-1]


def test_streams_that_speculate_and_streams_that_do_not_share_forwards(engine, plain):
    session, _ = plain.speculating()
    other = plain.session()
    produced = {id(session): [], id(other): []}
    for one, token in engine.generate_many(
        [session, other], NEW, **plain.options, speculate=lambda: Oracle(plain.text, 3)
    ):
        produced[id(one)].append(token)
    assert list(produced.values()) == [ids_of(plain.tokens)] * 2


@pytest.mark.parametrize("exact", ["reuse", False])
def test_speculation_without_one_set_of_bits_is_refused_with_the_remedy(model, exact, closing):
    session = closing(make_engine(model, exact=exact)).session()
    session.prefill(IDS)
    with pytest.raises(InvalidArgumentError, match='exact="all"'):
        session.generate(3, speculate="prompt-lookup")
