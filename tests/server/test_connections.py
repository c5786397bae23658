"""Connections that ask for nothing, or read nothing, end, and keep nobody else out."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import ssl
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
    host, port = server.url.split("//")[1].split(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=30))


def is_well(server):
    return httpx.get(f"{server.url}/health", timeout=10).status_code == 200


def seconds_until_closed(client, drip=b"", longest=30):
    """How long a server lets a client go on that sends a byte now and then."""
    begun = time.monotonic()
    client.settimeout(min(0.05, longest))
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - begun < longest:
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


def test_what_comes_is_parsed_a_piece_at_a_time(engine, monkeypatch):
    sizes, receive = [], connections.H11Protocol.data_received

    def received(protocol, data):
        sizes.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(connections.H11Protocol, "data_received", received)
    monkeypatch.setattr(connections, "_TURN", 0.0)  # every piece takes long
    text = "def a(b):\n    return b\n" * 2000
    body = json.dumps({"prompt": text}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    whole = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + JSON
    chunked = whole + b"transfer-encoding: chunked\r\n\r\n" + chunks
    whole += b"content-length: %d\r\n\r\n" % len(body) + body
    with running(engine, None) as server, contextlib.ExitStack() as stack:
        expected = server.post("/tokenize", prompt=text).json()
        client = connect(server, stack)
        client.sendall(whole + chunked + whole + chunked)
        for _ in range(4):
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert json.loads(answer.read()) == expected
    assert max(sizes) <= 8192
    assert sizes.count(256) > len(chunked) // 256
    assert len(chunked) > 200_000


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


def test_half_done_tls_handshakes_are_bounded_in_number_and_time(engine, certificate):
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "max_connections": 20}
    with (
        running(engine, None, **settings) as server,
        contextlib.ExitStack() as stack,
    ):
        half = [connect(server, stack) for _ in range(100)]
        assert httpx.get(f"{server.url}/health", verify=trusting, timeout=10).status_code == 200
        ended = [one for one in half if seconds_until_closed(one, longest=0.1) < 0.1]
        assert len(ended) >= 100 - 20
    with (
        running(engine, None, header_timeout=0.4, **settings) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(3):
            assert seconds_until_closed(connect(server, stack)) < 10
        assert httpx.get(f"{server.url}/health", verify=trusting, timeout=10).status_code == 200
        assert not server.server.connections._handshakes


def test_a_connection_whose_handshake_is_done_has_no_deadline_of_it(engine, certificate):
    cert, key = certificate
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "header_timeout": 0.5}
    with running(engine, None, **settings) as server:
        body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        trusting = ssl.create_default_context(cafile=cert)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, verify=trusting, timeout=99)
        assert answer.status_code == 200
