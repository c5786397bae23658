"""Admission: priorities, deadlines, queue limits, who overtakes whom; and exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from damage import damage_chunk
from reference_models import build, make_engine, prompt

from kvpager import DirectoryStore, InvalidArgumentError
from kvpager.errors import QueueFullError
from kvpager.requests.scheduler import Scheduler
from kvpager.requests.waiting import MOST_OVERTAKEN

CHUNK = 16


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


def drained(scheduler):
    """Steps until everything is finished; the indices in the order in which they finished."""
    order = []
    while not scheduler.idle:
        scheduler.step()
        order += [
            index
            for index in range(scheduler._submitted)
            if index not in scheduler._unfinished and index not in order
        ]
    return order


def test_a_lower_priority_is_served_earlier_and_equals_in_their_order(engine):
    with engine.scheduler(max_sessions=1) as scheduler:
        for priority in (0, 5, 1, 0, 1):
            scheduler.submit(prompt(8, seed=priority), 2, priority=priority)
        assert drained(scheduler) == [0, 3, 2, 4, 1]


def test_a_short_prompt_has_its_first_token_long_before_a_long_one_is_read(engine):
    rows = engine.rows
    with engine.scheduler() as scheduler:
        long = scheduler.submit(prompt(50 * rows, seed=1), 1)
        scheduler.step()
        short = scheduler.submit(prompt(CHUNK, seed=2), 4)
        steps = 0
        while short.state != "finished":
            scheduler.step()
            steps += 1
        assert steps <= 8
        assert long.state == "prefilling"


@pytest.fixture
def tight(model, closing):
    """An engine with room for one long text and a short one."""
    chunk_bytes = make_engine(model).layout.chunk_bytes
    return closing(make_engine(model, pool_tokens=8 * CHUNK, host_bytes=40 * chunk_bytes))


def test_a_request_without_room_is_overtaken_by_those_that_fit(tight):
    with tight.scheduler() as scheduler:
        first = scheduler.submit(prompt(24 * CHUNK, seed=1), 30)
        scheduler.step()
        large = scheduler.submit(prompt(30 * CHUNK, seed=2), 2)
        small = scheduler.submit(prompt(CHUNK, seed=3), 2)
        while small.state != "finished":
            scheduler.step()
        assert first.state != "finished"
        assert large.state == "waiting"
        while not scheduler.idle:
            scheduler.step()
        assert large.completion.finish_reason == "length"


def test_a_request_is_overtaken_only_so_often(tight):
    with tight.scheduler() as scheduler:
        first = scheduler.submit(prompt(24 * CHUNK, seed=1), 180)
        scheduler.step()
        large = scheduler.submit(prompt(30 * CHUNK, seed=2), 2)
        later = [scheduler.submit(prompt(4, seed=3 + i), 1) for i in range(MOST_OVERTAKEN + 20)]
        while first.state != "finished":
            scheduler.step()
        overtaking = sum(one.state == "finished" for one in later)
        assert MOST_OVERTAKEN <= overtaking < len(later)
        while not scheduler.idle:
            scheduler.step()
        assert large.completion.finish_reason == "length"
        assert all(one.completion.finish_reason == "length" for one in later)


def test_a_full_queue_refuses_and_changes_nothing(engine):
    with engine.scheduler(max_sessions=1, max_waiting=2) as scheduler:
        kept = [scheduler.submit(prompt(8, seed=i), 2) for i in range(3)]
        with pytest.raises(QueueFullError, match="max_waiting is 2"):
            scheduler.submit(prompt(8), 2)
        assert (scheduler.waiting, scheduler.running) == (3, 0)
        scheduler.step()
        assert (scheduler.waiting, scheduler.running) == (2, 1)
        with pytest.raises(QueueFullError):
            scheduler.submit(prompt(8), 2)
        assert drained(scheduler) == [0, 1, 2]
        assert all(one.completion.finish_reason == "length" for one in kept)


def test_a_request_ends_when_its_time_is_over_waiting_or_not(engine):
    now = [0.0]
    scheduler = Scheduler(
        engine.core, lambda salt: engine.session(salt=salt), 1, clock=lambda: now[0]
    )
    with scheduler:
        running = scheduler.submit(prompt(8), 500, timeout_s=10)
        waiting = scheduler.submit(prompt(8, seed=1), 2, timeout_s=5)
        patient = scheduler.submit(prompt(8, seed=2), 2)
        for _ in range(4):
            scheduler.step()
        now[0] = 5.0
        scheduler.step()
        assert waiting.completion.finish_reason == "timeout"
        assert waiting.completion.queue_s is None
        now[0] = 10.0
        scheduler.step()
        assert running.completion.finish_reason == "timeout"
        assert 0 < len(running.completion.tokens) < 500
        drained(scheduler)
        assert patient.completion.finish_reason == "length"


def test_thousands_that_wait_cost_a_step_nothing(engine, monkeypatch):
    from kvpager.requests import waiting

    comparisons = 0
    whole = waiting.heapq.heappush

    def counted(heap, item):
        nonlocal comparisons
        comparisons += 1
        whole(heap, item)

    with engine.scheduler(max_sessions=1) as scheduler:
        requests = [scheduler.submit(prompt(4), 1) for _ in range(5000)]
        monkeypatch.setattr(waiting.heapq, "heappush", counted)
        for _ in range(20):
            scheduler.step()
        for request in requests[1000:]:
            request.cancel()
        scheduler.step()
        assert comparisons == 0
        assert scheduler.waiting < 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": "high"}, "priority is 'high'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"salt": ""}, "salt is ''"),
    ],
)
def test_bad_values_are_refused_by_name(engine, options, says):
    with engine.scheduler() as scheduler, pytest.raises(InvalidArgumentError, match=says):
        scheduler.submit(prompt(4), 1, **options)


def counts(completion):
    assert completion.cached_tokens + completion.computed_tokens == completion.prompt_tokens
    return completion.cached_tokens, completion.computed_tokens


def completed(engine, ids, **options):
    with engine.scheduler() as scheduler:
        request = scheduler.submit(ids, 2, **options)
        drained(scheduler)
        return request.completion


def test_counts_say_exactly_what_was_computed(engine, tmp_path):
    text = prompt(5 * CHUNK + 3)
    assert counts(completed(engine, text)) == (0, len(text))
    again = np.concatenate([text[: 4 * CHUNK], prompt(CHUNK, seed=9)])
    assert counts(completed(engine, again)) == (4 * CHUNK, CHUNK)  # shared chunks of the pool
    session = engine.session()
    session.prefill(text[:20])
    session.generate(3)  # leaves a pending token
    longer = np.concatenate([session.tokens, prompt(10, seed=3)])
    assert counts(completed(engine, longer, session=session)) == (22, len(longer) - 22)
    session.save(tmp_path / "one.kvsnap")
    held = session.committed
    restored = engine.restore(tmp_path / "one.kvsnap")
    longer = np.concatenate([restored.tokens, prompt(5, seed=4)])
    assert counts(completed(engine, longer, session=restored)) == (held, len(longer) - held)
    assert counts(completed(engine, restored)) == (len(longer) + 1, 1)


def test_what_a_store_has_counts_as_cached(model, closing, tmp_path):
    store, text = DirectoryStore(tmp_path), prompt(3 * CHUNK + 5)
    session = closing(make_engine(model)).session()
    session.prefill(text)
    session.save("a", store=store)
    other = closing(make_engine(model, store=store))
    assert counts(completed(other, text)) == (3 * CHUNK, 5)


def test_damaged_tokens_that_are_computed_again_count_as_computed(model, closing, tmp_path):
    text = prompt(3 * CHUNK + 5)
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(text)
    session.save(tmp_path / "a.kvsnap")
    damage_chunk(tmp_path / "a.kvsnap", engine, 1)
    other = closing(make_engine(model))
    restored = other.restore(tmp_path / "a.kvsnap", on_corrupt="recompute")
    longer = np.concatenate([restored.tokens, prompt(4, seed=2)])
    cached, computed = counts(completed(other, longer, session=restored))
    assert restored.recomputed_tokens == CHUNK
    assert (cached, computed) == (len(text) - CHUNK, 4 + CHUNK)


def test_a_session_with_a_salt_shares_nothing_and_has_the_same_bits(engine):
    text = prompt(3 * CHUNK)
    plain, first, second, other = (
        completed(engine, text, salt=salt, logprobs=True) for salt in (None, "a", "a", "b")
    )
    assert [one.cached_tokens for one in (plain, first, second, other)] == [0, 0, len(text), 0]
    for one in (first, second, other):
        assert one.tokens.tolist() == plain.tokens.tolist()
        assert one.logprobs.tobytes() == plain.logprobs.tobytes()


def test_what_a_session_with_a_salt_saved_needs_that_salt(engine, tmp_path):
    from kvpager import FingerprintMismatchError

    session = engine.session(salt="a")
    session.prefill(prompt(2 * CHUNK + 3))
    session.save(tmp_path / "a.kvsnap")
    fork = session.fork()
    fork.append(prompt(3))
    assert fork.sequence.salt == session.sequence.salt
    for salt in (None, "b"):
        with pytest.raises(FingerprintMismatchError) as raised:
            engine.restore(tmp_path / "a.kvsnap", salt=salt)
        assert raised.value.field == "salt"
    restored = engine.restore(tmp_path / "a.kvsnap", salt="a")
    assert restored.logits.tolist() == session.logits.tolist()
