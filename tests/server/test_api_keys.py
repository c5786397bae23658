"""Keys, tenants and limits: who may do what, and that nobody sees another's conversations."""

from __future__ import annotations

import hashlib
import socket

import httpx
import pytest

from kvpager import InvalidArgumentError
from kvpager.server.errors import ApiError
from kvpager.server.tenants import Tenant, Tenants
from server.running import coder_engine, running, said

KEYS = f"""
- {{key: sk-alice, tenant: alice, requests_per_minute: 3}}
- {{key: sk-alice-2, tenant: alice, requests_per_minute: 3}}
- {{key_sha256: {hashlib.sha256(b"sk-bob").hexdigest()}, tenant: bob, priority: 5}}
"""


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return str(path)


def ask(server, key, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"messages": said("Write a class. " * 20), "max_tokens": 2, "temperature": 0, **body}
    return server.http.post("/v1/chat/completions", json=body, headers=headers)


def sound(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_without_a_known_key_is_401(engine, keys, tmp_path):
    with running(engine, tmp_path / "store", api_keys=keys) as server:
        for key in (None, "sk-none"):
            answer = ask(server, key)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/health").status_code == 200


def test_one_key_needs_no_file(engine, keys):
    with running(engine, None, api_key="sk-1") as server:
        assert ask(server, None).status_code == 401
        sound(ask(server, "sk-1"))
    with running(engine, None, api_key="sk-1", api_keys=keys) as server:
        sound(ask(server, "sk-1"))
        sound(ask(server, "sk-bob"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/a/import", "/nowhere"])
def test_a_stranger_is_401_before_the_body_is_read(engine, path):
    with running(engine, None, api_key="sk-1") as server:
        address = server.url.removeprefix("http://").split(":")
        for size in ("content-length: 1000000", "transfer-encoding: chunked"):
            with socket.create_connection((address[0], int(address[1])), timeout=10) as client:
                head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{size}\r\n"
                client.sendall(f"{head}content-type: application/json\r\n\r\n".encode())
                assert client.recv(1000).startswith(b"HTTP/1.1 401 ")


def reloaded(server, path, text):
    """Has the server read the keys again that a file has now, and waits until it has."""
    path.write_text(text)
    server.server.reload_keys()
    for _ in range(100):  # requests of the loop, behind what it was asked for
        server.http.get("/health")
        if not server.service._tasks:
            return
    raise AssertionError("the keys were not read")


def test_keys_are_read_again_while_requests_go_on(engine, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    with running(engine, tmp_path / "store", api_keys=str(path)) as server:
        sound(ask(server, "sk-alice"))
        reloaded(server, path, KEYS + "- {key: sk-carol, tenant: carol}\n")
        sound(ask(server, "sk-carol", session_id="hers"))
        sound(ask(server, "sk-alice"))
        sound(ask(server, "sk-alice"))
        assert ask(server, "sk-alice").status_code == 429  # counted across the change
        reloaded(server, path, "- {key: sk-carol-2, tenant: carol}\n")
        assert ask(server, "sk-carol").status_code == 401
        assert ask(server, "sk-bob").status_code == 401
        bearer = {"authorization": "Bearer sk-carol-2"}
        assert server.http.get("/v1/sessions/hers", headers=bearer).status_code == 200


@pytest.mark.parametrize("text", ["- [", "", "[]", "- {key: a, quota: 3}", "\x00"])
def test_a_broken_file_of_keys_leaves_those_that_hold_and_is_logged(engine, tmp_path, text, caplog):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    with running(engine, None, api_keys=str(path)) as server:
        reloaded(server, path, text)
        sound(ask(server, "sk-bob"))
        assert ask(server, None).status_code == 401
    assert "keys that were read before hold on" in caplog.text


def test_tenants_share_nothing(engine, keys, tmp_path):
    with running(engine, tmp_path / "store", api_keys=keys) as server:
        body = {"messages": said("Nobody else asks for this. " * 20)}
        sound(ask(server, "sk-alice", session_id="mine", **body))
        cached = sound(ask(server, "sk-bob", **body))["usage"]["prompt_tokens_details"]
        assert cached["cached_tokens"] == 0
        bearer = {"Authorization": "Bearer sk-bob"}
        assert server.http.get("/v1/sessions/mine", headers=bearer).status_code == 404
        again = sound(ask(server, "sk-bob", **body))["usage"]["prompt_tokens_details"]
        assert again["cached_tokens"] > 0


def test_a_tenant_that_asks_too_often_is_told_when_to_come_again(engine, keys, tmp_path):
    with running(engine, tmp_path / "store", api_keys=keys) as server:
        for key in ("sk-alice", "sk-alice-2", "sk-alice"):
            sound(ask(server, key))
        refused = ask(server, "sk-alice-2")
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after-ms"]) <= 60_001
        sound(ask(server, "sk-bob"))


def test_a_cache_salt_separates_prompts_of_one_tenant(server):
    first = ask(server, None, cache_salt="a").json()
    other = ask(server, None, cache_salt="b").json()
    again = ask(server, None, cache_salt="a").json()
    cached = [
        one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, other, again)
    ]
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0
    assert first["choices"] == again["choices"]


def test_a_priority_before_the_tenants_own_is_refused(engine, keys, tmp_path):
    with running(engine, tmp_path / "store", api_keys=keys) as server:
        assert ask(server, "sk-bob", priority=1).status_code == 400
        assert ask(server, "sk-bob", priority=9).status_code == 200
        assert ask(server, "sk-bob", priority=0).status_code == 200  # as a router sends it


def test_a_store_has_a_budget_for_each_tenant(coder, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: a, tenant: a, store_budget: 2MB}\n- {key: b, tenant: b}\n")
    with (
        coder_engine(*coder) as engine,
        running(engine, tmp_path / "store", api_keys=str(path)) as server,
    ):
        for name in ("one", "two", "three"):
            sound(ask(server, "a", session_id=name, cache_salt=name))
        stores = tmp_path / "store"
        size = sum(file.stat().st_size for file in (stores / "a").glob("*/*"))
        assert size <= 2_000_000
        assert (stores / "b").is_dir()


def test_a_large_body_is_refused_before_it_is_read(engine, tmp_path):
    with running(engine, tmp_path, max_request_bytes=2000) as server:
        answer = ask(server, None, user="x" * 3000)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = server.post("/v1/messages", system="x" * 3000)
        assert answer.status_code == 413
        assert (answer.json()["type"], answer.json()["error"]["type"]) == (
            "error",
            "request_too_large",
        )

        def parts():
            for _ in range(50):
                yield b"x" * 100

        streamed = server.http.post("/v1/chat/completions", content=parts())
        assert streamed.status_code == 413


def test_a_full_queue_is_429_with_a_time_to_come_again(engine, tmp_path):
    with running(engine, tmp_path, max_running=1, max_waiting=1) as server:
        streams = []
        body = {"messages": said("Write."), "max_tokens": 2000, "stream": True}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(2):
                request = client.build_request("POST", "/v1/chat/completions", json=body)
                streams.append(client.send(request, stream=True))
            answer = ask(server, None)
            for stream in streams:
                stream.close()
        assert answer.status_code == 429
        assert int(answer.headers["retry-after-ms"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "expected a list"),
        ("- {tenant: a}", "one of key and key_sha256"),
        ("- {key: a, salt: 3}", "salt is 3"),
        ("- {key: a, tenant: ../x}", "tenant is '../x'"),
        ("- {key: a}\n- {key: a}", "twice"),
        ("- {key: a, quota: 3}", "field 'quota'"),
        ("- {key: a, requests_per_minute: 0}", "at least 1"),
        ("- {key_sha256: abc}", "64 hexadecimal digits"),
    ],
)
def test_a_file_of_keys_is_refused_by_entry_and_field(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=says):
        Tenants.read(str(path))


def test_a_minute_later_a_tenant_may_ask_again():
    tenants, tenant = Tenants(), Tenant(requests_per_minute=2)
    tenants.count(tenant, 0.0)
    tenants.count(tenant, 30.0)
    with pytest.raises(ApiError):
        tenants.count(tenant, 59.0)
    tenants.count(tenant, 60.5)
