"""One client's many requests leave room, places and rows to another's one."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from server.running import coder_engine, running

SAMPLED = {"temperature": 0.0, "ignore_eos": True}
KEYS = "- {key: a, tenant: a}\n- {key: b, tenant: b}\n- {key: c, tenant: c, priority: -1}\n"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return str(path)


def complete(server, key="a", client=None, **body):
    headers = {"Authorization": f"Bearer {key}"}
    client = client or server.http
    answer = client.post("/v1/completions", json={**SAMPLED, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Beside:
    """Requests of a client that run meanwhile; ends when the last of them has."""

    def __init__(self, *work):
        self.threads = [threading.Thread(target=one) for one in work]

    def __enter__(self):
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_):
        for thread in self.threads:
            thread.join()


def test_a_hundred_requests_of_one_tenant_make_another_wait_for_a_few_forwards(engine, keys):
    prompts = [f"def function_{i}(values):" for i in range(120)]
    with running(engine, None, api_keys=keys) as server:
        scheduler = server.service.scheduler

        def ask(prompt):
            return lambda: complete(server, prompt=prompt, max_tokens=60)

        one = {"client": httpx.Client(base_url=server.url, timeout=60), "prompt": "class Stack:"}
        with one["client"], Beside(*map(ask, prompts)):
            wait_until(lambda: scheduler.waiting > 60)
            forwards, done = engine.stats()["model_forwards"], scheduler.waiting
            (text,) = complete(server, "b", max_tokens=1, **one)
            # Two requests of HTTP lie between the counts; an answer of the other's has 60 tokens.
            assert engine.stats()["model_forwards"] - forwards < 60
            assert done - scheduler.waiting < 30
        assert (text,) == tuple(complete(server, "b", prompt="class Stack:", max_tokens=1))


def test_the_prompts_of_one_completion_are_queued_a_few_at_a_time(coder):
    prompts = [f"def function_{i}(values):" for i in range(150)]
    with coder_engine(*coder) as engine, running(engine, None) as server:
        scheduler, texts, queued, blocks = server.service.scheduler, [], [], []

        def ask():
            texts.extend(complete(server, prompt=prompts, max_tokens=2))

        with Beside(ask):
            while len(texts) < len(prompts):
                queued.append(scheduler.waiting + scheduler.running)
                blocks.append(engine.stats()["free_blocks"])
                time.sleep(0.002)
        assert max(queued) <= scheduler.most_running
        assert min(blocks) > 0  # the pool has 32
        assert engine.stats()["free_blocks"] == engine.stats()["pool_blocks"]
        assert texts[7] == complete(server, prompt=prompts[7], max_tokens=2)[0]


def test_a_prompt_that_fails_ends_the_others(engine):
    with running(engine, None, request_timeout=0.2) as server:
        body = {"prompt": ["def f(x):"] * 100, "max_tokens": 500, **SAMPLED}
        assert server.post("/v1/completions", **body).status_code == 408
        wait_until(lambda: server.service.scheduler.idle)


def test_conversations_of_one_tenant_evict_none_of_another(engine, keys):
    with running(engine, None, api_keys=keys, kept_sessions=3) as server:

        def chat(key, name):
            answer = server.http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
                headers={"Authorization": f"Bearer {key}", "X-Session-ID": name},
            )
            assert answer.status_code == 200

        chat("b", "mine")
        for i in range(5):
            chat("a", f"theirs-{i}")
        listed = server.http.get("/v1/sessions", headers={"Authorization": "Bearer b"}).json()
        assert [one["id"] for one in listed["data"]] == ["mine"]
