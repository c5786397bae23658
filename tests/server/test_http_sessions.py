"""Sessions and slots: listed, looked into, saved, forked, cut, pinned, exported and deleted."""

from __future__ import annotations

import pytest

from server.running import coder_engine, running


@pytest.fixture
def named(server):
    """A session of the shared server; deleted afterwards."""
    made = []

    def make(name):
        made.append(name)
        return server.chat("Write a class.", max_tokens=20, extra_body={"session_id": name})

    yield make
    for name in made:
        server.http.delete(f"/v1/sessions/{name}")


def of(server, name, action=None, **body):
    path = f"/v1/sessions/{name}" + (f"/{action}" if action else "")
    answer = server.http.post(path, json=body) if action else server.http.get(path)
    answer.raise_for_status()
    return answer.json()


def test_a_session_is_listed_with_its_tokens_and_where_it_is(server, named):
    answer = named("one")
    found = of(server, "one")
    assert found["tokens"] == answer.usage.total_tokens
    assert found["tier"] == "memory+disk"
    assert found["bytes"] > 0
    assert found in [
        {**one, "age_s": found["age_s"]} for one in server.http.get("/v1/sessions").json()["data"]
    ]


def test_the_ledger_has_an_entry_for_each_chunk(server, named):
    answer = named("ledger")
    ledger = server.http.get("/v1/sessions/ledger/ledger").json()
    assert ledger["tokens"] == answer.usage.total_tokens
    assert [chunk["start"] for chunk in ledger["chunks"]] == [
        64 * i for i in range(len(ledger["chunks"]))
    ]
    assert all(chunk["provenance"] == "exact" for chunk in ledger["chunks"])


def test_looking_at_a_saved_conversation_brings_nothing_into_memory(coder, tmp_path):
    with coder_engine(*coder) as engine:
        with running(engine, tmp_path) as server:
            server.chat("Hi", extra_body={"session_id": "saved"})
        with running(engine, tmp_path) as server:
            for path in ("", "/saved", "/saved/ledger"):
                assert server.http.get(f"/v1/sessions{path}").status_code == 200
            assert server.service.gauges().sessions == 0


def test_a_fork_goes_on_by_itself(server, named):
    named("parent")
    of(server, "parent", "fork", id="child")
    assert of(server, "child")["tokens"] == of(server, "parent")["tokens"]
    again = server.post("/v1/sessions/parent/fork", id="child")
    assert again.status_code == 409
    server.http.delete("/v1/sessions/child").raise_for_status()
    assert of(server, "parent")["tokens"]


def test_a_session_can_be_cut(server, named):
    named("cut")
    assert of(server, "cut", "trim", tokens=10)["tokens"] == 10
    refused = server.post("/v1/sessions/cut/trim", tokens=1000)
    assert refused.status_code == 400
    assert of(server, "cut")["tokens"] == 10


def test_pins_and_lifetimes_are_shown(server, named):
    named("pinned")
    assert of(server, "pinned", "pin")["pinned"] is True
    assert of(server, "pinned", "unpin")["pinned"] is False
    of(server, "pinned", "save", ttl="12h")
    assert of(server, "pinned")["ttl_s"] == 12 * 3600


def test_an_exported_session_can_be_imported_under_another_name(server, named):
    named("out")
    data = server.http.get("/v1/sessions/out/export")
    assert data.headers["content-disposition"].endswith('"out.kvsnap"')
    taken = server.http.post("/v1/sessions/in/import", content=data.content)
    assert taken.json()["tokens"] == of(server, "out")["tokens"]
    refused = server.http.post("/v1/sessions/bad/import", content=data.content[:-1])
    assert refused.status_code == 400
    assert server.http.get("/v1/sessions/bad").status_code == 404
    server.http.delete("/v1/sessions/in").raise_for_status()


def test_an_unknown_session_is_404(server):
    for method, path in [
        ("GET", ""),
        ("GET", "/ledger"),
        ("GET", "/export"),
        ("POST", "/restore"),
        ("POST", "/pin"),
        ("DELETE", ""),
    ]:
        answer = server.http.request(method, f"/v1/sessions/nobody{path}")
        assert answer.status_code == 404, (method, path)


def test_a_slot_is_saved_restored_and_erased_as_with_llama_cpp(server, named):
    named("slot-3")
    saved = server.http.post("/slots/3?action=save", json={"filename": "a.bin"}).json()
    assert saved["id_slot"] == 3
    assert saved["n_saved"] > 0
    assert saved["n_written"] > 0
    erased = server.http.post("/slots/3?action=erase").json()
    assert erased["n_erased"] == saved["n_saved"]
    restored = server.http.post("/slots/3?action=restore", json={"filename": "a.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    assert server.http.post("/slots/3?action=restore").status_code == 400
    server.http.delete("/v1/sessions/a.bin").raise_for_status()


def test_the_conversation_that_was_not_used_for_longest_leaves_memory(engine, tmp_path):
    with running(engine, tmp_path, kept_sessions=2) as server:
        for name in ("a", "b", "c"):
            server.chat("Hi", max_tokens=2, extra_body={"session_id": name})
        tiers = {one["id"]: one["tier"] for one in server.http.get("/v1/sessions").json()["data"]}
        assert tiers == {"a": "disk", "b": "memory+disk", "c": "memory+disk"}
        assert of(server, "a", "restore")["tier"] == "memory+disk"


def test_a_server_without_a_store_keeps_conversations_in_memory(engine):
    with running(engine, None) as server:
        server.chat("Hi", max_tokens=2, extra_body={"session_id": "a"})
        assert of(server, "a")["tier"] == "memory"
        refused = server.post("/v1/sessions/a/save")
        assert refused.status_code == 400
        assert "--store" in refused.json()["error"]["message"]
