"""What deleted conversations held is given back: sequences, blocks, objects and the heap."""

from __future__ import annotations

import gc

import pytest

from kvpager.server import conversations
from server.running import coder_engine, running, said


def test_deleted_conversations_leave_no_sequence_no_block_and_no_object(
    coder, tmp_path, monkeypatch
):
    trimmed = []
    give_back = conversations._give_back
    monkeypatch.setattr(conversations, "_give_back", lambda: trimmed.append(give_back()))
    with coder_engine(*coder) as engine, running(engine, tmp_path) as server:

        def made_and_deleted():
            for name in "abcd":
                body = {"messages": said(f"{name} Write a class. " * 20), "session_id": name}
                answer = server.post("/v1/chat/completions", max_tokens=2, **body)
                assert answer.status_code == 200
            assert engine.stats()["sequences"] == 4
            for name in "abcd":
                server.http.delete(f"/v1/sessions/{name}").raise_for_status()
            gc.collect()
            return len(gc.get_objects())

        made_and_deleted()
        counts = [made_and_deleted() for _ in range(4)]
        stats = engine.stats()
        assert stats["sequences"] == stats["open_blocks"] == stats["reserved_chunks"] == 0
        # Not even chunks that a later prompt could find.
        assert stats["records"] == stats["host_bytes_used"] == 0
        assert counts[-1] - counts[0] < 200
        assert len(trimmed) == 20
        files = [one for one in tmp_path.rglob("*") if one.is_file()]
        kept = [one for one in files if not one.name.startswith("index.sqlite3")]  # has a log
        assert sum(one.stat().st_size for one in kept) < stats["chunk_bytes"]


@pytest.mark.parametrize("kept_before", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_conversation_that_is_deleted_during_a_turn_stays_deleted(
    coder, tmp_path, kept_before, saved
):
    store = tmp_path if saved else None
    with coder_engine(*coder) as engine, running(engine, store) as server:
        options = {"extra_body": {"session_id": "gone", "ignore_eos": True}}
        texts = ["Write a class."]
        if kept_before:
            answer = server.chat(*texts, **options).choices[0].message.content
            texts += [answer, "Go on."]
        stream = server.chat(*texts, max_tokens=60, stream=True, **options)
        next(stream)
        server.http.delete("/v1/sessions/gone").raise_for_status()
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.http.get("/v1/sessions/gone").status_code == 404
        assert server.http.get("/v1/sessions").json()["data"] == []
        assert server.http.delete("/v1/sessions/gone").status_code == 404
        stats = engine.stats()
        assert stats["sequences"] == stats["records"] == stats["host_bytes_used"] == 0
        (source,) = server.service._conversations.values()
        assert not source._under_way
        server.chat("Write a class.", **options)  # a later one is another one
        assert server.http.get("/v1/sessions/gone").status_code == 200


def test_a_conversation_that_is_deleted_while_it_is_saved_stays_deleted(
    coder, tmp_path, monkeypatch
):
    write = conversations.Conversations._write

    def deleted_meanwhile(source, name, session, ttl):
        source.delete(name)  # before there is anything to delete
        return write(source, name, session, ttl)

    with coder_engine(*coder) as engine, running(engine, tmp_path) as server:
        monkeypatch.setattr(conversations.Conversations, "_write", deleted_meanwhile)
        server.chat("Write a class.", extra_body={"session_id": "gone"})
        assert server.http.get("/v1/sessions").json()["data"] == []
        assert engine.stats()["sequences"] == 0
