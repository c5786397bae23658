"""`close` ends what an engine owns, from any thread and at any moment, or changes nothing."""

from __future__ import annotations

import threading
import weakref

import pytest
from reference_models import build, make_engine, prompt

from kvpager import InvalidArgumentError


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=256))


class Slow:
    """The engine's model, whose forwards wait in the middle until they may go on."""

    def __init__(self, engine, monkeypatch):
        self.inside, self.go_on = threading.Event(), threading.Event()
        begin = engine.core.runner._begin

        def waits(batch, rows):
            self.inside.set()
            assert self.go_on.wait(30)
            return begin(batch, rows)

        monkeypatch.setattr(engine.core.runner, "_begin", waits)


def in_thread(work):
    """Runs it; returns the thread, and where its outcome or exception will be."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_closing_waits_for_the_forward_of_another_thread_and_frees_everything(engine, monkeypatch):
    session = engine.session()
    slow = Slow(engine, monkeypatch)
    prefilling, told = in_thread(lambda: session.prefill(prompt(20)))
    assert slow.inside.wait(30)
    core = weakref.ref(engine.pager)
    closing, closed = in_thread(engine.close)
    closing.join(0.2)
    assert closing.is_alive()
    assert not engine.closed
    slow.go_on.set()
    prefilling.join()
    closing.join()
    assert closed == [None]
    assert told[0] is None or "closed" in str(told[0])  # by then, after its forward
    assert engine.closed
    assert session.closed
    assert core() is not None
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.pager.stats()
    engine.close()


def test_what_comes_after_the_forward_that_was_waited_for_says_that_the_engine_is_closed(
    engine, monkeypatch
):
    session = engine.session()
    slow = Slow(engine, monkeypatch)
    prefilling, told = in_thread(lambda: session.prefill(prompt(200)))  # several forwards
    assert slow.inside.wait(30)
    closing, _ = in_thread(engine.close)
    while not engine.core._closing.locked():
        pass
    slow.go_on.set()
    closing.join()
    prefilling.join()
    assert isinstance(told[0], InvalidArgumentError)
    assert "closed" in str(told[0])


def test_closing_inside_a_forward_is_refused_and_changes_nothing(engine, monkeypatch):
    session = engine.session()
    session.prefill(prompt(20))
    begin = engine.core.runner._begin
    refused = []

    def closes(batch, rows):
        with pytest.raises(InvalidArgumentError, match="inside a forward") as error:
            engine.close()
        refused.append(error)
        return begin(batch, rows)

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.runner, "_begin", closes)
        assert len(session.generate(3, eos=None).tokens.tolist()) == 3
    assert refused
    assert not engine.closed
    assert len(session.generate(3, eos=None).tokens.tolist()) == 3


def test_many_threads_may_close_at_once(model):
    engine = make_engine(model, pool_tokens=256)
    engine.session().prefill(prompt(20))
    outcomes = [in_thread(engine.close) for _ in range(8)]
    for thread, _ in outcomes:
        thread.join()
    assert [outcome for _, outcome in outcomes] == [[None]] * 8
    assert engine.closed


def test_requests_of_a_closed_engine_end_as_closed(engine):
    scheduler = engine.scheduler(max_sessions=2)
    requests = [scheduler.submit(prompt(20, seed=i), 50, eos=None) for i in range(3)]
    for _ in range(4):
        scheduler.step()
    assert [request.state for request in requests] == ["decoding", "decoding", "waiting"]
    engine.close()
    assert [request.state for request in requests] == ["finished"] * 3
    assert [request.completion.finish_reason for request in requests] == ["closed"] * 3
    assert len(requests[0].completion.tokens) > 0
    assert scheduler.idle
    for call in (scheduler.step, lambda: scheduler.submit(prompt(20), 5)):
        with pytest.raises(InvalidArgumentError, match="closed"):
            call()


def test_a_run_whose_engine_is_closed_by_another_thread_returns_what_it_has(engine, monkeypatch):
    told = threading.Event()
    running, outcome = in_thread(
        lambda: engine.run(
            [prompt(20, seed=i) for i in range(3)],
            200,
            eos=None,
            on_token=lambda request, token: told.set(),
        )
    )
    assert told.wait(30)
    engine.close()
    running.join()
    assert {completion.finish_reason for completion in outcome[0]} == {"closed"}
    assert all(completion.error is None for completion in outcome[0])


def test_a_callback_may_close_the_engine_it_is_called_by(engine):
    found = engine.run(
        [prompt(20), prompt(30)], 20, eos=None, on_token=lambda request, token: engine.close()
    )
    assert {completion.finish_reason for completion in found} == {"closed"}
    assert engine.closed


def test_nothing_is_submitted_to_a_closed_scheduler(engine):
    with engine.scheduler() as scheduler:
        request = scheduler.submit(prompt(20), 5)
    assert request.completion.finish_reason == "cancelled"
    with pytest.raises(InvalidArgumentError, match="scheduler is closed"):
        scheduler.submit(prompt(20), 5)
    with pytest.raises(InvalidArgumentError, match="scheduler is closed"):
        scheduler.step()
    scheduler.close()
    assert engine.stats()["reserved_chunks"] == 0


def test_a_scheduler_closed_during_a_step_of_another_thread_ends_with_it(engine, monkeypatch):
    scheduler = engine.scheduler()
    request = scheduler.submit(prompt(20), 5)
    slow = Slow(engine, monkeypatch)
    stepping, _ = in_thread(scheduler.step)
    assert slow.inside.wait(30)
    scheduler.close()
    slow.go_on.set()
    stepping.join()
    assert request.completion.finish_reason == "cancelled"
    assert not engine.closed


def test_iterators_of_a_closed_engine_say_so(engine):
    sessions = [engine.session() for _ in range(2)]
    for session in sessions:
        session.prefill(prompt(20))
    begun, fresh = (
        sessions[0].generate(50, eos=None, stream="tokens"),
        sessions[1].generate(50, eos=None, stream="tokens"),
    )
    next(begun)
    engine.close()
    for stream in (begun, fresh):
        with pytest.raises(InvalidArgumentError, match="closed"):
            list(stream)


def test_saves_are_waited_for_and_whole(engine, tmp_path):
    session = engine.session()
    session.prefill(prompt(100))
    handles = [session.save(tmp_path / str(i), wait=False) for i in range(4)]
    engine.close()
    assert all(handle.done() for handle in handles)
    assert all(handle.result().tokens == 100 for handle in handles)


def test_a_draft_is_closed_with_its_engine(model):
    engine = make_engine(model, pool_tokens=256, draft=model)
    session = engine.session()
    session.prefill(prompt(40))
    session.generate(5, eos=None, speculate="draft").tokens.tolist()
    draft = engine.draft
    engine.close()
    assert draft.closed
    assert draft.core.turns.ended
