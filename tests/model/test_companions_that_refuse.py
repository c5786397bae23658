"""A trim that a target or its draft refuses costs nothing else; what was emptied is filled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from apart import alone, apart, ids_of
from bits import assert_same_bits, assert_same_session
from companion_models import CHUNK, member
from drafts import Seen, draft_of, drafted_engine
from recurrent_models import make_recurrent_engine
from reference_models import make_engine, prompt

from kvpager._runtime.scheduling.trim import PrimaryCache
from kvpager.companions import NeedsCheckpoint, Refused

SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 7, "eos": None}
PROMPT = 200
CUT = 100


@pytest.fixture(scope="module")
def target():
    return member("dense")


@pytest.fixture(scope="module")
def cold(target):
    with make_engine(target, pool_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(target):
    """Its draft sees 40 tokens back, and can be cut by 16 more."""
    options = {"rewind_tokens": CHUNK}
    with drafted_engine(target, member("windowed", layers=2), draft_options=options) as engine:
        yield engine


@pytest.fixture(scope="module")
def hybrid():
    with make_recurrent_engine(member("recurrent"), pool_tokens=512) as engine:
        yield engine


class Refusing:
    """A companion that has come as far as anybody, and cannot be cut."""

    kind = "refusing"

    def __init__(self, length):
        self.length = length

    def trim(self, position):
        return Refused("it is not made for that")

    def reset(self):
        self.length = 0

    def close(self):
        pass


def test_a_draft_that_refuses_costs_no_forward_of_the_target_and_no_draw(engine, cold):
    """Seen: one trim of the two failed, and both caches and the sampler were made anew."""
    session = apart(engine)
    session.prefill(prompt(PROMPT))
    told = session.generate(30, speculate="draft", **SAMPLED).tokens.tolist()
    computed, sampling = session.tokens_computed, session.sampling
    kv = [part.clone() for part in session.sequence.read_kv(1, 0, PROMPT + 5)]
    with Seen(engine) as seen:
        session.trim(PROMPT + 5)
        assert draft_of(session).length == PROMPT + 5  # within reach
        session.trim(CUT)
    assert (seen.trim_primary_refused, seen.trim_companion_refused) == (0, 1)
    assert seen.model_forwards == seen.draft_forwards == 0
    assert (session.committed, draft_of(session).length) == (CUT, 0)
    assert session.sampling == sampling
    for now, was in zip(session.sequence.read_kv(1, 0, CUT), kv):
        assert_same_bits(now, was[:CUT], "K/V of the target")
    session.append(prompt(PROMPT)[CUT:])
    assert session.generate(30, speculate="draft", **SAMPLED).tokens.tolist() == told
    assert session.tokens_computed - computed == PROMPT - CUT
    _, expected = alone(cold, prompt(PROMPT), 30, **SAMPLED)
    assert told == ids_of(expected)


def test_a_companion_that_refuses_costs_a_recurrent_target_no_checkpoint(hybrid):
    """Seen: the checkpoints of the target went with the cache of the draft."""
    session = hybrid.session()
    session.prefill(prompt(PROMPT, 1))
    session.transcript.companions.append(Refusing(PROMPT))
    held = session.transcript.states.nearest(CUT)
    assert held > 0
    before = hybrid.stats()
    session.trim(CUT)
    after = hybrid.stats()
    assert session.transcript.companions[0].length == 0
    assert session.committed == held
    assert after["checkpoint_states"] == before["checkpoint_states"] > 1
    assert after["tokens_reprefilled"] - before["tokens_reprefilled"] == 2 * CUT - held
    session.transcript.companions.clear()
    rows = hybrid.core.runner.rows_used
    session.append([5])
    assert hybrid.core.runner.rows_used - rows == CUT - held + 1


def test_a_target_that_refuses_keeps_its_text_its_sampler_and_chunks_of_others(closing):
    """Seen: after a reset everything was computed again, and drawn from another state."""
    windowed = member("windowed")
    engine = closing(make_engine(windowed, pool_tokens=512, rewind_tokens=CHUNK))
    session, other = engine.session(), engine.session()
    session.prefill(prompt(PROMPT))
    other.prefill(prompt(CUT + 12))
    told = session.generate(20, **SAMPLED).tokens.tolist()
    trims = replace(engine.core.transcripts.trims)
    session.trim(CUT)
    assert engine.core.transcripts.trims.trim_primary_refused == trims.trim_primary_refused + 1
    assert session.tokens.tolist() == prompt(CUT).tolist()
    assert session.sampling.seed == SAMPLED["seed"]
    computed = session.tokens_computed
    session.append(prompt(PROMPT)[CUT:])
    assert session.tokens_computed - computed <= PROMPT - CUT + CHUNK  # the rest was found
    assert session.generate(20, **SAMPLED).tokens.tolist() == told


@pytest.mark.parametrize("kind", ["dense", "windowed", "recurrent"])
def test_a_draft_that_was_emptied_is_filled_again_and_guesses_as_well_as_before(
    target, cold, closing, kind
):
    """Seen: right tokens, and a draft that knew nothing of the prefix for the rest of its life."""
    engine = closing(drafted_engine(target, member(kind, layers=2)))
    session = apart(engine)
    session.prefill(prompt(PROMPT))
    session.generate(2 * CHUNK, eos=None, speculate="draft").tokens.tolist()
    level = session.speculation.acceptance
    assert level > 0.4
    draft_of(session).reset()
    before = session.speculation
    with Seen(engine) as seen:
        session.generate(CHUNK, eos=None, speculate="draft").tokens.tolist()
    assert seen.draft_tokens_fed >= PROMPT
    assert draft_of(session).length > PROMPT + 2 * CHUNK
    assert session.speculation.accepted > before.accepted  # within one chunk
    before = session.speculation
    session.generate(2 * CHUNK, eos=None, speculate="draft").tokens.tolist()
    again = session.speculation
    ratio = (again.accepted - before.accepted) / (again.proposed - before.proposed)
    assert ratio > level - 0.25
    whole = apart(cold)
    whole.prefill(session.tokens)
    session.prefill(session.tokens)
    assert_same_session(session, whole, f"with a {kind} draft that was emptied")


def test_a_hybrid_that_was_cut_says_what_a_cold_one_says_and_not_what_its_state_was(hybrid):
    """Seen: K/V were cut, success was told, and the state still was that of the longer text."""
    session = hybrid.session()
    session.prefill(prompt(PROMPT, 2))
    stale = session.transcript.states.at(PROMPT)
    session.trim(CUT)
    assert session.transcript.states.length <= CUT
    with make_recurrent_engine(hybrid.model, pool_tokens=512) as other, other.session() as whole:
        whole.prefill(prompt(PROMPT, 2)[:CUT])
        assert_same_bits(session.logits, whole.logits, "logits after the cut")
        assert not torch.equal(hybrid.core.runner.logits_after(stale), whole.logits)
        new = prompt(2 * CHUNK, 3)
        for one in (session, whole):
            one.append(new)
        assert_same_bits(session.logits, whole.logits, "logits of the text gone on")
        ours, theirs = (one.transcript.states.at(CUT + 2 * CHUNK) for one in (session, whole))
        for a, b in zip(ours.tensors, theirs.tensors):
            assert_same_bits(a, b, "the state of the text gone on")


def test_a_hybrid_that_has_no_state_at_the_cut_says_so_and_changes_nothing(hybrid):
    """Seen: an answer of yes or no, where the truth was "from there on"."""
    session = hybrid.session()
    session.prefill(prompt(PROMPT, 4))
    state, tokens = session.transcript.states.at(PROMPT), session.tokens.tolist()
    before = [tensor.clone() for tensor in state.tensors]
    kv = [part.clone() for part in session.sequence.read_kv(0, 0, PROMPT)]
    answer = PrimaryCache(session.transcript).trim(CUT)
    assert answer == NeedsCheckpoint(CUT // (4 * CHUNK) * 4 * CHUNK)
    assert (session.committed, session.transcript.states.length) == (PROMPT, PROMPT)
    assert session.tokens.tolist() == tokens
    for now, was in zip(session.transcript.states.at(PROMPT).tensors, before):
        assert_same_bits(now, was, "the state")
    for now, was in zip(session.sequence.read_kv(0, 0, PROMPT), kv):
        assert_same_bits(now, was, "K/V")
