"""Requests that come and go: whose turn it is, who has to wait, and that no bit depends on it."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from functools import cache, partial

import numpy as np
import pytest
import text_models
from apart import Oracle, alone, ids_of, logprob_bits
from bits import assert_same_session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_models import CHUNK, ROWS, build, make_engine, prompt

from kvpager import CapacityError, Engine, InvalidArgumentError
from kvpager._runtime.text.answer import AnswerText
from kvpager.sampling import Distribution


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model, pool_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def text_engine():
    tokenizer = text_models.byte_level()
    with Engine(text_models.model(), tokenizer=tokenizer, pool_tokens=1024, rows=32) as engine:
        yield engine


@pytest.fixture
def scheduler(engine):
    with engine.scheduler() as scheduler:
        yield scheduler
    stats = engine.stats()
    assert stats["reserved_chunks"] == stats["open_blocks"] == stats["sequences"] == 0


def finish(scheduler):
    told = []
    while not scheduler.idle:
        told += scheduler.step()
    return told


def told_alone(engine, ids, count):
    session, told = alone(engine, ids, count)
    session.close()
    return ids_of(told)


def steps_until(scheduler, condition, most=1000):
    for count in range(most):
        if condition():
            return count
        scheduler.step()
    raise AssertionError(f"not within {most} steps")


def test_a_request_goes_through_its_states(scheduler):
    request = scheduler.submit(prompt(ROWS + 5), 3, eos=None)
    states = [request.state]
    while not scheduler.idle:
        scheduler.step()
        states.append(request.state)
    assert states == ["waiting", "prefilling", "decoding", "decoding", "finished"]
    assert request.completion.finish_reason == "length"
    assert request.tokens.tolist() == request.completion.tokens.tolist()
    assert "finished" in repr(request)


def test_a_step_returns_the_tokens_it_brought(engine, scheduler):
    requests = [scheduler.submit(prompt(9, seed), 4, eos=None) for seed in range(3)]
    told = finish(scheduler)
    for seed, request in enumerate(requests):
        expected = alone(engine, prompt(9, seed), 4)[1]
        assert [token for one, token in told if one is request] == ids_of(expected)


@pytest.fixture
def decoding(engine, closing):
    """A scheduler in which so many requests decode, each over a session of its own."""

    def decoding(count):
        sessions = [closing(engine.session()) for _ in range(count)]
        engine.prefill_many((session, prompt(3, i)) for i, session in enumerate(sessions))
        scheduler = closing(engine.scheduler(max_sessions=count))
        return scheduler, [scheduler.submit(session, 40, eos=None) for session in sessions]

    return decoding


def test_tokens_per_forward_grow_with_sessions_until_the_rows_are_full(engine, decoding):
    rates = []
    for sessions in (1, 2, 8, ROWS, ROWS + 8):
        scheduler, _ = decoding(sessions)
        scheduler.step()
        before = engine.stats()["model_forwards"]
        told = sum(len(scheduler.step()) for _ in range(6))
        rates.append(told / (engine.stats()["model_forwards"] - before))
        scheduler.close()
    assert rates == [1, 2, 8, ROWS, ROWS]


def test_more_sessions_than_rows_take_turns(decoding):
    scheduler, requests = decoding(ROWS + 8)
    for _ in range(2 * (ROWS + 8) // 8):
        scheduler.step()
        counts = [len(request.tokens) for request in requests]
        assert max(counts) - min(counts) <= 1
    assert min(counts) >= 7


@pytest.mark.parametrize("long_ones", [1, 3])
def test_a_long_prompt_does_not_hold_up_the_first_token_of_a_short_one(scheduler, long_ones):
    for seed in range(long_ones):
        scheduler.submit(prompt(40 * ROWS, 400 + 10 * long_ones + seed), 2, eos=None)
    for _ in range(3):
        scheduler.step()
    short = scheduler.submit(prompt(12, seed=9), 2, eos=None)
    assert steps_until(scheduler, lambda: len(short.tokens)) <= 2


def test_prompts_of_one_length_come_to_an_end_together(scheduler):
    requests = [scheduler.submit(prompt(12 * CHUNK, 100 + i), 1, eos=None) for i in range(4)]
    ends = {}
    for step in range(1000):
        if scheduler.idle:
            break
        scheduler.step()
        for request in requests:
            if request.completion is not None:
                ends.setdefault(request.index, step)
    assert max(ends.values()) - min(ends.values()) <= 2


def test_decode_never_waits_for_prompts(scheduler):
    decoding = scheduler.submit(prompt(4), 60, eos=None)
    steps_until(scheduler, lambda: decoding.state == "decoding")
    for seed in range(3):
        scheduler.submit(prompt(20 * ROWS, 200 + seed), 1, eos=None)
    while decoding.completion is None:
        assert [one for one, _ in scheduler.step()].count(decoding) == 1


def test_a_prompt_fills_the_rows_that_decode_leaves(engine, scheduler):
    decoding = [scheduler.submit(prompt(4, seed), 60, eos=None) for seed in range(5)]
    steps_until(scheduler, lambda: all(one.state == "decoding" for one in decoding))
    scheduler.submit(prompt(20 * ROWS, 300), 1, eos=None)
    before = engine.stats()
    for _ in range(5):
        scheduler.step()
    after = engine.stats()
    assert after["model_rows"] - before["model_rows"] == 5 * ROWS
    assert after["model_rows_used"] - before["model_rows_used"] == 5 * ROWS


def test_a_small_request_overtakes_one_that_waits_for_room(model, closing):
    engine = closing(make_engine(model, host_bytes="480KiB"))
    with engine.scheduler() as scheduler:
        first, large, small = (
            scheduler.submit(prompt(length, length), 4, eos=None) for length in (60, 120, 5)
        )
        scheduler.step()
        assert large.state == "waiting"
        assert "waiting" not in (first.state, small.state)
        finish(scheduler)
        for request, length in zip((first, large, small), (60, 120, 5)):
            expected = alone(engine, prompt(length, length), 4)[1]
            assert request.tokens.tolist() == ids_of(expected)


def test_what_can_never_fit_fails_alone_and_says_what_it_needs(model, closing):
    engine = closing(make_engine(model, host_bytes="480KiB"))
    with engine.scheduler() as scheduler:
        requests = [
            scheduler.submit(ids, new, eos=None)
            for ids, new in ((prompt(20), 4), (prompt(9), 4000), (prompt(30), 4))
        ]
        finish(scheduler)
    assert [request.completion.finish_reason for request in requests] == [
        "length",
        "error",
        "length",
    ]
    assert isinstance(requests[1].completion.error, CapacityError)
    assert "Raise host_bytes" in str(requests[1].completion.error)


def test_one_that_gave_its_chunks_up_goes_on_with_the_same_bits(model, closing):
    """Blocks are homes, and other owners hold those that a forward needs: somebody has to yield."""
    engine = closing(make_engine(model, pool_tokens=8 * CHUNK, host_bytes=0))
    roomy = closing(make_engine(model))
    owners = [closing(engine.session()) for _ in range(3)]
    for owner in owners:
        owner.prefill(prompt(5))
    states = set()
    with engine.scheduler() as scheduler:
        requests = [
            scheduler.submit(
                prompt(10, seed), 20, temperature=1.0, seed=seed, eos=None, logprobs=True
            )
            for seed in range(5)
        ]
        while not scheduler.idle:
            scheduler.step()
            states |= {one.state for one in requests if len(one.tokens) and not one.completion}
            engine.pager.check_invariants()
    assert "waiting" in states
    for seed, request in enumerate(requests):
        expected = alone(roomy, prompt(10, seed), 20, temperature=1.0, seed=seed)[1]
        assert request.completion.finish_reason == "length", request.completion.error
        assert request.completion.tokens.tolist() == ids_of(expected)
        assert request.completion.logprobs.tobytes() == logprob_bits(expected)


def test_requests_that_find_no_block_wait_for_those_that_do_and_keep_their_chunks(model, closing):
    """Other owners take what leaves the pool when chunks are sealed, so that not all can go on."""
    engine = closing(make_engine(model, pool_tokens=8 * CHUNK))
    owners = []
    states = set()
    with engine.scheduler() as scheduler:
        requests = [scheduler.submit(prompt(10, seed), 20, eos=None) for seed in range(5)]
        while not scheduler.idle:
            scheduler.step()
            states |= {one.state for one in requests if len(one.tokens) and not one.completion}
            if len(owners) < 6:
                owner = closing(engine.session())
                try:
                    owner.prefill(prompt(5))
                    owners.append(owner)
                except CapacityError:
                    owner.close()
    assert len(owners) == 6
    assert states == {"decoding"}
    for owner in owners:
        owner.close()
    for seed, request in enumerate(requests):
        expected = ids_of(alone(engine, prompt(10, seed), 20)[1])
        assert request.completion.tokens.tolist() == expected


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_cancelled_request_gives_everything_back(engine, state):
    with engine.scheduler(max_sessions=2) as scheduler:
        seeds = [sum(map(ord, state)) + i for i in range(3)]
        requests = [scheduler.submit(prompt(6 * ROWS, seed), 9, eos=None) for seed in seeds]
        chosen = requests[2] if state == "waiting" else requests[0]
        steps_until(scheduler, lambda: chosen.state == state and len(chosen.tokens) in (0, 3))
        produced = chosen.tokens.tolist()
        chosen.cancel()
        chosen.cancel()
        scheduler.step()
        assert chosen.completion.finish_reason == "cancelled"
        assert chosen.completion.tokens.tolist() == produced
        finish(scheduler)
        for seed, request in zip(seeds, requests):
            if request is not chosen:
                expected = alone(engine, prompt(6 * ROWS, seed), 9)[1]
                assert request.tokens.tolist() == ids_of(expected)
    stats = engine.stats()
    assert stats["reserved_chunks"] == stats["open_blocks"] == stats["sequences"] == 0


def test_cancelling_a_finished_request_changes_nothing(scheduler):
    request = scheduler.submit(prompt(5), 2, eos=None)
    finish(scheduler)
    completion = request.completion
    request.cancel()
    scheduler.step()
    assert request.completion is completion
    assert completion.finish_reason == "length"


def test_closing_a_scheduler_cancels_what_is_left(engine):
    scheduler = engine.scheduler(max_sessions=1)
    requests = [scheduler.submit(prompt(5, seed), 50, eos=None) for seed in range(3)]
    for _ in range(4):
        scheduler.step()
    scheduler.close()
    assert scheduler.idle
    assert [one.completion.finish_reason for one in requests] == ["cancelled"] * 3
    assert len(requests[0].completion.tokens) == 4
    assert engine.stats()["sequences"] == 0


def test_an_interruption_of_on_token_comes_through_and_stepping_goes_on(engine, scheduler):
    told = []

    def fail_once(request, token):
        told.append(token)
        if len(told) == 5:
            raise KeyboardInterrupt

    requests = [
        scheduler.submit(prompt(9, seed), 6, eos=None, on_token=fail_once) for seed in range(3)
    ]
    with pytest.raises(KeyboardInterrupt):
        finish(scheduler)
    finish(scheduler)
    assert len(told) == 18
    for seed, request in enumerate(requests):
        assert request.completion.tokens.tolist() == ids_of(alone(engine, prompt(9, seed), 6)[1])


def test_the_last_token_told_ends_a_request_though_its_callback_was_interrupted(scheduler):
    def fail(request, token):
        raise KeyboardInterrupt

    request = scheduler.submit(prompt(9), 1, eos=None, on_token=fail)
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    scheduler.step()
    assert request.completion.finish_reason == "length"
    assert len(request.completion.tokens) == 1


def test_a_step_inside_a_step_is_refused(scheduler):
    refusals = []

    def step_again(request, token):
        with pytest.raises(InvalidArgumentError, match="another step") as refusal:
            scheduler.step()
        refusals.append(refusal)

    scheduler.submit(prompt(5), 2, eos=None, on_token=step_again)
    finish(scheduler)
    assert len(refusals) == 2


def test_requests_may_be_submitted_while_others_run(engine, scheduler):
    def submit_more(request, token):
        if len(request.tokens) == 2:
            late.append(scheduler.submit(prompt(7, seed=5), 3, eos=None))

    late = []
    scheduler.submit(prompt(5), 4, eos=None, on_token=submit_more)
    finish(scheduler)
    assert late[0].completion.tokens.tolist() == ids_of(alone(engine, prompt(7, seed=5), 3)[1])


def test_several_threads_may_submit_and_cancel_while_one_steps(engine, scheduler):
    lengths = [3 + 5 * i for i in range(12)]
    requests = []

    def submit(lengths):
        for length in lengths:
            request = scheduler.submit(prompt(length, length), 8, eos=None)
            requests.append((length, request))
            if length % 2:
                request.cancel()

    threads = [threading.Thread(target=submit, args=(lengths[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not scheduler.idle:
        scheduler.step()
    assert sorted(request.index for _, request in requests) == list(range(12))
    for length, request in requests:
        expected = ids_of(alone(engine, prompt(length, length), 8)[1])
        assert request.completion.finish_reason == ("cancelled" if length % 2 else "length")
        assert request.completion.tokens.tolist() == expected[: len(request.tokens)]


def test_a_closed_engine_and_changed_threads_are_told_to_who_steps(model):
    engine = make_engine(model)
    scheduler = engine.scheduler()
    scheduler.submit(prompt(5), 4, eos=None)
    scheduler.step()
    engine.model.train()
    try:
        with pytest.raises(InvalidArgumentError, match="training"):
            scheduler.step()
    finally:
        engine.model.eval()
    scheduler.step()
    engine.close()
    with pytest.raises(InvalidArgumentError, match="engine is closed"):
        scheduler.step()


def test_work_counts_what_is_done_and_what_is_to_come(scheduler):
    for length in (5, 40, 3):
        scheduler.submit(prompt(length, length), 6, eos=None)
    total = 5 + 40 + 3 + 18
    seen = [scheduler.work]
    while not scheduler.idle:
        scheduler.step()
        seen.append(scheduler.work)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_prompt_waits_for_another_that_computes_its_beginning(engine, scheduler):
    beginning = prompt(6 * CHUNK, seed=500)
    requests = [
        scheduler.submit(np.append(beginning, prompt(4, seed)), 2, eos=None) for seed in range(3)
    ]
    before = engine.stats()
    finish(scheduler)
    after = engine.stats()
    assert after["prefix_tokens_reused"] - before["prefix_tokens_reused"] == 2 * 6 * CHUNK
    for seed, request in enumerate(requests):
        expected = alone(engine, np.append(beginning, prompt(4, seed)), 2)[1]
        assert request.tokens.tolist() == ids_of(expected)


def test_a_prompt_that_waited_for_a_cancelled_one_computes_its_beginning_itself(engine, scheduler):
    beginning = prompt(20 * CHUNK, seed=600)
    first, second = (
        scheduler.submit(np.append(beginning, prompt(4, seed)), 2, eos=None) for seed in range(2)
    )
    for _ in range(3):
        scheduler.step()
    first.cancel()
    finish(scheduler)
    expected = alone(engine, np.append(beginning, prompt(4, 1)), 2)[1]
    assert second.tokens.tolist() == ids_of(expected)


# Random schedules.

WORLDS = {
    "reference": {"pool_tokens": 8192},
    "roomy": {"pool_tokens": 1024},
    "small pool": {"pool_tokens": 80, "debug_shuffle_seed": 3, "debug_poison": True},
    "small budget": {"pool_tokens": 96, "host_bytes": "720KiB"},
    "no lower tier": {"pool_tokens": 192, "host_bytes": 0},
}
BEGINNING = prompt(40, seed=1000)


@cache
def world(name, architecture, dtype):
    return make_engine(build(architecture, dtype), **WORLDS[name])


@cache
def reference(architecture, dtype, length, seed, new, temperature):
    engine = world("reference", architecture, dtype)
    return alone(engine, ids_for(length, seed), new, temperature=temperature, seed=seed)


def ids_for(length, seed):
    """Half of all prompts begin alike."""
    return np.append(BEGINNING, prompt(length, seed)) if seed % 2 else prompt(length, seed)


REQUESTS = st.tuples(
    st.sampled_from([1, 4, 15, 16, 33, 64]),
    st.integers(0, 3),
    st.sampled_from([1, 5, 18]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),  # whether it speculates
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.none()),
)


def follow(name, architecture, dtype, max_sessions, actions):
    """Carries out a schedule; every request must have got what it gets alone."""
    engine = world(name, architecture, dtype)
    submitted = []
    try:
        carry_out(engine, architecture, dtype, max_sessions, actions, submitted)
    finally:  # what a failure leaves would make others fail
        for _, request, _ in submitted:
            if request.completion is not None and request.completion.session is not None:
                request.completion.session.close()
    assert engine.stats()["reserved_chunks"] == engine.stats()["sequences"] == 0
    engine.pager.check_invariants()


def carry_out(engine, architecture, dtype, max_sessions, actions, submitted):
    with engine.scheduler(max_sessions) as scheduler:
        for action, what in actions:
            if action == "submit":
                length, seed, new, temperature, speculates = what
                text = reference(architecture, dtype, *what[:4])[0].tokens
                request = scheduler.submit(
                    ids_for(length, seed),
                    new,
                    temperature=temperature,
                    seed=seed,
                    eos=None,
                    logprobs=True,
                    speculate=partial(Oracle, text, 4) if speculates else None,
                    keep_session=True,
                )
                submitted.append((what, request, []))
            elif action == "cancel" and what < len(submitted):
                submitted[what][1].cancel()
            elif action == "evict":
                engine.pager.evict_all()
            for _ in range(what if action == "step" else 0):
                scheduler.step()
                engine.pager.check_invariants()
                close_kept(architecture, dtype, submitted)
        while not scheduler.idle:
            scheduler.step()
            close_kept(architecture, dtype, submitted)
    close_kept(architecture, dtype, submitted)


def close_kept(architecture, dtype, submitted):
    """Compares what has come to an end, at once: sessions that are kept take the others' room."""
    for what, request, seen in submitted:
        completion = request.completion
        if completion is None or seen:
            continue
        seen.append(True)
        session, tokens = reference(architecture, dtype, *what[:4])
        assert completion.finish_reason in ("length", "cancelled"), completion.error
        count = len(completion.tokens)
        assert count == what[2] or completion.finish_reason == "cancelled"
        assert completion.tokens.tolist() == ids_of(tokens[:count])
        assert completion.logprobs.tobytes() == logprob_bits(tokens[:count])
        if completion.session is not None:
            if completion.finish_reason == "length":
                assert_same_session(completion.session, session, f"request {what}")
            completion.session.close()


SCHEDULES = {
    "max_sessions": st.sampled_from([None, 1, 3]),
    "actions": st.lists(ACTIONS, min_size=3, max_size=12),
}
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("name", [name for name in WORLDS if name != "reference"])
@settings(max_examples=8, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(**SCHEDULES)
def test_no_schedule_changes_a_bit(name, max_sessions, actions):
    follow(name, "llama", "float32", max_sessions, actions)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "smollm3"])
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "reference"])
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(**SCHEDULES)
def test_no_long_schedule_changes_a_bit(name, architecture, dtype, max_sessions, actions):
    follow(name, architecture, dtype, max_sessions, actions)


SAMPLED = {"temperature": 1.0, "seed": 5, "eos": None}


class InterruptAt:
    """Raises KeyboardInterrupt where a function of this name returns for the `after`th time."""

    def __init__(self, name, after=1):
        self._name, self._left = name, after

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _look(self, frame, event, _):
        if event == "return" and frame.f_code.co_name == self._name:
            self._left -= 1
            if not self._left:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *(("admitted", 1), ("admitted", 2), ("admit", 2), ("fed", 1), ("fed", 3)),
        *(("finish", 1), ("_remove", 1), ("_settle", 1), ("discard", 2), ("sample", 4)),
        *(("_advance", 1), ("_admit", 1), ("_forward", 2), ("_gather", 1)),
    ],
)
def test_a_step_that_an_interrupt_ends_loses_no_request(engine, name, after):
    prompts = [prompt(40, 1), prompt(25, 2), prompt(60, 3)]
    expected = []
    for ids in prompts:
        with engine.session() as session:
            session.prefill(ids)
            expected.append(session.generate(6, **SAMPLED).tokens.tolist())
    given = engine.session()
    given.prefill(prompts[2])
    with engine.scheduler(2) as scheduler:
        requests = [scheduler.submit(ids, 6, **SAMPLED) for ids in prompts[:2]]
        requests.append(scheduler.submit(given, 6, **SAMPLED))
        cancelled = scheduler.submit(prompts[0], 6, **SAMPLED)
        for count in range(400):
            if scheduler.idle:
                break
            if count == 2:
                cancelled.cancel()
            with contextlib.suppress(KeyboardInterrupt), InterruptAt(name, after):
                scheduler.step()
            after = after if count < 20 else 10**9
        assert scheduler.idle
        assert [one.completion.tokens.tolist() for one in requests] == expected
        assert [one.completion.finish_reason for one in requests] == ["length"] * 3
        assert cancelled.completion.finish_reason == "cancelled"
        assert scheduler.work[0] == scheduler.work[1]
    given.close()
    stats = engine.stats()
    assert stats["reserved_chunks"] == stats["open_blocks"] == stats["sequences"] == 0


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["log_probability", "top", "push"])
def test_a_token_that_an_interrupt_comes_behind_is_told_once_and_whole(
    text_engine, monkeypatch, name, number
):
    place = AnswerText if name == "push" else Distribution
    real, left = getattr(place, name), [number]

    def interrupted(*args, **named):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args, **named)

    told: dict[str, list[int]] = {}
    done = {}
    for case in ("whole", "interrupted"):
        with text_engine.scheduler() as scheduler, monkeypatch.context() as patched:
            heard = told[case] = []
            request = scheduler.submit(
                "A cache keeps",
                8,
                **SAMPLED,
                logprobs=True,
                top_logprobs=2,
                stop=["\0"],
                on_token=lambda _, token, heard=heard: heard.append(token),
            )
            if case == "interrupted":
                patched.setattr(place, name, interrupted)
            while not scheduler.idle:
                with contextlib.suppress(KeyboardInterrupt):
                    scheduler.step()
            done[case] = request.completion
    assert left[0] <= 0
    assert told["interrupted"] == told["whole"]
    for field in ("tokens", "logprobs"):
        assert (
            getattr(done["interrupted"], field).tolist() == getattr(done["whole"], field).tolist()
        )
    assert done["interrupted"].text == done["whole"].text
    assert done["interrupted"].top_logprobs == done["whole"].top_logprobs


def test_a_request_that_is_cancelled_in_its_prompt_has_generated_nothing(engine, scheduler):
    session = engine.session()
    session.prefill(prompt(5))
    request = scheduler.submit(prompt(200), 5, session=session, eos=None)
    scheduler.step()
    assert request.state == "prefilling"
    request.cancel()
    finish(scheduler)
    assert session.generation_start is None
    session.close()


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_a_session_that_is_closed_ends_its_own_request_alone(engine, scheduler, state):
    session = engine.session()
    session.prefill(prompt(5))
    closed = scheduler.submit(prompt(200, 90 + len(state)), 30, session=session, eos=None)
    other = scheduler.submit(prompt(90, 1), 5, eos=None)
    steps_until(scheduler, lambda: closed.state == state)
    session.close()
    finish(scheduler)
    assert closed.completion.finish_reason == "error"
    assert "the session is closed" in str(closed.completion.error)
    assert other.completion.tokens.tolist() == told_alone(engine, prompt(90, 1), 5)


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_a_request_whose_release_was_interrupted_is_computed_again(
    engine, scheduler, monkeypatch, state
):
    """Its own session is closed then, and it still counts as running."""
    ids = prompt(200, 70 + len(state))  # no test has computed it
    request = scheduler.submit(ids, 6, eos=None)
    steps_until(scheduler, lambda: request.state == state)

    def fail():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(request, "_leave", fail)
        with pytest.raises(KeyboardInterrupt):
            request.suspend()
    assert request.state == state
    finish(scheduler)
    assert request.completion.tokens.tolist() == told_alone(engine, ids, 6)


def test_a_session_is_in_requests_of_one_scheduler_at_a_time(engine, scheduler):
    session = engine.session()
    session.prefill(prompt(30))
    with engine.scheduler() as other:
        scheduler.submit(session, 3, eos=None)
        with pytest.raises(InvalidArgumentError, match="request of another scheduler; give a fork"):
            other.submit(session, 3, eos=None)
        finish(scheduler)
        other.submit(session, 3, eos=None)
        with pytest.raises(InvalidArgumentError, match="another scheduler"):
            engine.run([session], 3)
        finish(other)
    abandoned = engine.scheduler()
    abandoned.submit(session, 3, eos=None)
    del abandoned
    gc.collect()
    scheduler.submit(session, 3, eos=None)
    finish(scheduler)
    session.close()


@pytest.mark.parametrize("flag", [np.array([1, 2]), 1, None, "yes"], ids=str)
def test_whether_a_session_is_kept_is_true_or_false(scheduler, flag):
    with pytest.raises(InvalidArgumentError, match="keep_session is"):
        scheduler.submit(prompt(5), 3, keep_session=flag)
    assert scheduler.idle
