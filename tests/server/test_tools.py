"""Structured output and tools: answers that follow a schema, and calls in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from server.running import CODER, said, started

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 30]}, "word": {"enum": ["a", "b"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tools(coder, tmp_path_factory):
    """A server that takes the model's calls for Hermes's."""
    with started(coder, tmp_path_factory.mktemp("tools"), tool_calls="hermes") as server:
        yield server


def test_an_answer_follows_its_schema(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    options = {"response_format": form, "max_tokens": 60, "temperature": 1.0}
    for seed in range(3):
        answer = server.chat("Numbers", seed=seed, **options).choices[0]
        assert set(json.loads(answer.message.content)) == {"n", "word"}
        assert answer.finish_reason == "stop"
    whole = server.chat("Numbers", seed=1, **options).choices[0].message.content
    chunks = server.chat("Numbers", seed=1, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_response_follows_its_schema(server):
    made = server.openai.responses.create(
        model=CODER,
        input="Numbers",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )
    assert json.loads(made.output_text)["n"] in (1, 2, 30)


def test_a_schema_that_cannot_be_enforced_is_refused(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    answer = server.post("/v1/chat/completions", messages=said("Hi"), response_format=form)
    assert answer.status_code == 400
    refused = answer.json()["error"]
    assert refused["param"] == "response_format"
    assert refused["message"].startswith("response_format: ")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
    answer = server.post("/v1/responses", input="Hi", text={"format": form})
    assert answer.json()["error"]["param"] == "text.format"


def forced(server, choice, **options):
    return server.chat(
        "What is the weather?", tools=[WEATHER, STOP], tool_choice=choice, max_tokens=80, **options
    )


def test_a_forced_call_has_arguments_of_its_schema(tools):
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = forced(tools, named).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_streamed_call_is_the_same_call(tools):
    named = {"type": "function", "function": {"name": "weather"}}
    (whole,) = forced(tools, named).choices[0].message.tool_calls
    name = arguments = ""
    for chunk in forced(tools, named, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.function.name, whole.function.arguments)


def test_a_turn_after_a_call_goes_on_from_what_the_model_wrote(tools):
    named = {"type": "function", "function": {"name": "weather"}}
    first = forced(tools, named)
    message = first.choices[0].message
    messages = [
        *said("What is the weather?"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id},
    ]
    second = tools.openai.chat.completions.create(
        model=CODER, messages=messages, tools=[WEATHER, STOP], max_tokens=4, temperature=0
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1


def test_responses_and_messages_have_calls_of_their_shape(tools):
    function = {"type": "function", **WEATHER["function"]}
    made = tools.openai.responses.create(
        model=CODER,
        input="Weather?",
        tools=[function],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=80,
    )
    (item,) = made.output
    assert (item.type, item.name) == ("function_call", "weather")
    body = {
        "max_tokens": 80,
        "messages": said("Weather?"),
        "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    answer = tools.http.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][0]["input"]["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_field(tools, options, param):
    answer = tools.post("/v1/chat/completions", messages=said("Hi"), **options)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_model_without_a_format_of_calls_refuses_tools(server):
    answer = server.post("/v1/chat/completions", messages=said("Hi"), tools=[WEATHER])
    assert answer.status_code == 400
    assert "--tool-calls" in answer.json()["error"]["message"]


def test_a_call_that_is_forced_comes_before_the_form_of_the_text(tools):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    options = {"tools": [WEATHER], "response_format": form, "max_tokens": 60}
    options["parallel_tool_calls"] = False
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = tools.chat("Where?", tool_choice=choice, **options).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls[0].function.name == "weather"
    answer = tools.chat("Numbers", tool_choice="none", **options).choices[0]
    assert set(json.loads(answer.message.content)) == {"n", "word"}
