"""What the draft model holds of a text: how far it is, what it loses, and how it catches up."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from apart import alone, apart, ids_of
from bits import assert_same_session
from drafts import Seen, draft_of, drafted_engine, noisy
from recurrent_models import build_recurrent
from reference_models import CHUNK, ROWS, build, prompt

import kvpager
from kvpager import CapacityError, CorruptSnapshotError, NonFiniteError, StorageError
from kvpager._runtime.execution.core import Ask
from kvpager.drafts.drafting import _CATCHING_UP
from kvpager.sampling import Sampling

IDS = prompt(100, 3)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    with drafted_engine(model, model) as engine:
        yield engine


def talked(engine, ids=IDS, count=8):
    """A session of its own whose companion is up to date."""
    session = apart(engine)
    session.prefill(ids)
    session.generate(count, eos=None, speculate="draft").tokens.tolist()
    return session


def forwards_until_accepted(session, most=CHUNK):
    """Tokens told until a guess is right again."""
    before = session.speculation.accepted
    for count, _ in enumerate(
        session.generate(most, eos=None, speculate="draft", stream="tokens"), 1
    ):
        if session.speculation.accepted > before:
            return count
    raise AssertionError(f"no guess was right within {most} tokens")


# How far it is.


def test_a_companion_is_made_when_it_is_first_needed(engine):
    session = apart(engine)
    session.prefill(IDS)
    session.generate(4, eos=None).tokens.tolist()
    assert session.transcript.companions == []
    session.generate(6, eos=None, speculate="draft").tokens.tolist()
    assert [companion.kind for companion in session.transcript.companions] == ["draft"]


def test_the_watermark_is_the_text_without_guesses(engine):
    session = talked(engine, count=9)
    companion = draft_of(session)
    assert len(IDS) < companion.length <= session.length
    held = companion.transcript.sequence.tokens[: companion.length]
    assert held.tolist() == session.tokens[: companion.length].tolist()


def test_a_trim_cuts_the_companion_with_the_session(engine):
    session = talked(engine)
    with Seen(engine) as seen:
        session.trim(50)
    assert draft_of(session).length == 50
    assert draft_of(session).transcript.committed == 50
    assert seen.trim_companion_refused == seen.tokens_reprefilled == 0
    with Seen(engine) as seen:
        session.append(prompt(10, 5))
        session.generate(10, eos=None, speculate="draft").tokens.tolist()
    assert seen.draft_tokens_fed < 30
    assert session.speculation.acceptance == 1


def test_a_companion_that_lags_is_left_alone_by_a_trim_beyond_it(engine):
    session = talked(engine)
    length = draft_of(session).length
    session.append(prompt(60, 9))
    session.trim(session.length - 20)
    assert draft_of(session).length == length


def test_text_that_was_changed_behind_the_companions_back_is_noticed(engine):
    session = talked(engine)
    companion = draft_of(session)
    session.transcript.companions.clear()  # so that the trim does not reach it
    session.trim(40)
    session.append(prompt(30, 7))
    session.transcript.companions.append(companion)
    _, expected = alone(engine, session.tokens, 12)
    assert session.generate(12, eos=None, speculate="draft").tokens.tolist() == ids_of(expected)
    assert session.speculation.acceptance == 1


def test_appended_text_is_fed_when_guesses_are_wanted_again(engine):
    session = talked(engine)
    with Seen(engine) as seen:
        session.append(prompt(150, 4))
        session.generate(5, eos=None).tokens.tolist()
    assert seen.draft_tokens_fed == 0
    with Seen(engine) as seen:
        session.generate(8, eos=None, speculate="draft").tokens.tolist()
    assert 150 <= seen.draft_tokens_fed < 190
    assert session.speculation.acceptance == 1


# Losing it, and catching up.


def test_after_a_reset_guesses_are_right_again_within_one_chunk(engine):
    session = talked(engine)
    reference = talked(engine)
    draft_of(session).reset()
    assert draft_of(session).length == 0
    with Seen(engine) as seen:
        told = forwards_until_accepted(session)
    assert told <= 3
    assert seen.draft_tokens_fed >= len(IDS)  # the prefix was computed again
    reference.generate(told, eos=None)
    rest = [one.generate(20, eos=None).tokens.tolist() for one in (session, reference)]
    assert rest[0] == rest[1]
    assert_same_session(session, reference, "after a reset")


def test_a_long_text_is_caught_up_a_few_forwards_at_a_time(model):
    draft_options = {"rows": 4, "pool_tokens": 1024}
    with drafted_engine(model, model, draft_options=draft_options) as engine:
        ids = prompt(10 * _CATCHING_UP * 4 - 5, 1)
        _, expected = alone(engine, ids, 40)
        session = apart(engine)
        session.prefill(ids)
        produced = []
        stream = session.generate(40, eos=None, speculate="draft", stream="tokens")
        while not session.speculation.proposed:
            with Seen(engine) as seen:
                produced.append(next(stream))
            if not session.speculation.proposed:
                assert seen.draft_forwards <= _CATCHING_UP
        assert 8 <= len(produced) <= CHUNK  # tokens that were told meanwhile, one per forward
        produced += stream
        assert produced == ids_of(expected)
        assert session.speculation.acceptance == 1


def test_who_lags_is_fed_in_rows_that_others_leave(model):
    """One session guesses all the time; another with a long text catches up beside it."""
    with drafted_engine(model, model, draft_options={"rows": ROWS}) as engine:
        quick, slow = apart(engine), apart(engine)
        quick.prefill(prompt(10, 1))
        slow.prefill(prompt(700, 2))
        quick.generate(6, eos=None, speculate="draft").tokens.tolist()
        told = {quick: [], slow: []}
        with Seen(engine) as seen:
            for session, token in engine.generate_many(
                [quick, slow], 30, eos=None, speculate="draft"
            ):
                told[session].append(token)
        assert seen.draft_tokens_fed / seen.draft_forwards > 8
        assert quick.speculation.acceptance == slow.speculation.acceptance == 1
        assert slow.speculation.accepted > 5
        _, expected = alone(engine, prompt(700, 2), 30)
        assert told[slow] == ids_of(expected)


def test_what_was_refused_is_taken_out_of_the_companion(model):
    with drafted_engine(model, noisy(model, 0.2)) as engine:
        session = talked(engine, count=40)
        assert session.speculation.acceptance < 1
        companion = draft_of(session)
        held = companion.transcript.sequence.tokens[: companion.length]
        assert held.tolist() == session.tokens[: companion.length].tolist()


# What goes wrong in it.


class Failing:
    """Makes the draft's next forwards raise."""

    def __init__(self, engine, monkeypatch):
        self.left = 0
        self.error = None
        run = engine.draft.core.runner.run

        def failing(batch):
            if self.left:
                self.left -= 1
                raise self.error
            return run(batch)

        monkeypatch.setattr(engine.draft.core.runner, "run", failing)

    def next(self, error, forwards=1):
        self.error, self.left = error, forwards


@pytest.mark.parametrize(
    "error",
    [
        StorageError("no disk"),
        NonFiniteError("NaN"),
        CapacityError("no room"),
        CorruptSnapshotError("bits"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_stops_the_draft_stops_no_text(engine, monkeypatch, caplog, error):
    _, expected = alone(engine, IDS, 30)
    failing = Failing(engine, monkeypatch)
    session = apart(engine)
    session.prefill(IDS)
    stream = session.generate(30, eos=None, speculate="draft", stream="tokens")
    produced = [next(stream) for _ in range(3)]
    failing.next(error, 10**6)
    if isinstance(error, CorruptSnapshotError):
        error.chunk = None
    with caplog.at_level(logging.WARNING):
        produced += [next(stream) for _ in range(12)]
    assert any("text" in record.message for record in caplog.records)
    failing.next(None, 0)
    produced += stream
    assert produced == ids_of(expected)


def test_an_interruption_of_the_draft_leaves_a_text_that_goes_on(engine, monkeypatch):
    _, expected = alone(engine, IDS, 30)
    failing = Failing(engine, monkeypatch)
    session = apart(engine)
    session.prefill(IDS)
    stream = session.generate(30, eos=None, speculate="draft", stream="tokens")
    produced = [next(stream) for _ in range(2)]
    failing.next(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        produced.extend(stream)
    assert session.tokens.tolist() == [*IDS, *produced]
    produced += session.generate(30 - len(produced), eos=None, speculate="draft", stream="tokens")
    assert produced == ids_of(expected)
    assert session.speculation.acceptance == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_text_that_the_draft_cannot_follow_costs_the_others_nothing(engine, monkeypatch, place):
    sessions = [engine.session() for _ in range(3)]
    companions = [draft_of(session) for session in sessions]
    run = engine.draft.core.runner.run

    def failing(batch):
        if companions[place].transcript.sequence in batch.owners:
            raise NonFiniteError("NaN")
        return run(batch)

    asks = [
        Ask(session.transcript, prompt(40, seed), 4, Sampling(), frozenset())
        for seed, session in enumerate(sessions)
    ]
    expected = engine.core.drafter.propose(asks)
    for companion in companions:
        companion.reset()
    monkeypatch.setattr(engine.draft.core.runner, "run", failing)
    for _ in range(2):
        expected[place] = []
        assert engine.core.drafter.propose(asks) == expected
    assert all(len(guess) == 4 for number, guess in enumerate(expected) if number != place)


def test_idle_companions_give_their_room_to_those_that_guess(model):
    """The draft's tiers hold one text of the length; each of three has it in its turn."""
    draft_options = {"host_bytes": 12 * 3 * 16384, "pool_tokens": 96}
    with drafted_engine(model, model, draft_options=draft_options) as engine:
        sessions = [apart(engine) for _ in range(3)]
        for seed, session in enumerate(sessions):
            session.prefill(prompt(150, seed))
            session.generate(10, eos=None, speculate="draft").tokens.tolist()
            assert session.speculation.accepted > 0
        assert draft_of(sessions[0]).length == 0  # the one that guessed least recently
        assert draft_of(sessions[2]).length > 150
        sessions[1].close()
        sessions[0].generate(10, eos=None, speculate="draft").tokens.tolist()
        assert draft_of(sessions[0]).length > 150


def test_a_text_too_long_for_the_drafts_tiers_goes_on_without_guesses(model, caplog):
    draft_options = {"host_bytes": 6 * 3 * 16384, "pool_tokens": 64}
    with drafted_engine(model, model, draft_options=draft_options) as engine:
        _, expected = alone(engine, prompt(250, 1), 20)
        session = apart(engine)
        session.prefill(prompt(250, 1))
        with caplog.at_level(logging.WARNING), Seen(engine) as seen:
            produced = session.generate(20, eos=None, speculate="draft").tokens.tolist()
        assert produced == ids_of(expected)
        assert seen.speculation_proposed == 0
        assert seen.draft_forwards < 40  # it was tried, and not over and over again
        assert sum("no guesses" in record.message for record in caplog.records) == 1
        session.trim(40)
        session.generate(10, eos=None, speculate="draft").tokens.tolist()
        assert session.speculation.accepted > 0


# A draft that has forgotten what lies behind its window.


@pytest.fixture(scope="module")
def windowed(model):
    """Its layers see 40 tokens back, and it can be cut by 16 more."""
    draft = build("mistral")
    options = {"rewind_tokens": CHUNK}
    with drafted_engine(model, draft, draft_options=options) as engine:
        yield engine


def test_a_windowed_draft_guesses_for_a_model_that_sees_everything(windowed):
    _, expected = alone(windowed, IDS, 40)
    session = apart(windowed)
    session.prefill(IDS)
    assert session.generate(40, eos=None, speculate="draft").tokens.tolist() == ids_of(expected)
    assert draft_of(session).transcript.sequence.released > 0


def test_a_trim_behind_the_drafts_window_costs_the_draft_alone(windowed):
    session = talked(windowed)
    earliest = draft_of(session).transcript.sequence.earliest_trim
    assert earliest > 30
    tokens_computed = session.tokens_computed
    with Seen(windowed) as seen:
        session.trim(30)
    assert (seen.trim_companion_refused, seen.trim_primary_refused) == (1, 0)
    assert seen.tokens_reprefilled == 30
    assert (session.committed, draft_of(session).length) == (30, 0)
    _, expected = alone(windowed, IDS[:30], 20)
    with Seen(windowed) as seen:
        assert session.generate(20, eos=None, speculate="draft").tokens.tolist() == ids_of(expected)
    assert session.tokens_computed == tokens_computed  # the session's own K/V were kept
    assert seen.draft_tokens_fed >= 30
    assert draft_of(session).length > 30


def test_a_trim_within_the_drafts_window_costs_nothing(windowed):
    session = talked(windowed)
    earliest = draft_of(session).transcript.sequence.earliest_trim
    with Seen(windowed) as seen:
        session.trim(earliest)
    assert seen.trim_companion_refused == seen.tokens_reprefilled == 0
    assert draft_of(session).length == earliest


def test_a_windowed_draft_that_is_behind_a_changed_text_begins_anew(windowed):
    """What the session's own trim did not tell it, it finds out, and counts."""
    session = talked(windowed)
    companion = draft_of(session)
    session.transcript.companions.clear()
    session.trim(20)
    session.append(prompt(50, 5))
    session.transcript.companions.append(companion)
    with Seen(windowed) as seen:
        session.generate(10, eos=None, speculate="draft").tokens.tolist()
    assert seen.trim_companion_refused == 1
    assert seen.tokens_reprefilled == 20
    assert draft_of(session).length >= 70


def test_a_windowed_draft_is_saved_with_what_it_still_holds(windowed, tmp_path):
    session = windowed.session()
    session.prefill(IDS)
    session.generate(8, eos=None, speculate="draft").tokens.tolist()
    report = session.save(tmp_path / "chat")
    assert report.companions[0].tokens == draft_of(session).length
    restored = windowed.restore(tmp_path / "chat")
    assert draft_of(restored).length == draft_of(session).length
    with Seen(windowed) as seen:
        ours = restored.generate(10, eos=None, speculate="draft").tokens.tolist()
    assert ours == session.generate(10, eos=None).tokens.tolist()
    assert seen.draft_tokens_fed < 50


# Guesses are what the draft would write itself.


def build_draft(kind):
    if kind == "recurrent":
        return build_recurrent("qwen3_next")
    return build("mistral" if kind == "windowed" else "qwen3")


@pytest.mark.parametrize("kind", ["dense", "windowed", "recurrent"])
def test_guesses_are_what_the_draft_goes_on_with_whatever_became_of_the_text(model, kind):
    draft = build_draft(kind)
    options = {"rewind_tokens": CHUNK}
    with (
        drafted_engine(model, draft, draft_options=options) as engine,
        kvpager.Engine(draft, engine.draft.config) as alone_engine,
    ):
        asking = engine.session()
        companion = draft_of(asking)
        text = prompt(70, 3)
        for cut, more in ((70, 0), (70, 5), (72, 3), (60, 9), (10, 40), (50, 1), (0, 30), (30, 80)):
            text = np.concatenate([text[:cut], prompt(more, cut)]) if more else text[:cut]
            for sampling in (Sampling(), Sampling(temperature=1.0, top_k=20, seed=5)):
                asked = Ask(asking.transcript, text, 6, sampling, frozenset())
                (guess,) = engine.core.drafter.propose([asked])
                with alone_engine.session() as session:
                    session.prefill(text)
                    expected = session.generate(
                        6,
                        eos=None,
                        temperature=sampling.temperature,
                        top_k=sampling.top_k,
                        seed=sampling.seed,
                        stream="tokens",
                    )
                    assert guess == list(expected), (cut, more)
                assert companion.length == len(text)


def test_a_recurrent_draft_guesses_and_changes_no_bit(model, tmp_path):
    with drafted_engine(model, build_recurrent("qwen3_next")) as engine:
        plain, expected = alone(engine, IDS, 30)
        session = apart(engine)
        session.prefill(IDS)
        stream = session.generate(30, eos=None, logprobs=True, speculate="draft", stream="tokens")
        assert list(stream) == expected
        assert_same_session(session, plain, "recurrent draft")
        assert session.speculation.proposed > 0
        with Seen(engine) as seen:
            session.trim(50)
        assert seen.trim_companion_refused == seen.trim_primary_refused == 0
        assert draft_of(session).length <= 50
        assert session.save(tmp_path / "chat").companions == ()
        again = session.generate(10, eos=None, speculate="draft").tokens.tolist()
        assert again == ids_of(alone(engine, IDS[:50], 10)[1])


def test_a_session_without_a_draft_has_no_companions(model):
    with kvpager.Engine(model, pool_tokens=256, rows=ROWS, chunk_tokens=CHUNK) as engine:
        session = engine.session()
        session.prefill(np.arange(40))
        session.generate(5, eos=None).tokens.tolist()
        assert session.transcript.companions == []
        assert engine.stats()["draft_forwards"] == engine.stats()["draft_tokens_fed"] == 0
