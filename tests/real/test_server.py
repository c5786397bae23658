"""`kvpager serve` with a real model: one default, sessions, restarts, tools, JSON."""

from __future__ import annotations

import json

import pytest

from kvpager import Engine
from server.running import running

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NEW = 12


@pytest.fixture
def server(engine, tmp_path):
    with running(engine, tmp_path / "store", tool_calls="hermes") as client:
        yield client


def chat(client, text, **fields):
    """A chat completion of one user message, with the server's own defaults."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": NEW, **fields}
    response = client.post("/v1/chat/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def test_the_server_gives_the_answer_that_python_gives(server, engine):
    with engine.session() as session:
        expected = session.chat("What is the capital of France?", NEW).text
    assert chat(server, "What is the capital of France?")["content"] == expected


def test_a_session_goes_on_after_a_restart_with_each_new_message_alone(loaded, tmp_path):
    questions = ("What is the capital of France?", "And of Italy?", "Which is larger?")
    model, tokenizer = loaded
    answers = []
    for question in questions:
        with (
            Engine(model, tokenizer=tokenizer, pool_tokens=2048) as engine,
            running(engine, tmp_path) as client,
        ):
            answers.append(chat(client, question, session_id="ada")["content"])
    with (
        Engine(model, tokenizer=tokenizer, pool_tokens=2048) as engine,
        engine.session() as session,
    ):
        assert answers == [session.chat(question, NEW).text for question in questions]


def test_a_call_of_a_tool_has_arguments_of_its_schema(server):
    message = chat(
        server,
        "What is the weather in Rome?",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    )
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_a_response_format_is_kept(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = chat(server, "How many days has a week?", response_format=form, max_tokens=30)
    assert json.loads(message["content"])["n"] <= 99
