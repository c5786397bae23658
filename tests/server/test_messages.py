"""Anthropic's Messages: blocks, events and counts."""

from __future__ import annotations

import json

import pytest

from server.running import said, started


def ask(server, text="Write a class.", **body):
    body = {"max_tokens": 12, "temperature": 0, "messages": said(text), **body}
    return server.http.post("/v1/messages", json=body)


def test_an_answer_is_that_of_a_chat_completion(server):
    answer = ask(server, system="Be terse.").json()
    messages = [{"role": "system", "content": "Be terse."}, *said("Write a class.")]
    chat = server.http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 12, "temperature": 0}
    ).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert answer["stop_reason"] == "max_tokens"
    usage = answer["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == chat["usage"]["prompt_tokens"]


def test_events_tell_the_same_answer(server):
    lines = ask(server, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"]["text"] for event in events if event["type"].endswith("block_delta")]
    assert "".join(deltas) == ask(server).json()["content"][0]["text"]


def test_a_stop_sequence_is_named(server):
    text = ask(server).json()["content"][0]["text"]
    stopped = ask(server, stop_sequences=["nowhere", text[5:8]]).json()
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["stop_sequence"] == text[5:8]


def test_a_prompt_is_read_from_its_cache_control_after_a_restart(coder, tmp_path):
    block = {"type": "text", "text": "A long text. " * 20, "cache_control": {"type": "ephemeral"}}

    def usage(server, question):
        messages = [{"role": "user", "content": [block, {"type": "text", "text": question}]}]
        return ask(server, messages=messages).json()["usage"]

    with started(coder, tmp_path) as server:
        first = usage(server, "Why?")
    with started(coder, tmp_path) as server:
        second = usage(server, "How?")
    assert first["cache_creation_input_tokens"] > 0
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert second["cache_creation_input_tokens"] == 0


def test_tokens_can_be_counted(server):
    answer = ask(server).json()["usage"]
    counted = server.http.post(
        "/v1/messages/count_tokens", json={"messages": said("Write a class.")}
    )
    assert counted.json()["input_tokens"] == sum(
        value for name, value in answer.items() if name != "output_tokens"
    )


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "no-such-model"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_the_shape_and_the_types_of_anthropics_api(server, fields, status, kind):
    answer = ask(server, **fields)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert next(iter(fields)) in told["error"]["message"]
