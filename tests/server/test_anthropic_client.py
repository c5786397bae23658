"""Anthropic's own client against the server."""

from __future__ import annotations

import json

import pytest

from server.running import CODER, said

anthropic = pytest.importorskip("anthropic")

GREEDY = {"temperature": 0}  # which newer clients know no more
ASK = {"model": CODER, "max_tokens": 12, "extra_body": GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_stream_adds_up_to_the_message(client):
    whole = client.messages.create(messages=said("Write a class."), **ASK)
    with client.messages.stream(messages=said("Write a class."), **ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens

    def prompt(usage):
        cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        return usage.input_tokens + cached

    count = client.messages.count_tokens(model=CODER, messages=said("Write a class."))
    assert prompt(final.usage) == prompt(whole.usage) == count.input_tokens


def test_a_message_follows_the_schema_of_its_output_config(client):
    made = client.messages.create(
        messages=said("Who?"),
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        thinking={"type": "disabled"},
        **{**ASK, "max_tokens": 60},
    )
    assert json.loads(made.content[0].text)["name"] in ("ada", "bob")


def test_a_prompt_that_is_too_long_is_a_bad_request_in_its_words(client):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 32768"):
        client.messages.create(messages=said("word " * 40_000), **ASK)


def test_what_its_agents_send_is_taken(client):
    raw = client.messages.with_raw_response.create(
        messages=said("Hi"),
        system=[{"type": "text", "text": "Be terse.", "cache_control": {"type": "ephemeral"}}],
        cache_control={"type": "ephemeral"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        metadata={"user_id": "ada"},
        service_tier="auto",
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
        **{**ASK, "extra_body": {**GREEDY, "top_k": 5, "context_management": {"edits": []}}},
    )
    assert raw.parse().role == "assistant"
    assert set(raw.headers["x-kvpager-ignored"].split(", ")) >= {"thinking", "context_management"}
