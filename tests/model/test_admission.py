"""Whom a scheduler admits and when: priorities, overtaking, full queues, and time that runs out."""

from __future__ import annotations

import asyncio

import pytest
from apart import alone, ids_of
from reference_models import CHUNK, ROWS, build, make_engine, prompt

from kvpager import InvalidArgumentError
from kvpager.errors import QueueFullError
from kvpager.requests import waiting as waiting_module
from kvpager.requests.waiting import RequestHeap


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model, pool_tokens=2048) as engine:
        yield engine


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def finish(scheduler):
    while not scheduler.idle:
        scheduler.step()


def test_beyond_max_waiting_a_submission_is_refused_and_changes_nothing(engine):
    session = engine.session()
    with engine.scheduler(1, max_waiting=2) as scheduler:
        first = scheduler.submit(prompt(5), 3, eos=None)
        scheduler.step()
        waiting = [scheduler.submit(prompt(5, i), 3, eos=None) for i in (1, 2)]
        for _ in range(2):
            with pytest.raises(QueueFullError, match="max_waiting is 2, and 2 requests wait"):
                scheduler.submit(prompt(5, 3), 3, session=session)
        assert (scheduler.waiting, scheduler.running) == (2, 1)
        waiting[0].cancel()
        scheduler.step()
        last = scheduler.submit(prompt(5, 3), 3, session=session, eos=None)
        finish(scheduler)
        assert [r.completion.finish_reason for r in (first, *waiting, last)] == [
            "length",
            "cancelled",
            "length",
            "length",
        ]
        assert (scheduler.waiting, scheduler.running) == (0, 0)
    session.close()
    with pytest.raises(InvalidArgumentError, match="max_waiting is 0"):
        engine.scheduler(max_waiting=0)


def test_lower_priorities_are_admitted_first_and_equal_ones_in_their_order(engine):
    with engine.scheduler(1) as scheduler:
        order = []
        for number, priority in enumerate((0, 5, -1, 5, -1, 0)):
            scheduler.submit(
                prompt(5, number),
                1,
                eos=None,
                priority=priority,
                on_finish=lambda request, _: order.append(request.index),
            )
        finish(scheduler)
        assert order == [2, 4, 0, 5, 1, 3]
        with pytest.raises(InvalidArgumentError, match="priority is 'high'"):
            scheduler.submit(prompt(5), 1, priority="high")


def admitted_in_order(scheduler, submissions):
    """Indices of (tenant, tokens, priority) in the order in which they run, one after the other."""
    order = []
    for number, (tenant, tokens, priority) in enumerate(submissions):
        scheduler.submit(
            prompt(5, number),
            tokens,
            eos=None,
            tenant=tenant,
            priority=priority,
            on_finish=lambda request, _: order.append(request.index),
        )
    finish(scheduler)
    return order


def test_requests_of_one_priority_are_admitted_in_turns_of_tenants(engine):
    many, late, urgent = [("a", 1, 0)] * 4, [("b", 1, 0)] * 2, [("c", 1, -1)]
    with engine.scheduler(1) as scheduler:
        assert admitted_in_order(scheduler, many + late + urgent) == [6, 0, 4, 1, 5, 2, 3]
    with engine.scheduler(1) as scheduler:  # 5 + 1 tokens each of b, 5 + 13 of a
        large, small = [("a", 13, 0)] * 2, [("b", 1, 0)] * 4
        assert admitted_in_order(scheduler, large + small) == [0, 2, 3, 4, 1, 5]


def test_what_was_cancelled_in_the_queue_takes_no_turn(engine):
    with engine.scheduler(1) as scheduler:
        running = scheduler.submit(prompt(5), 3, eos=None, tenant="b")
        scheduler.step()
        gone = [scheduler.submit(prompt(5, i), 3, tenant="a") for i in range(1, 9)]
        patient = scheduler.submit(prompt(5, 9), 3, eos=None, tenant="a")
        others = [scheduler.submit(prompt(5, i), 3, eos=None, tenant="b") for i in range(10, 15)]
        for request in gone:
            request.cancel()
        while patient.completion is None:
            scheduler.step()
        assert running.completion is not None
        assert [request.state for request in others] == ["waiting"] * 5
        finish(scheduler)


def test_places_are_kept_free_of_one_tenant(engine):
    with engine.scheduler(4) as scheduler:
        scheduler.most_of_one = 3
        many = [scheduler.submit(prompt(5, i), 20, eos=None, tenant="a") for i in range(8)]
        scheduler.step()
        assert [request.state != "waiting" for request in many] == [True] * 3 + [False] * 5
        one = scheduler.submit(prompt(5, 9), 1, eos=None, tenant="b")
        scheduler.step()
        assert one.completion is not None
        finish(scheduler)
        assert all(len(request.tokens) == 20 for request in many)
        assert many[4].tokens.tolist() == ids_of(alone(engine, prompt(5, 4), 20)[1])


def test_prompts_of_tenants_share_rows_however_many_they_are(model, closing):
    engine = closing(make_engine(model, pool_tokens=2048, rows=CHUNK))
    with engine.scheduler() as scheduler:
        for i in range(6):
            scheduler.submit(prompt(8 * CHUNK, i), 1, eos=None, tenant="a")
        scheduler.step()
        one = scheduler.submit(prompt(3 * CHUNK, 99), 1, eos=None, tenant="b")
        steps = 0
        while one.completion is None:
            scheduler.step()
            steps += 1
        assert steps <= 2 * 3 + 1  # it has every other forward, and its answer is one more
        finish(scheduler)


def test_a_full_queue_of_one_tenant_refuses_no_other(engine):
    with engine.scheduler(1, max_waiting=2) as scheduler:
        for i in range(2):
            scheduler.submit(prompt(5, i), 1, tenant="a")
        with pytest.raises(QueueFullError, match="max_waiting is 2"):
            scheduler.submit(prompt(5, 3), 1, tenant="a")
        other = scheduler.submit(prompt(5, 4), 1, eos=None, tenant="b")
        finish(scheduler)
        assert other.completion.finish_reason == "length"


def test_a_request_that_waits_too_long_ends_with_timeout(engine):
    with engine.scheduler(1) as scheduler:
        scheduler.clock = clock = Clock()
        running = scheduler.submit(prompt(5), 50, eos=None, timeout_s=30)
        late = scheduler.submit(prompt(5, 1), 3, eos=None, timeout_s=10)
        patient = scheduler.submit(prompt(5, 2), 3, eos=None)
        for _ in range(4):
            scheduler.step()
        clock.now += 10
        scheduler.step()
        assert late.completion.finish_reason == "timeout"
        assert (len(late.tokens), late.completion.queue_s) == (0, 10)
        before = running.tokens.tolist()
        clock.now += 20
        scheduler.step()
        assert running.completion.finish_reason == "timeout"
        assert running.completion.error is None
        assert running.completion.tokens.tolist() == before
        assert before == ids_of(alone(engine, prompt(5), 50)[1])[: len(before)]
        finish(scheduler)
        assert patient.completion.finish_reason == "length"
        assert patient.completion.queue_s == 30


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "soon", True])
def test_a_timeout_is_a_positive_number_of_seconds(engine, seconds):
    with engine.scheduler() as scheduler:
        with pytest.raises(InvalidArgumentError, match="timeout_s is"):
            scheduler.submit(prompt(5), 3, timeout_s=seconds)
        assert scheduler.idle


def test_the_serving_thread_ends_a_request_whose_time_is_over(engine):
    async def serve():
        async with engine.serve(1) as serving:
            long = serving.stream(prompt(5), 1500, eos=None)
            late = serving.stream(prompt(5, 1), 3, eos=None, timeout_s=0.02)
            done = await late.complete()
            assert long.completion is None
            await long.aclose()
            return done.finish_reason

    assert asyncio.run(asyncio.wait_for(serve(), 60)) == "timeout"


def test_a_request_without_room_is_overtaken_only_so_often(model, closing, monkeypatch):
    monkeypatch.setattr(waiting_module, "MOST_OVERTAKING", 3)
    engine = closing(make_engine(model, host_bytes="480KiB"))
    admitted = []
    with engine.scheduler() as scheduler:
        keeper = scheduler.submit(prompt(60, 60), 40, eos=None)
        scheduler.step()
        large = scheduler.submit(prompt(120, 120), 4, eos=None)
        small = [scheduler.submit(prompt(5, i), 2, eos=None) for i in range(12)]
        while keeper.completion is None:
            scheduler.step()
            admitted.append(sum(request.state != "waiting" for request in small))
        assert max(admitted) == 3
        while large.state == "waiting":
            scheduler.step()
        assert sum(request.completion is not None for request in small) == 3
        finish(scheduler)
        for request in small:
            assert request.completion.finish_reason == "length"
        expected = alone(engine, prompt(120, 120), 4)[1]
        assert large.tokens.tolist() == ids_of(expected)


def test_a_short_prompt_behind_a_very_long_one_has_its_token_long_before(engine):
    with engine.scheduler() as scheduler:
        long = scheduler.submit(prompt(30 * ROWS), 1, eos=None)
        short = scheduler.submit(prompt(ROWS // 2, 1), 1, eos=None)
        for _ in range(3):
            scheduler.step()
        assert short.completion is not None
        assert long.state == "prefilling"


def test_thousands_of_waiting_requests_cost_a_step_nothing(engine, monkeypatch):
    compared = []
    holds = RequestHeap._holds

    def counted(self, entry):
        compared.append(entry)
        return holds(self, entry)

    with engine.scheduler(1) as scheduler:
        scheduler.clock = clock = Clock()
        running = scheduler.submit(prompt(5), 200, eos=None)
        waiting = [
            scheduler.submit([5, 6, 7], 3, eos=None, timeout_s=50 + i / 100) for i in range(5000)
        ]
        scheduler.step()
        monkeypatch.setattr(RequestHeap, "_holds", counted)
        for _ in range(10):
            scheduler.step()
        assert len(compared) < 10 * 10
        for request in waiting[::2]:
            request.cancel()
        compared.clear()
        scheduler.step()
        assert scheduler.waiting == 2500
        assert len(compared) < 10 * 2500
        clock.now += 200
        compared.clear()
        scheduler.step()
        assert scheduler.waiting == 0
        assert len(compared) < 20 * 2500
        assert {request.completion.finish_reason for request in waiting[1::2]} == {"timeout"}
        running.cancel()
