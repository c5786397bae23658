"""Failures that are not the client's are said to be the server's."""

from __future__ import annotations

import json

import pytest
import torch

from server.running import CODER, said, started


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_setting_that_somebody_changed_is_the_servers_error(coder, threads):
    body = {"messages": said("Hi"), "max_tokens": 2}
    with started(coder, None) as server:
        torch.set_num_threads(threads + 1)
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-should-retry"] == "false"


BODIES = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "model": CODER,
        "max_tokens": 1,
    },
    "/tokenize": lambda text: {"prompt": text},
}


@pytest.mark.parametrize("path", BODIES)
def test_half_of_a_surrogate_pair_is_refused_by_its_place(server, path):
    body = json.dumps(BODIES[path]("half an emoji \ud83d"))
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "has half of a surrogate pair" in answer.text
    assert "x-request-id" in answer.headers
    whole = json.dumps(BODIES[path]("a whole one \U0001f600"))
    answer = server.http.post(path, content=whole, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/tokenize"])
@pytest.mark.parametrize("kind", [None, "text/plain"])
def test_a_body_that_is_not_said_to_be_json_is_refused_by_that(server, path, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = server.http.post(path, content=json.dumps(BODIES[path]("Hi")), headers=headers)
    assert answer.status_code == 400
    given = "missing" if kind is None else "'text/plain'"
    expected = f"content-type is {given}; expected 'application/json'"
    assert answer.json()["error"]["message"].startswith(expected)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
         '{"maximum": NaN}}}', "schema.maximum is nan; expected a number that JSON has"),
        ('"temperature": Infinity', "temperature is inf; expected a number that JSON has"),
        ('"chat_template_kwargs": {"chat_template": "x"}', "chat_template cannot be set"),
        ('"chat_template_kwargs": {"tokenize": true}', "tokenize cannot be set"),
        ('"store": true, "request_id": "../../evil"', "request_id is '../../evil'"),
    ],
)  # fmt: skip
def test_what_no_request_may_say_is_refused_before_anything_is_computed(server, fields, says):
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}'
    answer = server.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_refused_grammar_is_no_failure_of_the_server(server, caplog):
    answer = server.http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "banana"}},
            },
        },
    )
    assert answer.status_code == 400
    assert "x-request-id" in answer.headers
    assert "Traceback" not in caplog.text
