"""Conversations in memory and in the store, while others come and go: none is ever missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpager.server.conversations import Conversations, Kept, digests, listed
from kvpager.server.errors import ApiError
from kvpager.server.tenants import Tenants
from kvpager.stores import DirectoryStore
from server.running import coder_engine, running

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
    assert crowded.entry("one").ttl_seconds == 3600


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
    assert crowded._under_way == {}


@pytest.mark.parametrize("seen", [5, "abc", [1, 2], ["a"], {"a": 1}])
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


def test_lists_and_counts_ask_the_store_a_few_times_however_many_are_in_memory(
    engine, store, monkeypatch
):
    (tenant,) = Tenants.read(None).all()
    source = Conversations(
        engine, tenant, store, on_kept=lambda: None, on_restore=lambda outcome: None
    )
    for number in range(6):  # s0 to s5 are saved, m0 to m5 are not
        source.keep(f"s{number}", text(engine, 20), save=True)
        source.keep(f"m{number}", text(engine, 20))
    for name in ("s0", "s1"):
        source._forget(name)
    asked = []
    for call in ("entry", "entries", "stats", "saved"):
        ask = getattr(DirectoryStore, call)

        def counted(store, *more, _ask=ask, _call=call, **options):
            asked.append((_call, options.get("limit")))
            return _ask(store, *more, **options)

        monkeypatch.setattr(DirectoryStore, call, counted)
    assert source.count() == 12
    assert [call for call, _ in asked] == ["stats", "saved"]
    asked.clear()
    order = ["m5", "s5", "m4", "s4", "m3", "s3", "m2", "s2", "m1", "s1", "m0", "s0"]
    for most in (1, 3, 9, 10, 11, 12, 20):
        assert [one.id for one in listed(source, most)] == order[:most]
    seen = []
    while len(seen) < len(order):
        seen += [one.id for one in listed(source, 5, seen[-1] if seen else None)]
    assert seen == order
    assert max(limit for call, limit in asked if call == "entries") == 20
    for name in ("s3", "s4", "s5", *(f"m{number}" for number in range(6))):
        source.kept(name).used = 1.0  # others have used what is saved of them
    assert [one.id for one in listed(source, 2)] == ["s2", "s1"]
    source.close()


def test_more_conversations_stay_in_memory_than_the_pool_has_blocks(coder):
    with coder_engine(*coder) as engine, running(engine, None) as server:
        count = 2 * engine.config.pool_blocks
        asked = [[f"def f{number}(a, b):"] for number in range(count)]
        for said in asked:
            said += [server.chat(*said, max_tokens=2).choices[0].message.content, "And then?"]
        source = server.service.conversations(server.service.tenants.all()[0])
        assert len(source.names()) == count
        assert engine.stats()["tails_paged_out"] >= engine.config.pool_blocks
        second = [server.chat(*said, max_tokens=4) for said in asked]
    with coder_engine(*coder) as engine, running(engine, None, kept_sessions=1) as server:
        for said, answer in zip(asked, second):
            assert answer.usage.prompt_tokens_details.cached_tokens > 0
            fresh = server.chat(*said, max_tokens=4)
            assert fresh.choices[0].message.content == answer.choices[0].message.content
            assert fresh.usage.prompt_tokens == answer.usage.prompt_tokens


def test_conversations_leave_memory_before_their_chunks_fill_what_is_below_the_pool(coder):
    with coder_engine(*coder) as engine:
        chunk = engine.core.facts.layout.chunk_bytes
    for blocks, most in ((20, 15), (0, 8)):
        options = {"host_bytes": blocks * chunk}
        with coder_engine(*coder, **options) as engine, running(engine, None) as server:
            for number in range(30):
                server.chat(f"{number}: " + "x = 1\n" * 20, max_tokens=1)
                stats = engine.stats()
                assert stats["home_chunks_used"] <= 0.75 * stats["home_chunks"]
            source = server.service.conversations(server.service.tenants.all()[0])
            assert 1 < len(source.names()) <= most


def test_digests_that_go_on_are_those_of_the_whole_conversation():
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"b": 1, "a": "ä"}'}}
    messages = [
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
        {"role": "tool", "content": "\u2028"},
        {"role": "assistant", "content": "done"},
    ]
    for salt in (None, "", "s"):
        whole = digests(messages, salt)
        assert len(set(whole)) == len(messages)
        for count in range(len(messages) + 1):
            assert digests(messages[count:], salt, whole[:count]) == whole
    assert digests(messages, "s")[0] != digests(messages, None)[0]
