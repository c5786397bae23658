"""Requests that are made to take long: a second client's stream and health checks go on.

Its longest wait for a token, and for an answer of `/health`, is measured while each of them is
read. A machine that does much else makes anybody wait: three times what it was before is allowed
beside the bound, and of three tries one has to be within both.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from server.running import ServerProcess, said

LONGEST = 0.5  # seconds that a second client may wait
TRIES = 3
SECONDS = 3.0  # that a connection sends
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**fields):
    return CHAT, {"messages": said("Hi"), "max_tokens": 1, **fields}


def schema(schema, **fields):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat(response_format=form, **fields)


def properties(count):
    names = {f"p{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


def called(arguments):
    return calling([{"id": "a", "function": {"name": "f", "arguments": arguments}}])


def calling(calls):
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    return chat(messages=[*said("Hi"), asked, *said("And?")])


def response(items):
    return "/v1/responses", {"input": items, "max_output_tokens": 1}


def message(content):
    return "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


# Beyond the limits, and as far as they go.
ATTACKS = {
    "ten megabytes of one letter": lambda: chat(messages=said("a" * 10_000_000)),
    "one letter as often as a prompt may have": lambda: chat(messages=said("a" * 524_000), n=16),
    "100,000 messages": lambda: chat(messages=said(*["x"] * 100_001)),
    "as many messages as there may be": lambda: chat(messages=said(*["x"] * 8191)),
    "a million stops": lambda: chat(stop=[f"s{i}" for i in range(1_000_000)]),
    "a million stop ids": lambda: chat(stop_token_ids=[5] * 1_000_000),
    "a million biases": lambda: chat(logit_bias={str(i): 1 for i in range(1_000_000)}),
    "an enum of a million": lambda: schema({"enum": [f"v{i}" for i in range(1_000_000)]}),
    "an enum as large as it may be": lambda: schema({"enum": list(range(10_000))}, n=16),
    "10,000 properties": lambda: schema(properties(10_000)),
    "as many properties as there may be": lambda: schema(properties(1000), n=16),
    "a long constant": lambda: schema({"const": "x" * 4096}, n=16, max_tokens=20),
    "1,000 prompts": lambda: (TEXT, {"prompt": [f"a{i}" for i in range(1000)], "max_tokens": 1}),
    "two million ids": lambda: (TEXT, {"prompt": [5] * 2_000_000}),
    "a prompt of what is none": lambda: (TEXT, {"prompt": [[[]]] * 80_000}),
    "messages that are none": lambda: chat(messages=[{"x": 1}] * 80_000),
    "three million lists": lambda: chat(chat_template_kwargs={"x": [[]] * 3_000_000}),
    "many names": lambda: chat(chat_template_kwargs={f"k{i}": 1 for i in range(90_000)}),
    "many parts": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x\n"}] * 40_000}]
    ),
    "lists as text": lambda: called(json.dumps({"a": [[]] * 3_000_000})),
    "names as text": lambda: called(json.dumps({f"k{i}": 1 for i in range(500_000)})),
    "numbers as text": lambda: called(json.dumps({"a": [0.1] * 1_500_000})),
    "one long number as text": lambda: called('{"a": ' + "9" * 4_000_000 + "}"),
    "brackets as text": lambda: called("[" * 8_000_000),
    "calls that are none": lambda: calling([{"x": 1}] * 80_000),
    "calls of one letter": lambda: calling([""] * 80_000),
    "parts that are none": lambda: chat(messages=[{"role": "user", "content": [{}] * 90_000}]),
    "items that are none": lambda: response([{"type": "x"}] * 80_000),
    "items of which the last is none": lambda: response([*said(*["x"] * 8000), {"type": "x"}]),
    "blocks that are none": lambda: message([{"type": "x"}] * 80_000),
    "blocks of which the last is none": lambda: message(
        [{"type": "text", "text": "x"}] * 40_000 + [{}]
    ),
    "text to be made tokens": lambda: ("/tokenize", {"prompt": "a " * 2_000_000}),
    "a choice of many": lambda: chat(guided_choice=[f"a{i}" for i in range(200_000)]),
}


class SecondClient:
    """Streams and asks for health all the time; the longest waits since `begin`."""

    def __init__(self, url):
        self._host = url.removeprefix("http://")
        self._begun = {"token": None, "health": None}
        self._ended = threading.Event()
        self.begin()
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._stream, self._check)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self):
        self._longest = {"token": 0.0, "health": 0.0}

    def bound(self):
        """Begins, and returns the longest wait that is allowed from now on."""
        self.begin()
        time.sleep(0.5)
        longest = LONGEST + 3 * self.longest()
        self.begin()
        return longest

    def longest(self):
        """The waits that have ended, and those that go on."""
        now = time.monotonic()
        going = {kind: now - begun for kind, begun in self._begun.items() if begun is not None}
        return max(*self._longest.values(), *going.values(), 0.0)

    def close(self):
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _waited(self, kind, begun):
        self._longest[kind] = max(self._longest[kind], time.monotonic() - begun)

    def _stream(self):
        body = {"prompt": "def a(", "max_tokens": 200, "stream": True, "ignore_eos": True}
        while not self._ended.is_set():
            client = http.client.HTTPConnection(self._host, timeout=60)
            self._begun["token"] = time.monotonic()
            client.request("POST", TEXT, json.dumps(body), {"content-type": "application/json"})
            answer = client.getresponse()
            assert answer.status == 200
            while answer.readline():
                self._waited("token", self._begun["token"])
                self._begun["token"] = time.monotonic()
            client.close()

    def _check(self):
        while not self._ended.is_set():
            self._begun["health"] = time.monotonic()
            client = http.client.HTTPConnection(self._host, timeout=60)
            client.request("GET", "/health")
            assert client.getresponse().read()
            client.close()
            self._waited("health", self._begun["health"])
            time.sleep(0.02)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server in a process of its own, whose other client is being answered."""
    with ServerProcess(tmp_path_factory.mktemp("store")) as process:
        client = SecondClient(process.client.url)
        time.sleep(1.0)
        yield process, client
        client.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_request_makes_another_client_wait(served, attack):
    process, client = served
    path, fields = ATTACKS[attack]()
    body, waits = json.dumps(fields).encode(), []
    kind = {"content-type": "application/json"}
    for _ in range(TRIES):
        bound = client.bound()
        answer = process.client.http.post(path, content=body, headers=kind)
        assert answer.status_code in (200, 400), answer.text[:500]
        assert len(answer.content) < 3_000_000
        waits.append((client.longest(), bound))
        if waits[-1][0] <= bound:
            return
    raise AssertionError(f"{attack}: another client waited, at most allowed: {waits} s")


def head(path, *fields):
    """The head of a POST, as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


def chunked(count):
    """A body in chunks of one byte each."""
    return head(CHAT, "transfer-encoding: chunked") + b"1\r\n \r\n" * count + b"0\r\n\r\n"


def pipelined(count, fields):
    body = json.dumps(fields).encode()
    return (head(CHAT, f"content-length: {len(body)}") + body) * count


STREAMS = {
    "a body in chunks of a byte": lambda: chunked(1_000_000),
    "wrong requests in one go": lambda: pipelined(5000, {"messages": 1}),
    "requests in one go": lambda: pipelined(1000, chat()[1]),
    "questions for health in one go": lambda: (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000
    ),
    "pages that are none in one go": lambda: b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000,
    "a head that does not end": lambda: head(CHAT)[:-2] + b"a: b\r\n" * 1_000_000,
}


@pytest.mark.parametrize("reads", [True, False], ids=["read", "not read"])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_connection_makes_another_client_wait(served, stream, reads):
    process, client = served
    sent, waits = STREAMS[stream](), []
    for _ in range(TRIES):
        bound = client.bound()
        send(process.client.url, sent, SECONDS, reads)
        waits.append((client.longest(), bound))
        if waits[-1][0] <= bound:
            return
    raise AssertionError(f"{stream}: another client waited, at most allowed: {waits} s")


def send(url, sent, seconds, reads):
    """Sends bytes until they are sent or the time is over, and reads what is answered."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        reader = threading.Thread(target=read_all, args=(connection,), daemon=True)
        if reads:
            reader.start()
        ends = time.monotonic() + seconds
        view = memoryview(sent)
        try:
            while len(view) and time.monotonic() < ends:
                view = view[connection.send(view[: 1 << 16]) :]
            time.sleep(max(0.0, ends - time.monotonic()))
        except OSError:
            pass  # the server has closed the connection, or reads no more


def read_all(connection):
    try:
        while connection.recv(1 << 16):
            pass
    except OSError:
        pass


def test_many_bodies_at_once_take_little_memory(served):
    process, client = served
    body = json.dumps(chat(chat_template_kwargs={"x": [["a" * 40]] * 120_000})[1]).encode()
    before = memory(process)
    bound = client.bound()
    threads = [
        threading.Thread(
            target=process.client.http.post,
            args=(CHAT,),
            kwargs={"content": body, "headers": {"content-type": "application/json"}},
        )
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert memory(process) - before < 600 << 20
    assert client.longest() < TRIES * bound


def memory(process):
    """Bytes that a process has had at most."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
