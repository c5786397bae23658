"""Clients that go away: nothing of theirs runs on, and nothing is left."""

from __future__ import annotations

import time

import httpx
import pytest

from server.running import said

LONG = {"messages": said("Write a module."), "max_tokens": 20_000, "ignore_eos": True}


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_idle(server):
    scheduler = server.service.scheduler
    return scheduler.idle and not scheduler.waiting


@pytest.fixture(autouse=True)
def _the_same_memory(server):
    before = server.service.engine.stats()["sequences"]
    yield
    assert until(lambda: server.service.engine.stats()["sequences"] == before)


def test_a_stream_that_is_left_ends_its_request(server):
    with httpx.Client(base_url=server.url) as client:
        request = client.build_request(
            "POST", "/v1/chat/completions", json={**LONG, "stream": True}
        )
        answer = client.send(request, stream=True)
        next(answer.iter_lines())
        assert not is_idle(server)
        answer.close()
    assert until(lambda: is_idle(server))


def test_a_client_that_does_not_wait_ends_its_request(server):
    with httpx.Client(base_url=server.url, timeout=0.1) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=LONG)
    assert until(lambda: is_idle(server))


def test_several_choices_end_together(server):
    body = {**LONG, "n": 3, "stream": True}
    with httpx.Client(base_url=server.url) as client:
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        answer = client.send(request, stream=True)
        next(answer.iter_lines())
        answer.close()
    assert until(lambda: is_idle(server))


def test_a_response_of_a_client_that_went_away_is_not_kept(server):
    before = server.http.get("/v1/sessions").json()["data"]
    body = {"input": "Write a module.", "max_output_tokens": 20_000}
    with httpx.Client(base_url=server.url, timeout=0.1) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/responses", json=body)
    assert until(lambda: is_idle(server))
    after = server.http.get("/v1/sessions").json()["data"]
    assert [one["id"] for one in after] == [one["id"] for one in before]
