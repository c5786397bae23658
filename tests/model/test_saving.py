"""Saving a session, at once or beside it: what is saved is the session at the call."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_session
from reference_models import build, make_engine, prompt

import kvpager
from kvpager import CapacityError, InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model))


@pytest.fixture
def session(engine):
    session = engine.session()
    session.prefill(prompt(100))
    next(session.generate(1, eos=None, stream="tokens"))
    return session


class Gate:
    """A progress callback that holds a save until it is opened, and counts what it is told."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))
        self.reached.set()
        assert self.opened.wait(60)

    def open(self):
        self.opened.set()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


TIERS = {
    "host": {},
    "little host": {"host_bytes": 12 * 49152},
    "disk": {"host_bytes": 2 * 49152, "disk_bytes": 64 * 49152},
}


@pytest.mark.parametrize("tiers", TIERS)
def test_a_save_beside_decoding_holds_the_session_at_the_call_bit_for_bit(
    model, tmp_path, closing, gate, tiers
):
    options = dict(TIERS[tiers])
    if "disk_bytes" in options:
        options["disk_path"] = tmp_path
    engine = closing(make_engine(model, **options))
    session, other = engine.session(), engine.session()
    session.prefill(prompt(130))
    next(session.generate(1, eos=None, temperature=0.7, seed=3, stream="tokens"))
    session.save(tmp_path / "at-once")
    handle = session.save(tmp_path / "beside", wait=False, progress=gate)
    assert gate.reached.wait(60)
    produced = session.generate(
        20, eos=None
    ).tokens.tolist()  # with the writer in the middle of its work
    other.prefill(prompt(48, seed=5))
    engine.pager.evict_all()
    engine.pager.check_invariants()
    assert not handle.done()
    gate.open()
    report = handle.result()
    assert handle.done()
    assert (tmp_path / "beside").read_bytes() == (tmp_path / "at-once").read_bytes()
    assert (report.tokens, report.chunks) == (130, 9)
    engine.pager.check_invariants()
    whole = closing(make_engine(model, pool_tokens=512)).session()
    whole.prefill(session.tokens)
    session.prefill(session.tokens)
    assert produced == whole.tokens[131:].tolist()
    assert_same_session(session, whole, "after a save beside it")


def test_many_saves_at_once_each_hold_their_own_moment(model, tmp_path, closing):
    engine = closing(
        make_engine(model, host_bytes=8 * 49152, disk_bytes="64MiB", disk_path=tmp_path)
    )
    session = engine.session()
    session.prefill(prompt(60))
    handles = []
    for turn in range(12):
        session.save(tmp_path / f"{turn}.at-once")
        handles.append(session.save(tmp_path / f"{turn}.beside", wait=False))
        for _ in session.generate(5, eos=None, stream="tokens"):
            engine.pager.evict_all()
    for turn, handle in enumerate(handles):
        assert handle.result().tokens == 60 + 5 * turn - (turn > 0)
        whole = (tmp_path / f"{turn}.at-once").read_bytes()
        assert (tmp_path / f"{turn}.beside").read_bytes() == whole
    engine.pager.check_invariants()


def test_sessions_save_into_one_store_from_many_threads(model, engine, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    sessions = [engine.session() for _ in range(4)]
    for i, session in enumerate(sessions):
        session.prefill(np.concatenate([prompt(48), prompt(20 + i, seed=i)]))
    handles = []
    for turn in range(3):
        for i, session in enumerate(sessions):
            handles.append(session.save(f"{i}.{turn}", store=store, wait=False))
        for _ in engine.generate_many(sessions, 4, eos=None):
            pass
    assert len({handle.result().name for handle in handles}) == 12
    for i, session in enumerate(sessions):
        session.prefill(session.tokens)
        again = engine.restore(f"{i}.2", store=store)
        again.prefill(session.tokens)
        assert_same_session(again, session, f"session {i}")


def test_the_next_turns_save_into_a_store_writes_only_new_chunks(engine, session, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    first = session.save("turn", store=store)
    assert (first.chunks, first.chunks_written) == (7, 7)
    session.append(prompt(30, seed=1))
    second = session.save("turn-2", store=store, wait=False).result()
    assert (second.tokens, second.chunks, second.chunks_written) == (131, 9, 3)
    assert second.bytes_shared == 6 * engine.layout.chunk_bytes
    fork = session.fork()
    fork.append(prompt(20, seed=2))
    assert fork.save("fork", store=store).chunks_written == 2


@pytest.mark.parametrize("upto", [1, 15, 16, 50, 96, 100, 101])
def test_a_partial_save_is_the_session_that_had_only_these_tokens(
    model, engine, session, tmp_path, closing, upto
):
    report = session.save(tmp_path / "part", upto=upto)
    assert report.tokens == min(upto, 100)
    other = closing(make_engine(model))
    again = other.restore(tmp_path / "part")
    assert again.tokens.tolist() == session.tokens[:upto].tolist()
    assert again.pending == (session.pending if upto == 101 else None)
    assert again.sampling == session.sampling
    cold = closing(make_engine(model)).session()
    cold.prefill(prompt(100)[:upto])
    assert cold.save(tmp_path / "cold").logical_digest == report.logical_digest
    if upto == 101:
        next(cold.generate(1, eos=None, stream="tokens"))
    assert again.generate(4, eos=None).tokens.tolist() == cold.generate(4, eos=None).tokens.tolist()


@pytest.mark.parametrize("upto", [0, -1, 102, True, 3.5])
def test_a_partial_save_outside_the_session_is_refused(session, tmp_path, upto):
    with pytest.raises(InvalidArgumentError, match=r"upto is .* expected 1 to 101"):
        session.save(tmp_path / "part", upto=upto)
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_save_leaves_nothing_and_what_had_the_name(session, tmp_path, gate):
    path = tmp_path / "turn"
    session.save(path, upto=20)
    before = path.read_bytes()
    handle = session.save(path, wait=False, progress=gate)
    assert gate.reached.wait(60)
    threading.Timer(0.1, gate.open).start()
    assert handle.cancel()
    assert handle.done()
    with pytest.raises(concurrent.futures.CancelledError):
        handle.result()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert session.save(path).tokens == 100


def test_a_progress_callback_may_cancel_its_own_save(session, tmp_path):
    handles, known = [], threading.Event()

    def cancel(done, total):
        assert known.wait(60)
        assert handles[0].cancel()

    handles.append(session.save(tmp_path / "turn", wait=False, progress=cancel))
    known.set()
    with pytest.raises(concurrent.futures.CancelledError):
        handles[0].result()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_has_ended_cannot_be_cancelled(session, tmp_path):
    handle = session.save(tmp_path / "turn", wait=False)
    report = handle.result()
    assert not handle.cancel()
    assert handle.result() == report
    assert handle.progress[0] == handle.progress[1] > 0
    assert "saved" in repr(handle)


def test_waiting_for_a_save_can_be_given_up(session, tmp_path, gate):
    handle = session.save(tmp_path / "turn", wait=False, progress=gate)
    with pytest.raises(TimeoutError, match="bytes"):
        handle.result(timeout=0.05)
    assert not handle.done()
    gate.open()
    assert handle.result().tokens == 100


def test_a_failed_save_raises_its_error_when_asked(session, tmp_path):
    handle = session.save(tmp_path / "missing" / "turn", wait=False)
    for _ in range(2):
        with pytest.raises(StorageError, match="missing"):
            handle.result()
    assert "failed" in repr(handle)


@pytest.mark.parametrize("asked", [True, False])
def test_the_error_of_a_save_that_nobody_asks_for_is_logged(session, tmp_path, caplog, asked):
    handle = session.save(tmp_path / "missing" / "turn", wait=False)
    if asked:
        with pytest.raises(StorageError):
            handle.result()
    with caplog.at_level(logging.ERROR, "kvpager"):
        handle.wait()
        del handle
        gc.collect()
    logged = [record for record in caplog.records if "missing" in record.getMessage()]
    assert len(logged) == (not asked)


def test_a_handle_and_the_error_it_raised_do_not_keep_each_other(session, tmp_path):
    handle = session.save(tmp_path / "missing" / "turn", wait=False)
    with pytest.raises(StorageError):
        handle.result()
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


def test_the_error_of_a_save_whose_handle_is_gone_before_it_fails_is_logged(
    session, tmp_path, caplog, gate
):
    def fail(done, total):
        gate(done, total)
        raise ValueError("not today")

    handle = session.save(tmp_path / "turn", wait=False, progress=fail)
    del handle
    gc.collect()
    with caplog.at_level(logging.ERROR, "kvpager"):
        gate.open()
        session.close()
    assert "not today" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", ["session", "engine"])
def test_closing_waits_for_saves_that_run(model, tmp_path, gate, owner):
    engine = make_engine(model)
    session = engine.session()
    session.prefill(prompt(60))
    session.save(tmp_path / "turn", wait=False, progress=gate)
    if owner == "engine":
        del session  # its save goes on
        gc.collect()
    threading.Timer(0.5, gate.open).start()
    (session if owner == "session" else engine).close()
    assert gate.opened.is_set()
    with make_engine(model) as other:
        assert other.restore(tmp_path / "turn").length == 60
    engine.close()


def test_a_progress_callback_cannot_wait_for_its_own_save(session, tmp_path):
    refused = []

    def close(done, total):
        with pytest.raises(InvalidArgumentError, match="cannot wait") as error:
            session.close()
        refused.append(error)

    session.save(tmp_path / "turn", wait=False, progress=close).result()
    assert refused
    assert not session.closed


def test_progress_counts_bytes_up_to_all_of_them(session, tmp_path):
    calls = []
    report = session.save(tmp_path / "turn", progress=lambda *call: calls.append(call))
    done, total = zip(*calls)
    assert list(done) == sorted(done)
    assert len(set(total)) == 1
    assert done[-1] == total[0] <= report.bytes_written


def test_progress_true_draws_a_bar_of_bytes_on_stderr(session, tmp_path, capsys):
    session.save(tmp_path / "turn", progress=True)
    captured = capsys.readouterr()
    assert "save" in captured.err
    assert "B/s" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("wait", [True, False])
def test_progress_of_another_kind_is_refused_before_anything_is_written(session, tmp_path, wait):
    with pytest.raises(InvalidArgumentError, match="progress is 3"):
        session.save(tmp_path / "turn", progress=3, wait=wait)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "store"])
def test_a_progress_callback_that_raises_undoes_the_save(engine, session, tmp_path, kind):
    store = DirectoryStore(tmp_path / "store") if kind == "store" else None
    name = "turn" if store else tmp_path / "turn"
    session.save(name, store=store, upto=40)

    def stop(done, total):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        session.save(name, store=store, progress=stop)
    assert engine.restore(name, store=store).length == 40
    assert session.save(name, store=store).tokens == 100
    assert engine.restore(name, store=store).length == 101


def test_a_save_that_a_store_has_no_room_for_changes_nothing(engine, session, tmp_path):
    store = DirectoryStore(tmp_path / "store", byte_budget="300KB")
    with pytest.raises(CapacityError, match="bytes"):
        session.save("turn", store=store)
    handle = session.save("turn", store=store, wait=False)
    with pytest.raises(CapacityError, match="bytes"):
        handle.result()
    assert store.entries() == []
    assert session.save("less", store=store, upto=32).tokens == 32


def test_names_and_stores_that_are_none_are_refused(model, session, engine, tmp_path):
    for call in (session.save, engine.restore):
        with pytest.raises(InvalidArgumentError, match="name_or_path is 3"):
            call(3)
        with pytest.raises(InvalidArgumentError, match="store is 'folder'; expected a store"):
            call("turn", store="folder")
    with pytest.raises(InvalidArgumentError, match="store is 'folder'; expected a store"):
        make_engine(model, store="folder")


SCRIPT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from reference_models import build, make_engine, prompt
torch.set_num_threads(int(sys.argv[3]))
session = make_engine(build("llama")).session()
session.prefill(prompt(40))
session.save(sys.argv[2], wait=False, progress=lambda done, total: __import__("time").sleep(0.5))
"""


def test_a_save_that_runs_when_the_program_ends_is_finished(engine, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path / "turn")),
            str(torch.get_num_threads()),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert engine.restore(tmp_path / "turn").length == 40


def test_a_frozen_state_is_let_go_when_its_save_has_ended(model, tmp_path, closing):
    """Else the chunks of a closed session would stay for as long as somebody keeps a handle."""
    engine = closing(make_engine(model, host_bytes=0))
    session = engine.session()
    session.prefill(prompt(48, seed=9))
    handles = [
        session.save(tmp_path / "turn", wait=False),
        session.save(tmp_path / "missing" / "turn", wait=False),
    ]
    for handle in handles:
        handle.wait()
    with pytest.raises(StorageError):
        handles[1].result()
    session.close()
    other = engine.session()
    other.prefill(prompt(48, seed=10))  # needs every home there is
    assert len(handles) == 2


def test_handles_are_public(session, tmp_path):
    handle = session.save(tmp_path / "turn", wait=False)
    assert isinstance(handle, kvpager.SaveHandle)
    assert handle.name == str(tmp_path / "turn")
    handle.result()
