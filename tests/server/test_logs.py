"""What is logged of requests: their sizes, and their texts only where that was asked for."""

from __future__ import annotations

import logging

from server.running import running


def logged(caplog, engine, store, **settings):
    with caplog.at_level(logging.INFO, "kvpager"), running(engine, store, **settings) as server:
        server.chat("a very private question", max_tokens=3, extra_body={"session_id": "ada"})
        server.post("/v1/chat/completions", messages=[{"role": "user"}])
    return caplog.text


def test_a_request_is_a_line_without_its_text(caplog, engine, tmp_path):
    text = logged(caplog, engine, tmp_path)
    assert "ada of default: " in text
    assert "3 generated" in text
    assert "private" not in text


def test_texts_are_logged_where_that_was_asked_for(caplog, engine, tmp_path):
    assert "private" in logged(caplog, engine, tmp_path, log_prompts=True)
