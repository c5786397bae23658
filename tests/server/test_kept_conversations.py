"""Conversations in memory and in the store, while others come and go: none is ever missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpager.server.conversations import Conversations, Kept
from kvpager.server.errors import ApiError
from kvpager.server.tenants import Tenants
from kvpager.stores import DirectoryStore
from server.running import running

SALT = None


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def crowded(engine, store):
    """Conversations of which none stays in memory."""
    (tenant,) = Tenants.read(None).all()
    source = Conversations(
        engine,
        tenant,
        store,
        on_kept=lambda: source.release_oldest(),
        on_restore=lambda outcome: None,
    )
    yield source
    source.close()


def text(engine, length):
    session = engine.session()
    session.prefill([5 + i % 50 for i in range(length)])
    return Kept(session, notes={"length": length})


def length(source, name):
    return source.look(name, SALT, "fail", lambda kept: kept.session.length)


def test_a_conversation_that_is_let_go_as_soon_as_it_is_restored_is_still_read(crowded, engine):
    crowded.keep("one", text(engine, 70), save=True)
    assert crowded.names() == []
    assert length(crowded, "one") == 70
    session, kept = crowded.fork("one", SALT, "fail")
    with session:
        assert (session.length, kept.notes) == (70, {"length": 70})


def test_a_conversation_that_is_let_go_as_soon_as_it_is_kept_is_in_the_store(crowded, engine):
    report = crowded.keep("one", text(engine, 70), save=True)
    assert report.tokens == 70
    assert crowded.has("one")


def test_one_that_is_saved_and_not_in_memory_can_be_saved(crowded, engine):
    crowded.keep("one", text(engine, 70), save=True)
    report = crowded.save("one", SALT, "fail", ttl=3600)
    assert (report.tokens, report.chunks_written) == (70, 1)  # the chunk that is not full
    assert crowded.entries()["one"].ttl_seconds == 3600


def test_one_that_cannot_be_saved_is_kept(engine, store, monkeypatch):
    (tenant,) = Tenants.read(None).all()
    source = Conversations(
        engine, tenant, store, on_kept=lambda: None, on_restore=lambda outcome: None
    )
    monkeypatch.setattr(store, "set_ttl", failing)
    with pytest.raises(OSError, match="no space"):
        source.keep("one", text(engine, 10), save=True, ttl=10)
    assert source.names() == ["one"]
    source.close()


def failing(*_):
    raise OSError("no space")


class Meanwhile:
    """An engine during whose first restore something else is done."""

    def __init__(self, engine, what):
        self._engine, self._what = engine, what

    def restore(self, *args, **kwargs):
        session = self._engine.restore(*args, **kwargs)
        what, self._what = self._what, lambda: None
        what()
        return session


@pytest.fixture
def restoring_while(crowded, engine, monkeypatch):
    def set_up(what):
        monkeypatch.setattr(crowded, "_engine", Meanwhile(engine, what))

    return set_up


def test_a_turn_that_is_kept_during_a_restore_is_the_one_that_is_read(
    crowded, engine, restoring_while
):
    crowded.keep("one", text(engine, 70), save=True)
    restoring_while(lambda: crowded.keep("one", text(engine, 90), save=True))
    assert length(crowded, "one") == 90


def test_a_conversation_that_is_deleted_during_a_restore_is_gone(crowded, engine, restoring_while):
    crowded.keep("one", text(engine, 70), save=True)
    restoring_while(lambda: crowded.delete("one"))
    with pytest.raises(ApiError, match="one"):
        length(crowded, "one")
    assert not crowded.has("one")


def test_two_threads_that_restore_one_conversation_leave_no_session_behind(
    crowded, engine, restoring_while
):
    crowded.keep("one", text(engine, 70), save=True)
    before = engine.stats()["sequences"]
    crowded._on_kept = lambda: None
    restoring_while(lambda: length(crowded, "one"))
    assert length(crowded, "one") == 70
    assert engine.stats()["sequences"] == before + 1
    assert crowded._restoring == {}


@pytest.mark.parametrize("seen", [5, "abc", [1, 2], {"a": 1}])
def test_forged_digests_of_messages_are_none(crowded, engine, store, seen):
    kept = text(engine, 10)
    kept.session.metadata = {"kvpager.server": {"seen": seen, "length": 10}}
    kept.session.save("one", store=store)
    kept.session.close()
    _, restored = crowded.fork("one", SALT, "fail")
    assert (restored.seen, restored.notes) == ((), {"length": 10})


def test_few_kept_sessions_and_many_clients_never_miss_a_session(engine, tmp_path):
    with running(engine, tmp_path, kept_sessions=1) as server:
        names = [f"s{i}" for i in range(4)]

        def use(name):
            server.chat("A class.", max_tokens=2, extra_body={"session_id": name})
            return [
                server.http.get(f"/v1/sessions/{name}/ledger").status_code,
                server.post(f"/v1/sessions/{name}/save").status_code,
                server.http.get(f"/v1/sessions/{name}").status_code,
                server.post(f"/v1/sessions/{name}/trim", tokens=4).status_code,
            ]

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(use, names * 3))
        assert found == [[200, 200, 200, 200]] * 12
