"""Connections that ask for nothing, or read nothing, end, and keep nobody else out."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import httpx
import pytest

from kvpager.server import connections
from kvpager.server.connections import Connections
from server.running import running

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: "
UNKNOWN = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n"
JSON = b"content-type: application/json\r\n"


def connect(server, stack):
    host, port = server.url.removeprefix("http://").split(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=30))


def is_well(server):
    return httpx.get(f"{server.url}/health", timeout=10).status_code == 200


def seconds_until_closed(client, drip=b""):
    """How long a server lets a client go on that sends a byte now and then."""
    begun = time.monotonic()
    client.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - begun < 30:
            client.sendall(drip)
            with contextlib.suppress(TimeoutError):
                if not client.recv(65536):
                    break
    return time.monotonic() - begun


def test_many_half_sent_heads_keep_nobody_out(engine):
    with running(engine, None, max_connections=20) as server, contextlib.ExitStack() as stack:
        for _ in range(100):
            connect(server, stack).sendall(HALF)
        assert is_well(server)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
            for _ in range(100):
                connect(server, stack).sendall(HALF)
            assert is_well(server)


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_head_has_to_come_in_time(engine, drip):
    with running(engine, None, header_timeout=0.4) as server, contextlib.ExitStack() as stack:
        client = connect(server, stack)
        client.sendall(HALF)
        assert seconds_until_closed(client, drip) < 10
        client = connect(server, stack)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + HALF)
        assert seconds_until_closed(client, drip) < 10


def test_a_body_that_was_answered_already_is_not_waited_for(engine):
    with (
        running(engine, None, header_timeout=0.4, api_key="k") as server,
        contextlib.ExitStack() as stack,
    ):
        client = connect(server, stack)
        client.sendall(UNKNOWN + JSON + b"\r\n")
        assert seconds_until_closed(client, b"x") < 10


def test_an_answer_that_nobody_reads_ends(engine):
    with running(engine, None, send_timeout=0.4) as server, contextlib.ExitStack() as stack:
        client = connect(server, stack)
        client.settimeout(20)
        deadline = time.monotonic() + 20
        with contextlib.suppress(ConnectionError, TimeoutError):
            while time.monotonic() < deadline:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert time.monotonic() < deadline


def test_a_request_may_take_longer_than_its_head(engine):
    with running(engine, None, header_timeout=0.2) as server:
        body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        assert server.post("/v1/completions", **body).status_code == 200


def test_no_more_connections_than_descriptors(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (256, 256))
    assert Connections(1024, 1, 1)._most == 128
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert Connections(1024, 1, 1)._most == 1024
