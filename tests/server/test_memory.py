"""What deleted conversations held is given back: sequences, blocks, objects and the heap."""

from __future__ import annotations

import gc

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
        size = sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
        assert size < stats["chunk_bytes"]
