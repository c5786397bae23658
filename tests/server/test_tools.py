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


def test_a_schema_of_900_optional_properties_is_followed(server):
    schema = {"properties": {f"p{i}": {"enum": [i]} for i in range(900)}}
    schema |= {"type": "object", "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.chat("Numbers", response_format=form, max_tokens=4)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_is_the_requests_error(server, path, later, stream):
    schema = {"properties": {f"p{i}": {"enum": [i]} for i in range(100)}, "minProperties": 1}
    schema |= {"type": "object", "additionalProperties": False}
    if later:  # what can be known before is known before
        schema = {"prefixItems": [{"enum": [1, 2]}, schema], "type": "array", "minItems": 2}
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": said("x")}
    answer = server.post(path, **prompt, structured_outputs={"json": schema}, stream=stream)
    told = [line for line in answer.text.splitlines() if "error" in line][-1]
    error = json.loads(told.removeprefix("data: "))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs.json")
    assert "Current row has" in error["message"]
    assert answer.status_code == (200 if later and stream else 400)


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


PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "begin"),
    [(path, None) for path in PATHS] + [(PATHS[0], "<"), (PATHS[0], "{")],
)
def test_an_answer_that_may_call_is_a_call_or_follows_its_schema(tools, path, begin, stream):
    schema, form = WEATHER["function"]["parameters"], {"name": "x", "schema": SCHEMA}
    form, text = {"type": "json_schema", **form}, {"type": "json_schema", "json_schema": form}
    if path == "/v1/messages":
        body = {"messages": said("Numbers"), "output_config": {"format": form}, "max_tokens": 60}
        body["output_config"]["format"].pop("name")
        body["tools"] = [{"name": "weather", "input_schema": schema}]
    elif path == "/v1/responses":
        body = {"input": "Numbers", "text": {"format": form}, "max_output_tokens": 60}
        body["tools"] = [{"type": "function", **WEATHER["function"]}]
    else:
        body = {"messages": said("Numbers"), "response_format": text, "max_tokens": 60}
        body["tools"] = [WEATHER]
        text["json_schema"] = {key: form[key] for key in ("name", "schema")}
    if begin is not None:  # the bias chooses the first token, the grammar what may follow
        (token,) = tools.post("/tokenize", prompt=begin, add_special_tokens=False).json()["tokens"]
        body["logit_bias"] = {str(token): 100}
    for _ in range(3):
        answer = tools.post(path, **body, temperature=1.0, stream=stream)
        content, calls, _ = read(path, answer, stream)
        assert bool(content) != bool(calls)
        assert begin is None or bool(calls) == (begin == "<")
        if calls:
            assert calls[0][0] == "weather"
        else:
            assert set(json.loads(content)) == {"n", "word"}


def cut_answer(tools, path, stream, count):
    """Content, calls (name first) and the reason of a forced call of so many tokens."""
    schema = WEATHER["function"]["parameters"]
    if path == "/v1/messages":
        function = {"tools": [{"name": "weather", "input_schema": schema}]}
        function |= {"tool_choice": {"type": "any"}, "messages": said("Where?")}
        body = {**function, "max_tokens": count}
    elif path == "/v1/responses":
        function = {"type": "function", **WEATHER["function"]}
        body = {"tools": [function], "tool_choice": "required", "input": "Where?"}
        body["max_output_tokens"] = count
    else:
        body = {"tools": [WEATHER], "tool_choice": "required", "messages": said("Where?")}
        body["max_tokens"] = count
    return read(path, tools.post(path, **body, temperature=0, stream=stream), stream)


def read(path, answer, stream):
    """Content, calls (name first) and the reason of an answer's end."""
    assert answer.status_code == 200, answer.text
    if not stream:
        told = answer.json()
        if path == "/v1/messages":
            blocks = told["content"]
            text = "".join(one["text"] for one in blocks if one["type"] == "text")
            calls = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
            return text, calls, told["stop_reason"]
        if path == "/v1/responses":
            calls = [one for one in told["output"] if one["type"] == "function_call"]
            assert not calls or calls[-1]["status"] == "incomplete"
            text = "".join(
                one["content"][0]["text"] for one in told["output"] if one["type"] == "message"
            )
            return text, [(one["name"], one["arguments"]) for one in calls], told["status"]
        (choice,) = told["choices"]
        calls = [one["function"] for one in choice["message"]["tool_calls"] or ()]
        calls = [(one["name"], one["arguments"]) for one in calls]
        return choice["message"]["content"] or "", calls, choice["finish_reason"]
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    if path == "/v1/messages":
        text = "".join(
            one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta"
        )
        begun = [one["content_block"] for one in events if one["type"] == "content_block_start"]
        calls = [(one["name"],) for one in begun if one["type"] == "tool_use"]
        return text, calls, events[-2]["delta"]["stop_reason"]
    if path == "/v1/responses":
        text = "".join(one["delta"] for one in events if one["type"].endswith("text.delta"))
        done = [one for one in events if one["type"].endswith("arguments.done")]
        calls = [(one["name"], one["arguments"]) for one in done]
        return text, calls, events[-1]["response"]["status"]
    deltas = [one["choices"][0]["delta"] for one in events]
    text = "".join(one.get("content") or "" for one in deltas)
    parts = [one["tool_calls"][0]["function"] for one in deltas if one.get("tool_calls")]
    calls = [(one["name"],) for one in parts if one.get("name")]
    return text, calls, events[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/chat/completions", "length"),
        ("/v1/responses", "incomplete"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_a_call_that_is_cut_is_a_part_of_a_call_and_no_content(tools, path, reason, stream):
    whole = forced(tools, "required", temperature=0).usage.completion_tokens
    named = 0
    for count in range(3, whole - 4, 6):
        text, calls, ended = cut_answer(tools, path, stream, count)
        assert (text.strip(), ended) == ("", reason)
        assert all(one[0] == "weather" for one in calls)
        named += len(calls)
    assert named > 1
