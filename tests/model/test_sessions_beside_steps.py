"""Sessions of finished requests, used by other threads while a scheduler steps other requests."""

from __future__ import annotations

import threading

import pytest
from bits import assert_same_session
from reference_models import build, make_engine, prompt

from kvpager import DirectoryStore

ROUNDS = 2


@pytest.fixture
def engine(closing):
    return closing(make_engine(build("llama"), pool_tokens=512))


@pytest.fixture
def stepping(engine):
    """A scheduler with endless requests, which another thread steps; ends with the test."""
    scheduler, failed = engine.scheduler(), []
    over = threading.Event()

    def steps():
        number = 0
        try:
            while not over.is_set():
                if scheduler.running < 3:
                    number += 1
                    scheduler.submit(prompt(70, number), 20, eos=None)
                scheduler.step()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    yield scheduler
    over.set()
    thread.join(60)
    scheduler.close()
    assert not failed


def answered(scheduler, session, number):
    """Waits until a request of the session is finished."""
    done = threading.Event()
    scheduler.submit(
        prompt(60, 100 + number), 9, session=session, eos=None, on_finish=lambda *_: done.set()
    )
    assert done.wait(60)


def test_a_finished_session_is_saved_forked_restored_and_closed_beside_steps(
    engine, stepping, tmp_path, closing
):
    store = DirectoryStore(tmp_path / "store")
    plain = closing(make_engine(engine.model, pool_tokens=512))
    for number in range(ROUNDS):
        session = engine.session()
        answered(stepping, session, number)
        session.save(f"turn-{number}", store=store)
        twin, restored = session.fork(), engine.restore(f"turn-{number}", store=store)
        with plain.session() as alone:
            alone.prefill(prompt(60, 100 + number))
            alone.generate(9, eos=None, seed=session.sampling.seed)
            for name, one in (("session", session), ("fork", twin), ("restored", restored)):
                assert_same_session(one, alone, name)
        for one in (session, twin, restored):
            one.close()
