"""What is on the wire below the answers: events, headers, methods and packets."""

from __future__ import annotations

import http.client
import json
import socket

import httpx
import pytest
import uvicorn

from kvpager.server.errors import retry_after
from kvpager.server.responding import event
from server.running import said

LINE_ENDS = "".join(chr(code) for code in range(0x110000) if len(f"a{chr(code)}b".splitlines()) > 1)


def test_an_event_is_one_line_to_every_client(server):
    told = event({"delta": f"a{LINE_ENDS}b", LINE_ENDS: 1}, "name").encode().decode()
    assert {"\u2028", "\u2029", "\x85"} <= set(LINE_ENDS)
    assert len(told.splitlines()) == 3  # its name, its data, and the end
    (data,) = [line[6:] for line in told.splitlines() if line.startswith("data: ")]
    assert json.loads(data) == {"delta": f"a{LINE_ENDS}b", LINE_ENDS: 1}


def test_a_stream_with_such_characters_is_read_by_a_client_that_splits_lines(server):
    body = {
        "input": "Hi",
        "instructions": f"a{LINE_ENDS}b",  # which the events tell back
        "max_output_tokens": 1,
        "stream": True,
        "store": False,
    }
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    told = [json.loads(line) for line in data]
    assert told[0]["response"]["instructions"] == f"a{LINE_ENDS}b"
    assert told[-1]["type"] in ("response.completed", "response.incomplete")


def test_no_answer_waits_for_the_clients_acknowledgement(server, monkeypatch):
    seen = []
    made = uvicorn.protocols.http.h11_impl.H11Protocol.connection_made

    def noted(self, transport):
        seen.append(transport.get_extra_info("socket"))
        made(self, transport)

    protocols = uvicorn.protocols.http.h11_impl.H11Protocol
    monkeypatch.setattr(protocols, "connection_made", noted)
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        assert seen[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/openapi.json"),
        *("/v1/sessions", "/monitor/events", "/v1/responses/none", "/page/none"),
    ],
)
def test_head_answers_as_get_without_a_body(server, path):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("HEAD", path)
    head = connection.getresponse()
    assert head.read() == b""
    connection.request("HEAD", "/health")  # on the same connection: nothing is left of the first
    assert connection.getresponse().status == 200
    connection.close()
    with server.http.stream("GET", path) as get:
        assert head.status == get.status_code
        assert head.headers["content-type"] == get.headers["content-type"]


def test_head_is_refused_where_there_is_no_get(server):
    answer = server.http.head("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


def test_every_wait_is_told_in_milliseconds_and_in_whole_seconds():
    assert retry_after(0.25) == {"retry-after-ms": "250", "retry-after": "1"}
    assert retry_after(59.0001) == {"retry-after-ms": "59001", "retry-after": "60"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_so_far_never_counts_down(server, path):
    prompt = {"messages": said("Hello")} if "chat" in path else {"prompt": "import os\n"}
    body = {
        **prompt,
        "n": 3,
        "seed": 1,
        "temperature": 1.0,
        "stop": ["e", "o"],  # so that the choices end at different times
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    lines = server.http.post(path, json=body).text.splitlines()
    told = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        counts = [usage[name] for usage in told]
        assert counts == sorted(counts)
    assert len({usage["prompt_tokens"] for usage in told}) == 1
    assert told[-1]["completion_tokens"] > told[0]["completion_tokens"]
