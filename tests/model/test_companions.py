"""A text whose target and draft are of different kinds is cut: who loses what, and who notices.

Targets are dense or windowed, since speculation needs one set of bits (exact="all"), and drafts of
every kind. A target with recurrent layers has its states for company, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from apart import alone, apart, ids_of
from bits import assert_same_bits
from companion_models import CHUNK, KINDS, member
from drafts import Seen, draft_of, drafted_engine
from recurrent_models import make_recurrent_engine
from reference_models import make_engine, prompt

from kvpager import CapacityError, Engine, InvalidArgumentError
from kvpager.companions import NeedsCheckpoint, Ok, Refused
from kvpager.drafts.companion import DraftCompanion
from kvpager.pager import Sequence

PROMPT = 200
NEW = 40
BETWEEN = 100  # inside a chunk, and between checkpoints
AT = 128  # at a checkpoint
EVERY = 4 * CHUNK
FAR = 1024  # a window can be cut by as much as the text is long
NEAR = CHUNK

# By what they can do: kind and tokens by which a window can be cut.
TARGETS = {
    "dense": ("dense", FAR),
    "windowed, within reach": ("windowed", FAR),
    "windowed, out of reach": ("windowed", NEAR),
}
DRAFTS = {
    "dense": ("dense", FAR),
    "windowed, within reach": ("windowed", FAR),
    "windowed, out of reach": ("windowed", NEAR),
    "recurrent": ("recurrent", FAR),
}


@pytest.fixture(scope="module")
def models():
    return {
        "target": {kind: member(kind) for kind in KINDS},
        "draft": {kind: member(kind, layers=2) for kind in KINDS},
    }


@pytest.fixture(scope="module")
def cold(models):
    """Engines of each kind that keep everything, and speculate nothing."""
    opened = {
        kind: make_engine(model, pool_tokens=2048, rewind_tokens=FAR)
        for kind, model in models["target"].items()
        if kind != "recurrent"
    }
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(scope="module")
def engine_of(models):
    """Engines by target and draft; their pools hold six chunks."""
    opened = {}

    def of(target, draft):
        if (target, draft) not in opened:
            (kind, reach), (draft_kind, draft_reach) = TARGETS[target], DRAFTS[draft]
            options = {"rewind_tokens": draft_reach, "pool_tokens": 96, "host_bytes": "64MiB"}
            opened[target, draft] = drafted_engine(
                models["target"][kind],
                models["draft"][draft_kind],
                draft_options=options,
                pool_tokens=96,
                policy="lru",
                rewind_tokens=reach,
            )
        return opened[target, draft]

    yield of
    for engine in opened.values():
        engine.close()


class Talk:
    """A session that has speculated, and what its caches hold at the moment."""

    def __init__(self, engine, cold_engine):
        self.engine, self.cold = engine, cold_engine
        self.session = apart(engine)
        self.session.prefill(prompt(PROMPT))
        self.produced = self.session.generate(NEW, eos=None, speculate="draft").tokens.tolist()
        assert self.session.speculation.acceptance > 0.4
        self.text = self.session.tokens.tolist()

    @property
    def draft(self):
        return draft_of(self.session)

    def held(self):
        """Bytes of all K/V of target and draft, by layer, from the first position that is held."""
        return [
            (sequence.released, [kv_of(sequence, layer) for layer in layers_of(engine)])
            for engine, sequence in (
                (self.engine, self.session.sequence),
                (self.engine.draft, self.draft.transcript.sequence),
            )
        ]

    def close(self):
        self.session.close()


def layers_of(engine):
    return range(engine.layout.layers)


def kv_of(sequence, layer):
    """Copies of all that is held."""
    held = sequence.read_kv(layer, sequence.released, sequence.length)
    return [part.clone() for part in held]


@pytest.fixture
def talk(engine_of, cold, closing):
    def begin(target, draft):
        return closing(Talk(engine_of(target, draft), cold[TARGETS[target][0]]))

    return begin


def assert_kept(sequence, released, before, upto, what):
    """Each K/V that is still held before `upto` is byte for byte what it was."""
    start = max(released, sequence.released)
    if start >= upto:
        return
    for layer, parts in enumerate(before):
        for name, now, was in zip(("keys", "values"), sequence.read_kv(layer, start, upto), parts):
            assert_same_bits(
                now, was[start - released : upto - released], f"{what}: {name} of layer {layer}"
            )


def assert_cold(session, cold, what):
    """K/V that are held, and the logits after them, are those of a cold run of the text."""
    session.prefill(session.tokens)
    with apart(cold) as whole:
        whole.prefill(session.tokens)
        start = max(session.sequence.released, whole.sequence.released)
        for layer in layers_of(cold):
            ours = session.sequence.read_kv(layer, start, session.committed)
            theirs = whole.sequence.read_kv(layer, start, session.committed)
            for name, a, b in zip(("keys", "values"), ours, theirs):
                assert_same_bits(a, b, f"{what}: {name} of layer {layer}")
        assert_same_bits(session.logits, whole.logits, f"{what}: logits")
    session.core.pager.check_invariants()


def assert_goes_on(talk, position, what):
    """Guesses are right again within a chunk, and tokens and bits are those of a text without."""
    session = talk.session
    with apart(talk.cold) as whole:
        whole.prefill(talk.text[:position])
        assert_same_bits(session.logits, whole.logits, f"{what}: logits after the cut")
    before = session.speculation
    first = list(
        islice(session.generate(2 * CHUNK, eos=None, speculate="draft", stream="tokens"), CHUNK)
    )
    level = session.speculation
    assert level.accepted > before.accepted, f"{what}: no guess was right within a chunk"
    rest = session.generate(CHUNK, eos=None, speculate="draft").tokens.tolist()
    after = session.speculation
    accepted, proposed = after.accepted - level.accepted, after.proposed - level.proposed
    assert accepted > 0.4 * proposed > 0, what
    _, expected = alone(talk.cold, talk.text[:position], 2 * CHUNK)
    assert first + rest == ids_of(expected)
    assert_cold(session, talk.cold, what)


# Every draft beside a dense target, every target beside a dense draft: what the two do there does
# not depend on one another.
PAIRS = [("dense", draft) for draft in DRAFTS]
PAIRS += [(target, "dense") for target in TARGETS if target != "dense"]


def reaches(option, position):
    return option != "windowed, out of reach" or position == 0


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(BETWEEN, id="between checkpoints"),
        pytest.param(AT, id="at a checkpoint", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_target_and_draft_are_cut_as_far_as_each_can_be(talk, target, draft, position):
    talk = talk(target, draft)
    session, companion = talk.session, talk.draft
    (released, kv), (draft_released, draft_kv) = talk.held()
    if target == "dense":
        assert not session.ledger()[position // CHUNK].resident  # it left the pool
    with Seen(talk.engine) as seen:
        session.trim(position)

    assert session.tokens.tolist() == talk.text[:position]
    kept = position if reaches(target, position) else 0
    draft_kept = position if kept and reaches(draft, position) else 0
    if draft == "recurrent" and kept:
        draft_kept = position // EVERY * EVERY
    assert (session.committed, companion.length) == (kept, draft_kept)
    assert seen.trim_primary_refused == (kept == 0)
    assert seen.trim_companion_refused == (kept > 0 and draft == "windowed, out of reach")
    assert seen.tokens_reprefilled == 2 * position - kept - draft_kept
    assert_kept(session.sequence, released, kv, kept, "target")
    assert_kept(companion.transcript.sequence, draft_released, draft_kv, draft_kept, "draft")
    assert_goes_on(talk, position, f"{target} with {draft}, cut at {position}")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_cut_near_the_end_costs_nobody_more_than_his_last_checkpoint(talk, target, draft):
    talk = talk(target, draft)
    session = talk.session
    position = session.committed - 3
    with Seen(talk.engine) as seen:
        session.trim(position)
    assert seen.trim_primary_refused == seen.trim_companion_refused == 0
    assert session.committed == position
    assert seen.tokens_reprefilled <= (EVERY if draft == "recurrent" else 0)
    assert_goes_on(talk, position, f"{target} with {draft}, cut near the end")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_that_begins_anew_brings_both_with_it(talk, target, draft):
    talk = talk(target, draft)
    session = talk.session
    with Seen(talk.engine) as seen:
        session.trim(0)
    assert session.committed == talk.draft.length == 0
    assert seen.trim_primary_refused == seen.trim_companion_refused == 0
    assert seen.tokens_reprefilled == 0
    session.prefill(prompt(120, 3))
    talk.text = session.tokens.tolist()
    assert_goes_on(talk, 120, f"{target} with {draft}, begun anew")


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_that_lags_is_left_alone_by_a_cut_beyond_it(talk, draft):
    talk = talk("dense", draft)
    session = talk.session
    length = talk.draft.length
    session.append(prompt(80, 5))
    talk.text = session.tokens.tolist()
    position = session.length - 20
    with Seen(talk.engine) as seen:
        session.trim(position)
    assert talk.draft.length == length
    assert seen.trim_companion_refused == seen.tokens_reprefilled == 0
    assert_goes_on(talk, position, f"{draft} that lags")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_an_edited_and_a_regenerated_text_are_guessed_at_again(talk, target, draft):
    talk = talk(target, draft)
    session = talk.session
    edited = [*talk.text[:BETWEEN], *prompt(60, 6)]
    session.update(edited)
    talk.text = edited
    assert_goes_on(talk, len(edited), f"{target} with {draft}, edited")
    start = session.length
    first = session.generate(CHUNK, eos=None, speculate="draft").tokens.tolist()
    assert session.regenerate(CHUNK, eos=None, speculate="draft").tokens.tolist() == first
    assert session.length == start + CHUNK
    assert_cold(session, talk.cold, f"{target} with {draft}, regenerated")


def test_what_a_draft_answers_is_what_its_caches_can_do(talk):
    answers = {}
    for draft in DRAFTS:
        companion = talk("dense", draft).draft
        before = companion.length
        for position in (AT, BETWEEN):
            answer = companion.trim(position)
            answers[draft, position] = answer
            if not isinstance(answer, Ok):
                assert companion.length == before  # nothing was done
            before = companion.length
    for draft in ("dense", "windowed, within reach"):
        assert answers[draft, AT] == answers[draft, BETWEEN] == Ok()
    for position in (AT, BETWEEN):
        answer = answers["windowed, out of reach", position]
        assert isinstance(answer, Refused)
        assert "left every layer's window" in answer.reason
    assert answers["recurrent", AT] == Ok()
    assert answers["recurrent", BETWEEN] == NeedsCheckpoint(EVERY)


def test_where_no_state_of_the_draft_was_kept_the_draft_alone_begins_anew(models, cold, closing):
    engine = closing(
        drafted_engine(
            models["target"]["dense"],
            models["draft"]["recurrent"],
            draft_options={"checkpoint_bytes": 0, "pool_tokens": 1024},
        )
    )
    talk = closing(Talk(engine, cold["dense"]))
    (released, kv), _ = talk.held()
    computed = talk.session.tokens_computed
    with Seen(engine) as seen:
        talk.session.trim(BETWEEN)
    assert (talk.session.committed, talk.draft.length) == (BETWEEN, 0)
    assert (seen.trim_primary_refused, seen.trim_companion_refused) == (0, 0)
    assert seen.tokens_reprefilled == BETWEEN
    assert_kept(talk.session.sequence, released, kv, BETWEEN, "target")
    assert_goes_on(talk, BETWEEN, "without checkpoints")
    assert talk.session.tokens_computed - computed <= 2 * CHUNK


@pytest.mark.parametrize("draft", ["dense", "windowed, within reach", "recurrent"])
def test_a_draft_that_has_no_room_to_be_cut_begins_anew_and_the_target_does_not_notice(
    talk, monkeypatch, caplog, draft
):
    talk = talk("dense", draft)
    (released, kv), _ = talk.held()
    trim = Sequence.trim

    def without_room(sequence, position):
        if position and sequence is talk.draft.transcript.sequence:
            raise CapacityError("no block is free")
        trim(sequence, position)

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "trim", without_room)
        with Seen(talk.engine) as seen:
            talk.session.trim(BETWEEN)
    assert (talk.session.committed, talk.draft.length) == (BETWEEN, 0)
    assert (seen.trim_primary_refused, seen.trim_companion_refused) == (0, 1)
    assert "no block is free" in caplog.text
    assert_kept(talk.session.sequence, released, kv, BETWEEN, "target")
    assert_goes_on(talk, BETWEEN, f"{draft} without room")


def test_an_interrupt_in_the_drafts_trim_leaves_text_target_and_draft_agreed(talk, monkeypatch):
    talk = talk("dense", "dense")

    def interrupted(companion, position):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DraftCompanion, "trim", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk.session.trim(BETWEEN)
    assert talk.session.tokens.tolist() == talk.text[:BETWEEN]
    assert (talk.session.committed, talk.draft.length) == (BETWEEN, 0)
    assert_goes_on(talk, BETWEEN, "after an interrupt")


def test_of_two_texts_only_the_one_that_is_cut_loses_its_draft(talk):
    one, other = (talk("dense", "windowed, out of reach") for _ in range(2))
    length = other.draft.length
    one.session.trim(BETWEEN)
    assert (one.draft.length, other.draft.length) == (0, length)
    assert_goes_on(one, BETWEEN, "the one that was cut")
    other.session.generate(CHUNK, eos=None, speculate="draft").tokens.tolist()
    assert_cold(other.session, other.cold, "the other")


@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_window_can_be_cut_from_its_earliest_position_on_and_not_before(talk, which, beside):
    out_of_reach = "windowed, out of reach"
    talk = talk(*(("dense", out_of_reach) if which == "draft" else (out_of_reach, "dense")))
    sequence = (talk.draft.transcript if which == "draft" else talk.session).sequence
    position = sequence.earliest_trim + beside
    assert sequence.released + 40 == sequence.earliest_trim < sequence.length - 1
    with Seen(talk.engine) as seen:
        talk.session.trim(position)
    refused = {"target": seen.trim_primary_refused, "draft": seen.trim_companion_refused}
    assert refused[which] == (beside < 0)
    assert sum(refused.values()) == (beside < 0)
    assert sequence.length == (0 if beside < 0 else position)
    assert_goes_on(talk, position, f"{which} cut at its earliest position {beside:+}")


@pytest.mark.parametrize("then", ["generate", "append", "save"])
def test_rows_to_be_computed_again_are_those_whose_window_is_there(
    models, cold, closing, tmp_path, then
):
    """After a cut a window may have let go of what the first rows of a chunk need."""
    model = models["target"]["windowed"]
    engine = closing(make_engine(model, exact="reuse", rewind_tokens=2 * CHUNK))
    session = engine.session()
    session.prefill(prompt(7 * CHUNK))
    earliest = session.sequence.earliest_trim
    assert earliest % CHUNK
    session.trim(earliest + 1)
    assert session.committed == earliest + 1  # inside a chunk that begins out of reach
    session.generate(5, eos=None).tokens.tolist()
    if then == "generate":
        session.generate(CHUNK, eos=None).tokens.tolist()
    elif then == "append":
        session.append(prompt(30, 5))
    else:
        session.save(tmp_path / "turn.kvsnap")
        session = closing(engine.restore(tmp_path / "turn.kvsnap"))
    assert engine.core.transcripts.trims.trim_primary_refused == 0
    assert_cold(session, cold["windowed"], then)


# A target with recurrent layers: its states are its company.


@pytest.fixture(scope="module")
def recurrent(models):
    with make_recurrent_engine(models["target"]["recurrent"], pool_tokens=512) as engine:
        yield engine


def cold_recurrent(models, ids):
    """K/V of all layers, state and logits of an engine that has seen nothing."""
    with (
        make_recurrent_engine(models["target"]["recurrent"], pool_tokens=512) as engine,
        engine.session() as session,
    ):
        session.prefill(ids)
        kv = [session.sequence.read_kv(layer, 0, len(ids)) for layer in layers_of(engine)]
        state = session.transcript.states.at(len(ids))
        return kv, None if state is None else state.tensors, session.logits


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("position", [1, CHUNK, BETWEEN, AT, AT + 1, 199])
def test_a_recurrent_target_goes_back_to_the_state_before_the_cut_and_has_no_draft(
    models, recurrent, position, lost
):
    session = recurrent.session()
    session.prefill(prompt(PROMPT))
    session.generate(NEW, eos=None).tokens.tolist()
    text = session.tokens.tolist()
    if lost:
        recurrent.core.checkpoints.clear()
    nearest = session.transcript.states.nearest(position)
    assert nearest <= (0 if lost else position // EVERY * EVERY)
    state = None if not nearest else session.transcript.states.at(nearest)
    before = None if state is None else [tensor.clone() for tensor in state.tensors]
    counted = replace(recurrent.core.transcripts.trims)
    session.trim(position)
    assert session.tokens.tolist() == text[:position]
    assert session.committed == session.transcript.states.length == nearest
    counted.tokens_reprefilled += position - nearest
    assert recurrent.core.transcripts.trims == counted  # nobody has refused
    if before is not None:
        for now, was in zip(session.transcript.states.at(nearest).tensors, before):
            assert_same_bits(now, was, "the state that was gone back to")
    kv, _, logits = cold_recurrent(models, text[:position])
    for layer, parts in enumerate(kv):
        for ours, theirs in zip(session.sequence.read_kv(layer, 0, nearest), parts):
            assert_same_bits(ours, theirs[:nearest], f"K/V of layer {layer}")
    assert_same_bits(session.logits, logits, "logits after the cut")
    session.append(prompt(CHUNK + 3, 4))
    kv, tensors, logits = cold_recurrent(models, session.tokens)
    sealed = session.committed // CHUNK * CHUNK
    for layer, parts in enumerate(kv):
        for ours, theirs in zip(session.sequence.read_kv(layer, 0, sealed), parts):
            assert_same_bits(ours, theirs[:sealed], f"K/V of layer {layer}, gone on")
    assert_same_bits(session.logits, logits, "logits, gone on")
    if tensors is not None:
        for ours, theirs in zip(session.transcript.states.at(session.committed).tensors, tensors):
            assert_same_bits(ours, theirs, "the state, gone on")
    session.close()


def test_a_draft_for_a_recurrent_target_is_refused_with_the_reason(models):
    with pytest.raises(InvalidArgumentError, match=r'exact is .reuse.*exact="all"'):
        make_recurrent_engine(
            models["target"]["recurrent"], pool_tokens=512, draft=models["draft"]["dense"]
        )


def test_a_recurrent_draft_needs_no_options_of_its_own(models, closing):
    engine = closing(
        Engine(
            models["target"]["dense"],
            pool_tokens=256,
            chunk_tokens=CHUNK,
            rows=32,
            draft=models["draft"]["recurrent"],
        )
    )
    session = engine.session()
    session.prefill(prompt(40))
    produced = session.generate(20, eos=None, speculate="draft").tokens.tolist()
    assert produced == ids_of(alone(engine, prompt(40), 20)[1])
    assert np.isfinite(session.speculation.acceptance)
