"""Texts that are cut, edited and generated again have the bits of texts that never were others.

Dense models, whose caches can be cut anywhere; where a cache must refuse, it is told to.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from apart import Oracle, alone, apart, ids_of
from bits import assert_same_bits, assert_same_session
from damage import damage_chunk
from reference_models import CHUNK, ROWS, VOCAB, build, make_engine, prompt

from kvpager import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    PrefixMismatchError,
    Reuse,
)
from kvpager._model.watch.looks import only_looks
from kvpager._runtime.scheduling.trim import PrimaryCache
from kvpager.companions import Refused, TrimCounters

PROMPT = 150
NEW = 16
LENGTH = PROMPT + NEW  # with the pending token: five rows and it are in the tail
PLACES = {
    "0": 0,
    "the first token": 1,
    "inside a chunk that left the pool": 5,
    "the beginning of a chunk that left the pool": 0,
    "inside the last sealed chunk": 9 * CHUNK + 3,
    "where the tail begins": 10 * CHUNK,
    "in the tail": 10 * CHUNK + 2,
    "the pending token": LENGTH - 1,
    "the length": LENGTH,
}
at_every_kind_of_position = pytest.mark.parametrize("place", PLACES)


class ModelError(Exception):
    """What a test throws from the middle of the model."""


@pytest.fixture(scope="module")
def model(kv_dtype):
    return build("llama")


@pytest.fixture(scope="module")
def cold(model):
    """Holds everything in its pool; sessions apart share nothing with one another."""
    with make_engine(model, pool_tokens=2048) as engine:
        yield engine


WAYS = {
    "all": {"exact": "all"},
    "reuse": {"exact": "reuse", "host_bytes": 2 * 49152, "disk_bytes": 256 * 49152},
}


@pytest.fixture(scope="module", params=["all", pytest.param("reuse", marks=pytest.mark.deep)])
def engine(request, model, tmp_path_factory):
    """Its pool holds six chunks: those before lie on the host, or on disk."""
    options = {"policy": "lru", **WAYS[request.param]}
    if "disk_bytes" in options:
        options["disk_path"] = tmp_path_factory.mktemp("spill")
    with make_engine(model, **options) as engine:
        yield engine


@pytest.fixture
def exact(engine):
    return engine.config.exact


def talk(session):
    session.prefill(prompt(PROMPT))
    session.generate(NEW, eos=None).tokens.tolist()
    assert (session.length, session.committed) == (LENGTH, LENGTH - 1)
    return session


@pytest.fixture
def talked(engine, closing):
    """A session that has a prompt, and text that it generated: K/V at every kind of place."""
    return talk(closing(apart(engine)))


@pytest.fixture
def saved(engine, closing, tmp_path):
    """One like it, of the engine's own salt, and a snapshot of it at tmp_path / "turn.kvsnap"."""
    session = talk(closing(engine.session()))
    session.save(tmp_path / "turn.kvsnap")
    return session


def where(session, place):
    """A position of that kind in the text that `talked` is."""
    if not place.endswith("left the pool"):
        return PLACES[place]
    chunk = next(chunk for chunk in session.ledger()[1:] if not chunk.resident)
    assert chunk.on_host or chunk.on_disk
    assert chunk.stop <= 9 * CHUNK
    return chunk.start + PLACES[place]


def assert_cold(session, cold, what):
    """All the session holds, owed and provisional rows computed, is what a cold run computes."""
    session.prefill(session.tokens)
    with apart(cold) as whole:
        whole.prefill(session.tokens)
        assert_same_session(session, whole, what)
    session.core.pager.check_invariants()


@contextmanager
def refusing():
    """Every trim that takes K/V away is refused, as where a window has let them go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrimaryCache, "trim", lambda self, position: Refused("told to"))
        yield


# Trim


@at_every_kind_of_position
def test_a_text_that_was_cut_and_goes_on_has_the_bits_of_a_cold_run(talked, cold, place):
    text, position = talked.tokens.tolist(), where(talked, place)
    talked.trim(position)
    assert talked.tokens.tolist() == text[:position]
    talked.append(prompt(40, 7))
    assert talked.tokens.tolist() == [*text[:position], *prompt(40, 7)]
    assert_cold(talked, cold, f"cut at {place}")


@at_every_kind_of_position
def test_after_a_cut_the_logits_are_those_of_a_cold_run(talked, cold, place, exact):
    position = where(talked, place)
    talked.trim(position)
    if not position:
        with pytest.raises(InvalidArgumentError, match="the session is empty"):
            _ = talked.logits
        return
    if exact == "all" or position <= PROMPT:  # what follows was decoded one row at a time
        with apart(cold) as whole:
            whole.prefill(talked.tokens[: talked.length - (talked.pending is not None)])
            assert_same_bits(talked.logits, whole.logits, f"logits at {place}")
    assert len(talked.generate(5, eos=None).tokens.tolist()) == 5
    assert_cold(talked, cold, f"generated after a cut at {place}")


def test_a_cut_computes_nothing_and_is_counted_as_no_loss(engine, talked):
    before = engine.stats()
    for position in (LENGTH - 1, 10 * CHUNK + 1, 9 * CHUNK, CHUNK + 5, 0):
        talked.trim(position)
    after = engine.stats()
    for name in (
        "model_forwards",
        "trim_primary_refused",
        "trim_companion_refused",
        "tokens_reprefilled",
    ):
        assert after[name] == before[name], name


@pytest.mark.parametrize("position", [-1, LENGTH + 1, True, 3.0, None, "3"])
def test_a_cut_outside_the_text_is_refused_and_changes_nothing(talked, position):
    text, pending = talked.tokens.tolist(), talked.pending
    with pytest.raises(InvalidArgumentError, match=rf"position is .*0 to {LENGTH}"):
        talked.trim(position)
    assert talked.tokens.tolist() == text
    assert talked.pending == pending


@at_every_kind_of_position
def test_a_restored_text_can_be_cut_before_anything_of_it_was_read(
    model, saved, cold, closing, tmp_path, exact, place
):
    other = closing(make_engine(model, exact=exact))
    again = other.restore(tmp_path / "turn.kvsnap")
    text, position = again.tokens.tolist(), where(saved, place)
    assert text == saved.tokens.tolist()
    again.trim(position)
    again.append(prompt(40, 7))
    assert again.tokens.tolist() == [*text[:position], *prompt(40, 7)]
    assert again.restored_tokens_consumed == min(position, LENGTH - 1)
    assert_cold(again, cold, f"restored and cut at {place}")


@at_every_kind_of_position
def test_a_twin_is_cut_and_its_other_goes_on_as_if_it_had_not_been(talked, cold, place):
    text = talked.tokens.tolist()
    with talked.fork() as twin:
        twin.trim(where(talked, place))
        twin.append(prompt(20, 5))
        assert talked.tokens.tolist() == text
        talked.append(prompt(20, 6))
        assert_cold(twin, cold, "the one that was cut")
    assert_cold(talked, cold, "the other")


def test_many_cuts_in_a_row_add_up_to_one(talked, cold):
    random = np.random.default_rng(5)
    text = talked.tokens.tolist()
    for _ in range(8):
        position = int(random.integers(1, len(text) + 1))
        talked.trim(position)
        new = prompt(int(random.integers(1, 60)), int(random.integers(100)))
        if random.integers(2):
            talked.append(new)
            text = [*text[:position], *new]
        else:
            text = [
                *text[:position],
                *talked.generate(int(random.integers(1, 30)), eos=None, stream="tokens"),
            ]
        assert talked.tokens.tolist() == text
    assert_cold(talked, cold, "cut again and again")


# What is ahead, and what runs meanwhile


@pytest.mark.parametrize("back", [1, 2, 5, 30])
def test_a_cut_drops_what_speculation_has_ahead_of_the_text(model, cold, closing, back):
    whole, _ = alone(cold, prompt(60), 40)
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(60))
    stream = session.generate(40, eos=None, speculate=lambda: Oracle(whole.tokens), stream="tokens")
    for _ in range(3):
        next(stream)
    assert session.sequence.length > session.committed  # some of it is ahead
    session.trim(session.length - back)
    assert session.sequence.length == session.committed == 63 - back
    session.append([9, 8])
    session.generate(6, eos=None, speculate=lambda: Oracle(whole.tokens)).tokens.tolist()
    assert_cold(session, cold, "cut while text was ahead")


def test_less_may_be_generated_than_an_abandoned_stream_has_ahead(model, cold, closing):
    whole, told = alone(cold, prompt(60), 40)
    engine = closing(make_engine(model))
    ways = {
        "generate": lambda session: session.generate(1, eos=None).tokens.tolist(),
        "regenerate": lambda session: session.regenerate(
            1, from_position=60, eos=None
        ).tokens.tolist(),
        "run": lambda session: engine.run([session], 1, eos=None)[0].tokens.tolist(),
    }
    for name, way in ways.items():
        session = closing(apart(engine))
        session.prefill(prompt(60))
        stream = session.generate(
            40, eos=None, speculate=lambda: Oracle(whole.tokens), stream="tokens"
        )
        produced = [next(stream) for _ in range(6)]
        stream.close()
        assert session.sequence.length > session.length + 1  # more is ahead than is asked for
        produced = way(session) if name == "regenerate" else produced + way(session)
        assert produced == ids_of(told)[: len(produced)]
        assert_cold(session, cold, name)


@pytest.mark.parametrize("back", [1, 2, 7, 20, 60])
@pytest.mark.parametrize("taken", [1, 6, 15])
def test_a_suspended_generator_goes_on_from_where_its_text_was_cut(
    engine, cold, closing, taken, back
):
    session = closing(apart(engine))
    session.prefill(prompt(70))
    stream = session.generate(40, eos=None, stream="tokens")
    first = [next(stream) for _ in range(taken)]
    session.trim(session.length - back)
    rest = list(stream)
    assert len(rest) == 40 - taken
    kept = [*prompt(70), *first][: 70 + taken - back]
    assert session.tokens.tolist() == [*kept, *rest]
    assert_cold(session, cold, "gone on after a cut")


def test_a_suspended_generator_whose_text_was_cut_to_nothing_says_so(talked):
    stream = talked.generate(5, eos=None, stream="tokens")
    next(stream)
    talked.trim(0)
    with pytest.raises(InvalidArgumentError, match="the session is empty"):
        next(stream)
    talked.update(prompt(20, 1))
    assert talked.tokens.tolist() == prompt(20, 1).tolist()


def test_a_request_whose_session_was_cut_to_nothing_ends_alone(engine, closing):
    emptied, other = (closing(apart(engine)) for _ in range(2))
    for session in (emptied, other):
        session.prefill(prompt(20))
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(session, 5, eos=None) for session in (emptied, other)]
        scheduler.step()
        emptied.trim(0)
        while not scheduler.idle:
            scheduler.step()
    assert [request.completion.finish_reason for request in requests] == ["error", "length"]
    assert "the session is empty" in str(requests[0].completion.error)


class Broken:
    """A companion that has come as far as the text, and fails whatever is asked of it."""

    kind = "broken"
    length = LENGTH

    def __init__(self, failure):
        self.failure = failure

    def trim(self, position):
        raise self.failure

    def reset(self):
        self.length = 0

    def close(self):
        pass


def test_a_companion_that_fails_does_not_keep_the_text_from_being_cut(talked, cold):
    text = talked.tokens.tolist()
    talked.transcript.companions.append(Broken(ModelError()))
    with pytest.raises(ModelError):
        talked.trim(CHUNK + 5)
    assert talked.transcript.companions[0].length == 0
    assert talked.tokens.tolist() == text[: CHUNK + 5]
    assert talked.generation_start is None
    talked.transcript.companions[:] = [Broken(CapacityError("no block"))]
    talked.trim(CHUNK + 2)
    assert talked.transcript.companions[0].length == 0
    assert talked.tokens.tolist() == text[: CHUNK + 2]
    talked.transcript.companions.clear()
    talked.append([5])
    assert_cold(talked, cold, "cut beside a companion that failed")


def test_a_cut_into_a_damaged_chunk_that_is_to_be_reported_changes_nothing(
    model, saved, closing, tmp_path, exact
):
    damage_chunk(tmp_path / "turn.kvsnap", saved.core.facts, 1)
    engine = closing(make_engine(model, exact=exact))
    session = engine.restore(tmp_path / "turn.kvsnap", on_corrupt="fail")
    session.transcript.companions.append(Untouched(LENGTH))
    text, pending = session.tokens.tolist(), session.pending
    for cut in (
        lambda: session.trim(CHUNK + 5),
        lambda: session.update([*text[: CHUNK + 5], 7, 8]),
        lambda: session.regenerate(3, from_position=CHUNK + 5, stream="tokens"),
    ):
        with pytest.raises(CorruptSnapshotError, match="chunk 1"):
            cut()
        assert session.tokens.tolist() == text
        assert session.pending == pending
        assert session.generation_start == PROMPT
    session.transcript.companions.clear()
    session.trim(2 * CHUNK)  # needs nothing of it
    assert session.tokens.tolist() == text[: 2 * CHUNK]


class Untouched:
    """A companion that nobody may ask for anything."""

    kind = "untouched"

    def __init__(self, length):
        self.length = length

    def close(self):
        pass


def test_a_cut_for_which_the_pool_has_no_block_gives_up_the_rest_of_its_chunk(model, cold, closing):
    with make_engine(model) as measured:
        chunk_bytes = measured.core.facts.layout.chunk_bytes
    # Room for the chunks of the first, and for no other's tail.
    engine = closing(make_engine(model, host_bytes=10 * chunk_bytes))
    session = engine.session()
    ids = prompt(10 * CHUNK)  # no tail, whose block would do
    session.prefill(ids)
    others = [engine.session() for _ in range(engine.config.pool_blocks)]
    for seed, other in enumerate(others):
        other.prefill(prompt(5, seed))
    with pytest.raises(CapacityError):
        session.sequence.trim(CHUNK + 5)
    session.trim(CHUNK + 5)
    assert session.tokens.tolist() == ids[: CHUNK + 5].tolist()
    assert session.committed == CHUNK
    assert engine.core.transcripts.trims == TrimCounters(tokens_reprefilled=5)
    others[0].close()
    session.append([3])
    assert_cold(session, cold, "cut when there was no room")


# Update


@at_every_kind_of_position
def test_an_edited_text_has_the_bits_of_a_cold_run_and_what_is_before_the_edit_is_kept(
    talked, cold, place
):
    held, committed, position = talked.tokens.tolist(), talked.committed, where(talked, place)
    edited = [*held[:position], *prompt(30, 8)]
    assert position == LENGTH or edited[position] != held[position]
    reuse = talked.update(edited)
    assert talked.tokens.tolist() == edited
    assert (reuse.total, reuse.changed) == (len(edited), position)
    if talked.core.config.exact == "all":
        assert reuse.computed == len(edited) - min(position, committed)
    else:  # rows that were decoded one by one are computed anew with what follows them
        assert len(edited) - position <= reuse.computed <= len(edited) - position + CHUNK
    assert reuse.reused == reuse.total - reuse.computed
    assert_cold(talked, cold, f"edited at {place}")


@at_every_kind_of_position
def test_a_text_that_is_a_beginning_of_what_is_held_costs_no_forward(talked, cold, place, engine):
    position = where(talked, place)
    if not position:
        with pytest.raises(InvalidArgumentError, match="empty"):
            talked.update([])
        return
    if position == LENGTH:
        talked.prefill(talked.tokens)
    forwards = engine.core.runner.forwards
    held = talked.tokens[:position]
    computed = 0 if position <= PROMPT // CHUNK * CHUNK or engine.config.exact == "all" else None
    reuse = talked.update(held)
    if computed == 0:
        assert reuse == Reuse(total=position, computed=0, changed=position)
        assert engine.core.runner.forwards == forwards
    assert talked.tokens.tolist() == held.tolist()
    assert_cold(talked, cold, f"cut by an update at {place}")


def test_an_update_with_the_text_that_is_held_computes_the_pending_token_and_nothing_else(
    model, closing
):
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(50))
    next(session.generate(1, eos=None, stream="tokens"))
    assert session.update(session.tokens) == Reuse(total=51, computed=1, changed=51)
    assert session.pending is None
    forwards = engine.core.runner.forwards
    assert session.update(session.tokens) == Reuse(total=51, computed=0, changed=51)
    assert engine.core.runner.forwards == forwards


def test_an_update_of_an_empty_session_is_a_prefill(model, cold, closing):
    engine = closing(make_engine(model))
    session = engine.session()
    reuse = session.update(prompt(40))
    assert reuse == Reuse(total=40, computed=40, changed=0)
    assert reuse.reused == 0
    assert_cold(session, cold, "updated from nothing")
    other = engine.session()
    assert other.update(prompt(40)).reused == 2 * CHUNK  # shared with the first


def test_reasoning_that_is_dropped_between_turns_costs_what_follows_it_and_nothing_before(
    engine, cold, closing
):
    """A chat template that leaves the reasoning of earlier turns out renders such texts."""
    session = closing(apart(engine))
    text: list[int] = prompt(90).tolist()
    for turn in range(3):
        session.update(text)
        reasoning = session.generate(25, eos=None).tokens.tolist()
        answer = session.generate(10, eos=None).tokens.tolist()
        assert session.tokens.tolist() == text + reasoning + answer
        kept = len(text)
        text = text + answer + prompt(20, turn + 1).tolist()
        reuse = session.update(text)
        assert reuse.computed <= len(text) - kept + CHUNK
        assert_cold(session, cold, f"turn {turn}")


def test_an_update_may_insert_into_a_text_that_was_restored(
    model, saved, cold, closing, tmp_path, exact
):
    again = closing(make_engine(model, exact=exact)).restore(tmp_path / "turn.kvsnap")
    text = [*saved.tokens[:40], *prompt(10, 4), *saved.tokens[40:]]
    with pytest.raises(PrefixMismatchError):
        again.prefill(text)
    reuse = again.update(text)
    assert (reuse.changed, again.restored_tokens_consumed) == (40, 40)
    assert_cold(again, cold, "restored and edited")


@pytest.mark.parametrize(
    ("ids", "progress", "message"),
    [
        ([], None, "empty"),
        ([1, VOCAB], None, rf"ids\[1\] is {VOCAB}"),
        ([1.5], None, "float64"),
        ([[1, 2], [3, 4]], None, "shape"),
        (prompt(20, 3), 3, "progress is 3"),
    ],
)
def test_a_text_that_cannot_be_is_refused_before_anything_is_dropped(
    engine, talked, ids, progress, message
):
    text, pending, forwards = talked.tokens.tolist(), talked.pending, engine.core.runner.forwards
    with pytest.raises(InvalidArgumentError, match=message):
        talked.update(ids, progress=progress)
    assert talked.tokens.tolist() == text
    assert talked.pending == pending
    assert engine.core.runner.forwards == forwards


def test_progress_of_an_update_counts_the_whole_text(model, closing):
    session = closing(make_engine(model)).session()
    session.prefill(prompt(50))
    calls = []
    session.update(
        [*prompt(50)[:20], *prompt(40, 2)], progress=lambda done, total: calls.append((done, total))
    )
    assert calls[0] == (20, 60)
    assert calls[-1] == (60, 60)


def test_an_update_that_fails_midway_keeps_the_common_beginning_and_goes_on_when_called_again(
    model, talked, cold
):
    text = [*talked.tokens[:50], *prompt(4 * ROWS, 9)]
    calls = []

    def fail_third(*_):
        calls.append(1)
        if len(calls) == 3:
            raise ModelError

    handle = model.model.layers[1].mlp.register_forward_hook(only_looks(fail_third))
    try:
        with pytest.raises(ModelError):
            talked.update(text)
        held = talked.length
        assert 50 < held < len(text)
        assert talked.tokens.tolist() == text[:held]
        assert talked.update(text).computed == len(text) - held
    finally:
        handle.remove()
    assert_cold(talked, cold, "updated in two goes")


def test_an_update_that_does_not_fit_keeps_the_common_beginning(model, cold, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=0))
    session = engine.session()
    session.prefill(prompt(60))
    with pytest.raises(CapacityError, match="bytes"):
        session.update([*prompt(60)[:37], *prompt(400, 2)])
    assert session.tokens.tolist() == prompt(60)[:37].tolist()
    session.update([*prompt(60)[:37], *prompt(20, 2)])
    assert_cold(session, cold, "updated after a refusal")


# Regenerate


OPTIONS = {"temperature": 1.0, "top_k": 50, "eos": None}


def test_greedy_text_generated_again_is_the_same_and_nothing_of_it_is_left_twice(talked, cold):
    text = talked.tokens.tolist()
    assert talked.regenerate(NEW, eos=None).tokens.tolist() == text[PROMPT:]
    assert talked.tokens.tolist() == text
    assert_cold(talked, cold, "generated again")


def test_another_seed_gives_the_text_that_it_would_have_given_the_first_time(model, cold, closing):
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(40))
    for seed in (1, 2, 3, 1):
        options = {**OPTIONS, "seed": seed}
        produced = list(
            session.regenerate(20, **options, stream="tokens")
            if session.generation_start is not None
            else session.generate(20, **options, stream="tokens")
        )
        _, expected = alone(cold, prompt(40), 20, **options)
        assert produced == ids_of(expected)
    assert session.length == 60


@at_every_kind_of_position
def test_text_generated_again_from_anywhere_has_the_bits_of_a_cold_run(talked, cold, place, exact):
    text, position = talked.tokens.tolist(), where(talked, place)
    if not position:
        with pytest.raises(InvalidArgumentError, match="from_position is 0; expected 1 to"):
            talked.regenerate(5, from_position=0)
        return
    produced = talked.regenerate(9, from_position=position, eos=None).tokens.tolist()
    assert talked.tokens.tolist() == [*text[:position], *produced]
    if exact == "all":
        _, expected = alone(cold, text[:position], 9)
        assert produced == ids_of(expected)
    assert_cold(talked, cold, f"generated again from {place}")
    assert talked.generation_start == position


def test_what_was_appended_since_is_dropped_with_the_generated_text(talked):
    talked.append(prompt(30, 3))
    talked.regenerate(4, eos=None).tokens.tolist()
    assert talked.length == PROMPT + 4


def test_a_stopped_stream_can_be_generated_again(talked):
    text = talked.tokens.tolist()
    stream = talked.regenerate(NEW, eos=None, stream="tokens")
    taken = [next(stream) for _ in range(3)]
    stream.close()
    assert talked.regenerate(NEW, eos=None).tokens.tolist() == text[PROMPT:]
    assert taken == text[PROMPT : PROMPT + 3]


def test_regenerate_knows_where_generation_began_after_a_restore_and_in_a_fork(
    model, saved, closing, tmp_path, exact
):
    text = saved.tokens.tolist()
    with saved.fork() as twin:
        assert twin.regenerate(NEW, eos=None).tokens.tolist() == text[PROMPT:]
    engine = closing(make_engine(model, exact=exact))
    again = engine.restore(tmp_path / "turn.kvsnap")
    assert again.regenerate(NEW, eos=None).tokens.tolist() == text[PROMPT:]
    saved.save(tmp_path / "part.kvsnap", upto=PROMPT - 1)
    with pytest.raises(InvalidArgumentError, match="generated nothing"):
        engine.restore(tmp_path / "part.kvsnap").regenerate(3)


def test_regenerate_after_a_scheduled_request_drops_what_that_produced(engine, talked):
    before = talked.length
    (completion,) = engine.run([talked], 5, eos=None)
    assert talked.regenerate(5, eos=None).tokens.tolist() == completion.tokens.tolist()
    assert talked.length == before + 5
    (completion,) = engine.run([prompt(30, 6)], 5, eos=None, keep_sessions=True)
    with completion.session as session:
        assert session.regenerate(5, eos=None).tokens.tolist() == completion.tokens.tolist()
        assert session.length == 35


def test_without_generated_text_regenerate_needs_a_position(engine, closing):
    session = closing(apart(engine))
    with pytest.raises(InvalidArgumentError, match="from_position"):
        session.regenerate(3)
    session.prefill(prompt(20))
    with pytest.raises(InvalidArgumentError, match="give from_position"):
        session.regenerate(3)
    assert len(session.regenerate(3, from_position=10, eos=None).tokens.tolist()) == 3
    session.trim(9)
    with pytest.raises(InvalidArgumentError, match="give from_position"):
        session.regenerate(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"eos": [VOCAB]}, "eos"),
        ({"stop": [[VOCAB]]}, "stop"),
        ({"speculate": "magic"}, "speculate"),
        ({"logprobs": 1}, "logprobs"),
        ({"heat": 1.0}, "heat"),
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"from_position": 0}, "from_position is 0"),
        ({"from_position": LENGTH + 1}, f"1 to {LENGTH}"),
        ({"from_position": 2.0}, "from_position is 2.0"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_dropped(
    engine, talked, arguments, message
):
    text, pending, forwards = talked.tokens.tolist(), talked.pending, engine.core.runner.forwards
    with pytest.raises(InvalidArgumentError, match=message):
        talked.regenerate(**{"max_new_tokens": 3, **arguments})
    assert talked.tokens.tolist() == text
    assert talked.pending == pending
    assert engine.core.runner.forwards == forwards


def test_end_sequences_that_can_be_read_only_once_end_the_text_all_the_same(talked):
    text = talked.tokens.tolist()
    tokens = text[PROMPT:]
    stop = iter([iter(tokens[2:4])])
    produced = talked.regenerate(NEW, eos=None, stop=stop).tokens.tolist()
    assert produced[-2:] == tokens[2:4]
    eos = iter([tokens[5]])
    produced = talked.regenerate(NEW, eos=eos).tokens.tolist()
    assert produced == tokens[: tokens.index(tokens[5]) + 1]


def test_text_for_which_there_is_no_room_is_not_given_up(model, cold, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=0))
    session = engine.session()
    session.prefill(prompt(40))
    session.generate(10, eos=None).tokens.tolist()
    text = session.tokens.tolist()
    with pytest.raises(CapacityError, match="bytes"):
        session.regenerate(500)
    assert session.tokens.tolist() == text
    assert session.regenerate(10, eos=None).tokens.tolist() == text[40:]


def test_text_whose_chunks_a_fork_holds_as_well_is_not_given_up_either(
    model, cold, closing, monkeypatch
):
    """What is dropped makes no room then, which shows only when it has been dropped."""
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(40))
    session.generate(30, eos=None).tokens.tolist()
    text = session.tokens.tolist()
    reserve = type(session.sequence).reserve
    calls = []

    def second_is_refused(self, total):
        calls.append(total)
        if len(calls) == 2:
            raise CapacityError("no room")
        reserve(self, total)

    with monkeypatch.context() as patch:
        patch.setattr(type(session.sequence), "reserve", second_is_refused)
        with pytest.raises(CapacityError):
            session.regenerate(50, from_position=30, eos=None)
    assert session.tokens.tolist() == text
    with session.fork() as twin:
        assert_cold(twin, cold, "put back")
    assert session.regenerate(30, eos=None).tokens.tolist() == text[40:]


# What is owed


@pytest.fixture
def owing(talked):
    """A session whose cache has refused a cut: the text is there, and no K/V of it."""
    trims = talked.core.transcripts.trims
    before = replace(trims)
    text = talked.tokens.tolist()[:CUT]
    with refusing():
        talked.trim(CUT)
    assert talked.tokens.tolist() == talked.transcript.uncomputed.tolist() == text
    assert (talked.length, talked.committed, talked.pending) == (CUT, 0, None)
    assert trims.trim_primary_refused - before.trim_primary_refused == 1
    assert trims.tokens_reprefilled - before.tokens_reprefilled == CUT
    return talked


CUT = 5 * CHUNK + 3


def test_a_refused_cut_costs_the_cache_and_not_the_text(owing, cold):
    owing.append(prompt(10, 2))
    assert_cold(owing, cold, "computed again")


def test_owed_tokens_give_the_logits_of_a_cold_run(owing, cold):
    with apart(cold) as whole:
        whole.prefill(owing.tokens)
        assert_same_bits(owing.logits, whole.logits, "logits")
    assert not owing.transcript.uncomputed.size
    assert_cold(owing, cold, "after logits")


def test_owed_tokens_are_computed_before_the_next_one_is_generated(owing, cold):
    text = owing.tokens.tolist()
    produced = owing.generate(20, eos=None).tokens.tolist()
    _, expected = alone(cold, text, 20)
    assert produced[0] == expected[0].id
    if owing.core.config.exact == "all":
        assert produced == ids_of(expected)
    assert_cold(owing, cold, "generated")


def test_a_pending_token_that_is_owed_with_the_rest_was_not_lost(owing, cold):
    text = owing.tokens.tolist()
    token = next(owing.generate(1, eos=None, stream="tokens"))
    with refusing():
        owing.trim(owing.length - 1)
        assert owing.tokens.tolist() == text
        assert next(owing.generate(1, eos=None, stream="tokens")) == token
    owing.generate(4, eos=None).tokens.tolist()
    assert_cold(owing, cold, "with a pending token")


def test_owed_tokens_can_be_cut_edited_and_forked(owing, cold):
    text = owing.tokens.tolist()
    owing.trim(CUT - 7)
    assert owing.tokens.tolist() == owing.transcript.uncomputed.tolist() == text[: CUT - 7]
    with owing.fork() as twin:
        assert twin.tokens.tolist() == twin.transcript.uncomputed.tolist() == text[: CUT - 7]
        twin.append([3, 4])
        assert_cold(twin, cold, "the fork")
    edited = [*text[:30], *prompt(40, 2)]
    reuse = owing.update(edited)
    assert (reuse.total, reuse.computed, reuse.changed) == (70, 70 - CHUNK, 30)  # the fork had one
    assert_cold(owing, cold, "edited")


@pytest.mark.parametrize("upto", [None, 40])
def test_owed_tokens_are_computed_for_a_save(model, engine, cold, closing, tmp_path, upto):
    session = closing(engine.session())
    session.prefill(prompt(90, 11))
    with refusing():
        session.trim(CUT)
    session.save(tmp_path / "turn.kvsnap", upto=upto)
    assert (
        session.tokens.tolist()
        == session.transcript.uncomputed.tolist()
        == prompt(90, 11)[:CUT].tolist()
    )
    again = closing(make_engine(model)).restore(tmp_path / "turn.kvsnap")
    assert again.tokens.tolist() == prompt(90, 11)[: upto or CUT].tolist()
    assert_cold(again, cold, "saved while everything was owed")


def test_a_scheduler_computes_what_sessions_owe_beside_those_that_owe_nothing(
    engine, owing, cold, closing
):
    other, third = (closing(apart(engine)) for _ in range(2))
    other.prefill(prompt(33, 4))
    third.prefill(prompt(64, 5))
    with refusing():
        third.trim(50)
    sessions = [owing, other, third]
    texts = [session.tokens.tolist() for session in sessions]
    completions = engine.run([*sessions, prompt(45, 6)], 12, eos=None)
    assert [completion.finish_reason for completion in completions] == ["length"] * 4
    for session, text, completion in zip(sessions, texts, completions):
        assert session.tokens.tolist() == [*text, *completion.tokens]
        if engine.config.exact == "all":
            assert completion.tokens.tolist() == ids_of(alone(cold, text, 12)[1])
        assert_cold(session, cold, f"request {completion.index}")


def test_sessions_that_generate_together_settle_what_one_of_them_owes(engine, owing, cold, closing):
    other = closing(apart(engine))
    other.prefill(prompt(33, 4))
    produced = {id(owing): [], id(other): []}
    for session, token in engine.generate_many([owing, other], 9, eos=None):
        produced[id(session)].append(token)
    assert [len(tokens) for tokens in produced.values()] == [9, 9]
    for session in (owing, other):
        assert_cold(session, cold, "generated together")


def test_what_was_lost_is_not_counted_where_others_hold_it_still(model, closing):
    engine = closing(make_engine(model, pool_tokens=512))
    first, second = engine.session(), engine.session()
    for session in (first, second):
        session.prefill(prompt(80))
    with refusing():
        second.trim(70)
    assert engine.stats()["tokens_reprefilled"] == 70
    forwards = engine.core.runner.forwards
    second.append([5])
    assert engine.stats()["tokens_reprefilled"] == 70 - 4 * CHUNK
    assert engine.core.runner.forwards == forwards + 1
    with refusing():
        second.trim(32)
    _ = second.logits  # all of it is found
    assert second.committed == 32
    assert engine.stats()["tokens_reprefilled"] == 70 - 4 * CHUNK
    with refusing():
        second.trim(20)
        second.trim(10)  # nobody has computed the others meanwhile
    assert engine.stats()["tokens_reprefilled"] == 70 - 4 * CHUNK + 20
    second.append([5])
    assert engine.stats()["tokens_reprefilled"] == 70 - 4 * CHUNK + 20


def test_tokens_that_were_owed_before_a_cut_are_no_loss_of_it(model, closing):
    """Provisional rows are owed for another reason; others may hold them all the same."""
    engine = closing(make_engine(model, pool_tokens=512, exact="reuse", linear="torch"))
    session, other = engine.session(), engine.session()
    session.prefill(prompt(5))
    session.generate(6, eos=None).tokens.tolist()
    session.transcript.drop_inexact()
    assert session.transcript.uncomputed.size == 10
    text = session.tokens[:9].tolist()
    other.prefill([*text, *prompt(40, 3)])
    session.trim(9)
    session.append(prompt(40, 3))
    assert engine.stats()["tokens_reprefilled"] == 0


def test_a_prompt_that_does_not_fit_leaves_an_empty_session_empty(model, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=0))
    other, session = engine.session(), engine.session()
    other.prefill(prompt(40))
    with pytest.raises(CapacityError, match="bytes"):
        session.prefill([*prompt(40), *prompt(400, 2)])  # whose first chunks are there
    assert session.length == session.committed == 0
    session.prefill(prompt(20, 3))
    assert session.tokens.tolist() == prompt(20, 3).tolist()


def test_a_refused_cut_that_cannot_be_computed_for_want_of_room_still_has_its_text(model, closing):
    engine = closing(make_engine(model, pool_tokens=96, host_bytes=0))
    session = engine.session()
    session.prefill(prompt(60))
    with refusing():
        session.trim(50)
    with pytest.raises(CapacityError, match="bytes"):
        session.append(prompt(400, 2))
    assert session.tokens.tolist() == prompt(60)[:50].tolist()
    session.append([4])
    assert session.committed == 51
