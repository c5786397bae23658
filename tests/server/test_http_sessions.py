"""Sessions and slots: listed, looked into, saved, forked, cut, pinned, exported and deleted."""

from __future__ import annotations

import pytest

from server.running import coder_engine, running, started


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
    reads = action in (None, "messages")
    answer = server.http.get(path) if reads else server.http.post(path, json=body)
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


def test_a_fork_of_its_first_messages_goes_on_as_if_the_others_had_not_been(server, named):
    named("long")
    for text in ("Add a method.", "Add another one."):
        server.chat(text, extra_body={"session_id": "long"})
    said = of(server, "long", "messages")["data"]
    assert [one["role"] for one in said] == ["user", "assistant"] * 3
    fork = of(server, "long", "fork", id="short", messages=4)
    assert fork["tokens"] < of(server, "long")["tokens"]
    assert of(server, "short", "messages")["data"] == said[:4]
    again = server.chat("Add another one.", extra_body={"session_id": "short"})
    assert again.choices[0].message.content == said[5]["content"]
    assert again.usage.prompt_tokens_details.cached_tokens >= fork["tokens"] - 1
    assert of(server, "long", "messages")["data"] == said
    for wrong in (0, 7):
        assert server.post("/v1/sessions/long/fork", id="none", messages=wrong).status_code == 400
    assert server.http.get("/v1/sessions/none").status_code == 404
    server.http.delete("/v1/sessions/short").raise_for_status()


def test_a_renamed_session_keeps_its_pin_its_lifetime_and_its_text(server, named):
    named("before")
    of(server, "before", "pin")
    of(server, "before", "save", ttl="12h")
    said = of(server, "before", "messages")["data"]
    after = of(server, "before", "rename", id="after")
    assert (after["pinned"], after["ttl_s"]) == (True, 12 * 3600)
    assert of(server, "after", "messages")["data"] == said
    assert server.http.get("/v1/sessions/before").status_code == 404
    named("before")
    refused = server.post("/v1/sessions/before/rename", id="after")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "exists")
    assert server.post("/v1/sessions/before/rename", id="no/name").status_code == 400
    of(server, "after", "unpin")
    server.http.delete("/v1/sessions/after").raise_for_status()


def test_messages_are_read_from_memory_and_from_disk_and_exported_as_text(coder, tmp_path):
    with coder_engine(*coder) as engine:
        with running(engine, tmp_path) as server:
            server.chat("Hi *you*", extra_body={"session_id": "a"})
            inside = server.http.get("/v1/sessions/a/messages").json()
        with running(engine, tmp_path) as server:
            assert server.http.get("/v1/sessions/a/messages").json() == inside
            assert server.service.gauges().sessions == 0
            as_json = server.http.get("/v1/sessions/a/export", params={"format": "json"})
            assert as_json.json() == inside
            assert as_json.headers["content-disposition"] == 'attachment; filename="a.json"'
            text = server.http.get("/v1/sessions/a/export", params={"format": "markdown"}).text
            assert text.startswith("# a\n\n## You\n\nHi *you*\n\n## Assistant\n\n")
            assert server.http.get("/v1/sessions/none/messages").status_code == 404


def test_one_question_continues_its_session_and_no_two_are_answered_at_once(server, named):
    first = named("growing")
    second = server.chat("Go on.", extra_body={"session_id": "growing"})
    assert second.usage.prompt_tokens > first.usage.total_tokens
    said = [one["content"] for one in of(server, "growing", "messages")["data"]]
    assert said[::2] == ["Write a class.", "Go on."]
    with server.openai.chat.completions.with_streaming_response.create(
        model="tiny-coder",
        messages=[{"role": "user", "content": "Once more."}],
        stream=True,
        max_tokens=3000,
        extra_body={"session_id": "growing", "ignore_eos": True},
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "And I?"}],
            session_id="growing",
        )
        renamed = server.post("/v1/sessions/growing/rename", id="grown")
    for one in (refused, renamed):
        assert (one.status_code, one.json()["error"]["code"]) == (409, "busy")
    assert [one["content"] for one in of(server, "growing", "messages")["data"]] == said


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


def test_conversations_are_listed_page_by_page(coder, tmp_path):
    with started(coder, tmp_path / "store") as server:
        for n in range(5):
            server.chat("Hi", extra_body={"session_id": f"s{n}"})
        whole = server.http.get("/v1/sessions").json()
        assert [one["id"] for one in whole["data"]] == ["s4", "s3", "s2", "s1", "s0"]
        assert not whole["has_more"]
        seen, page = [], server.http.get("/v1/sessions", params={"limit": 2}).json()
        while seen.extend(one["id"] for one in page["data"]) or page["has_more"]:
            page = server.http.get("/v1/sessions", params={"limit": 2, "after": seen[-1]}).json()
        assert seen == [one["id"] for one in whole["data"]]
        assert server.http.get("/v1/sessions", params={"after": "none"}).status_code == 404
        assert server.http.get("/v1/sessions", params={"limit": 0}).status_code == 400


def test_a_list_can_be_of_names_that_contain_a_text_or_that_clients_chose(coder, tmp_path):
    with started(coder, tmp_path / "store", kept_sessions=2) as server:
        for name in ("Apples", "pears", "apple-pie"):
            server.chat("Hi", max_tokens=2, extra_body={"session_id": name})
            server.chat(f"No name, {name}", max_tokens=2)
            server.openai.responses.create(model="tiny-coder", input=name, max_output_tokens=2)

        def ids(**query):
            page = server.http.get("/v1/sessions", params=query).json()
            return [one["id"] for one in page["data"]], page["has_more"]

        assert len(ids()[0]) > 6
        assert ids(chosen=True) == (["apple-pie", "pears", "Apples"], False)
        assert ids(chosen=True, limit=2) == (["apple-pie", "pears"], True)
        assert ids(chosen=True, limit=2, after="pears") == (["Apples"], False)
        assert ids(contains="APPLE") == (["apple-pie", "Apples"], False)
        assert ids(contains="cherry") == ([], False)
