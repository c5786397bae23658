"""Fields that clients send: what they do, or that they are named where they do nothing."""

from __future__ import annotations

import copy
import json

import pytest

from kvpager import Engine
from kvpager.server.messages import messages_of
from kvpager.server.routes.messages import _messages_of as messages_of_anthropic
from kvpager.server.schema.messages import MessagesRequest
from kvpager.server.schema.responses import ResponseRequest
from model import text_models
from server.running import CODER, GREEDY, running, said

IGNORED = "x-kvpager-ignored"
CHAT = {"messages": said("Write a class."), "max_tokens": 12, **GREEDY}
PROMPT = {"prompt": "import os\n", "max_tokens": 12, **GREEDY}
INPUT = {"input": "Write a class.", "max_output_tokens": 12, "store": False, **GREEDY}
MESSAGE = {"messages": said("Write a class."), "max_tokens": 12, "temperature": 0}
TEXTS = {
    "/v1/chat/completions": (CHAT, lambda a: a["choices"][0]["message"]["content"]),
    "/v1/completions": (PROMPT, lambda a: a["choices"][0]["text"]),
    "/v1/responses": (INPUT, lambda a: a["output"][0]["content"][0]["text"]),
    "/v1/messages": (MESSAGE, lambda a: a["content"][0]["text"]),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
GBNF = r"""root ::= "{" "\"name\": " name "}"  # as llama.cpp has it
name ::= "\"" ( "ada" | "b" [o-o] "b" ) "\""
"""


def answered(server, path, **fields):
    """The answer's text, and the fields that it names as ignored."""
    body, text = TEXTS[path]
    answer = server.http.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get(IGNORED)
    return text(answer.json()), set() if ignored is None else set(ignored.split(", "))


ROUTERS = {  # what vllm-router and sglang-router send of their own accord
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
    "continue_final_message": False,
    "regex": None,
    "ebnf": None,
    "lora_path": None,
    "session_params": None,
}


ROUTED_RESPONSE = {  # and of a response
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "stream": False,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "request_id": "resp_1",
    "priority": 0,
}


LLAMA_CPP_HINTS = {  # what llama.cpp's page sends with its defaults, and what of it is named
    "reasoning_format": "auto",
    "dynatemp_exponent": 1.0,
    "xtc_threshold": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    "backend_sampling": False,
    "timings_per_token": True,
}
LLAMA_CPP = {
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "typ_p": 1,
    "repeat_last_n": -1,
    "repeat_penalty": 1,
    "dry_multiplier": 0,
    **LLAMA_CPP_HINTS,
}
SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, {"reasoning_effort"}),
        ("/v1/chat/completions", {"verbosity": "low"}, {"verbosity"}),
        ("/v1/chat/completions", {"enable_thinking": False}, {"enable_thinking"}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled"}}, {"thinking"}),
        ("/v1/chat/completions", {"metadata": {}}, set()),
        ("/v1/chat/completions", {"metadata": {"a": "b"}}, {"metadata"}),
        ("/v1/chat/completions", {"service_tier": "flex"}, {"service_tier"}),
        ("/v1/chat/completions", {"service_tier": "auto"}, set()),
        ("/v1/chat/completions", {"prompt_cache_retention": "in-memory"}, set()),
        ("/v1/chat/completions", {"cache_prompt": True, "id_slot": -1}, set()),
        (
            "/v1/chat/completions",
            {"cache_prompt": False, "id_slot": 3},
            {"cache_prompt", "id_slot"},
        ),
        ("/v1/chat/completions", {"user": "ada", "functions": None, "foo": None}, set()),
        (
            "/v1/chat/completions",
            ROUTERS,
            {"separate_reasoning", "stream_reasoning", "include_reasoning"},
        ),
        ("/v1/chat/completions", {"mirostat": 0, "typical_p": 1.0, "xtc_probability": 0}, set()),
        ("/v1/chat/completions", {"use_beam_search": False, "n_probs": 0, "echo": False}, set()),
        ("/v1/chat/completions", {"functions": [], "function_call": "auto"}, set()),
        ("/v1/chat/completions", LLAMA_CPP, set(LLAMA_CPP_HINTS)),
        ("/v1/completions", {"samplers": SAMPLERS, "lora": [], "typ_p": 1}, set()),
        (
            "/v1/completions",
            {"suffix": "", "best_of": 1, "service_tier": "priority"},
            {"service_tier"},
        ),
        ("/v1/responses", ROUTED_RESPONSE, set()),
        (
            "/v1/responses",
            {name: value for name, value in ROUTERS.items() if name != "continue_final_message"},
            {"separate_reasoning", "stream_reasoning", "include_reasoning"},
        ),
        (
            "/v1/responses",
            {"truncation": "auto", "max_tool_calls": 3},
            {"truncation", "max_tool_calls"},
        ),
        (
            "/v1/responses",
            {"truncation": "disabled", "text": {"verbosity": "low"}},
            {"text.verbosity"},
        ),
        (
            "/v1/responses",
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"reasoning.effort", "reasoning.summary"},
        ),
        ("/v1/responses", {"client_metadata": {"a": "b"}}, {"client_metadata"}),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, {"include"}),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"thinking", "thinking.budget_tokens"},
        ),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, set()),
        ("/v1/messages", {"output_config": {"effort": "low"}}, {"output_config.effort"}),
        ("/v1/messages", {"mcp_servers": [], "speed": "standard", "service_tier": "auto"}, set()),
        ("/v1/messages", {"context_management": {"edits": []}}, {"context_management"}),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}, "top_k": 5}, set()),
    ],
)
def test_a_hint_changes_nothing_and_is_named(server, path, fields, ignored):
    if "top_k" not in fields:
        assert answered(server, path, **fields) == (answered(server, path)[0], ignored)
    else:
        assert answered(server, path, **fields)[1] == ignored


def test_a_stream_names_what_it_ignores_as_well(server):
    for path, (body, _) in TEXTS.items():
        fields = {"service_tier": "flex", "stream": True}
        with server.http.stream("POST", path, json={**body, **fields}) as answer:
            assert answer.headers[IGNORED] == "service_tier"
            answer.read()


def test_min_tokens_keeps_an_answer_going_and_stop_strings_out_of_its_beginning(server):
    end = server.service.engine.model.generation_config.eos_token_id[0]
    eager = {"logit_bias": {str(end): 100}, "return_token_ids": True, "max_tokens": 9}

    def ids(**fields):
        answer = server.post("/v1/chat/completions", **{**CHAT, **eager, **fields})
        return answer.json()["choices"][0]["token_ids"]

    assert len(ids()) == 1
    assert len(ids(min_tokens=4)) == 5
    assert end not in ids(min_tokens=4)[:4]
    plain, _ = answered(server, "/v1/chat/completions")
    first = plain[0]
    late, _ = answered(server, "/v1/chat/completions", stop=[first], min_tokens=5)
    assert late.startswith(first)
    assert len(late) > 1
    assert answered(server, "/v1/chat/completions", stop=[first])[0] == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_is_of_the_text_where_that_is_asked_for(server, name, stream):
    plain, _ = answered(server, "/v1/completions")
    stop = plain[4:7]
    fields = {"stop": ["nowhere", stop], name: True}
    if not stream:
        text, _ = answered(server, "/v1/completions", **fields)
    else:
        chunks = server.openai.completions.create(
            model=CODER, stream=True, extra_body={name: True}, stop=fields["stop"], **PROMPT
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == plain[: plain.index(stop) + len(stop)]


def test_special_tokens_are_shown_where_that_is_asked_for(server):
    tokenizer = server.service.engine.tokenizer
    special = tokenizer.all_special_ids[0]
    fields = {"logit_bias": {str(special): 100}, "ignore_eos": True, "max_tokens": 2}
    hidden, _ = answered(server, "/v1/completions", **fields)
    shown, _ = answered(server, "/v1/completions", skip_special_tokens=False, **fields)
    assert hidden == ""
    assert shown == 2 * tokenizer.decode([special])


def test_repeat_penalty_is_repetition_penalty(server):
    one, _ = answered(server, "/v1/completions", repetition_penalty=1.7)
    assert answered(server, "/v1/completions", repeat_penalty=1.7)[0] == one
    assert answered(server, "/v1/completions")[0] != one
    both = {**PROMPT, "repeat_penalty": 1.7, "repetition_penalty": 1.2}
    assert server.post("/v1/completions", **both).status_code == 400


def test_n_predict_is_max_tokens(server):
    body = {"prompt": "import os\n", "ignore_eos": True, "n_predict": 3}
    assert server.post("/v1/completions", **body).json()["usage"]["completion_tokens"] == 3
    body |= {"n_predict": -1, "ignore_eos": False, "stop": ["e"], "temperature": 1.0}
    assert server.post("/v1/completions", **body).json()["choices"][0]["finish_reason"] == "stop"
    body["n_predict"] = 0
    assert server.post("/v1/completions", **body).json()["error"]["param"] == "n_predict"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_of_minus_one_tokens_is_as_long_as_there_is_room_for(server, name):
    for path in ("/v1/chat/completions", "/v1/completions")[: 2 if name == "max_tokens" else 1]:
        body = {**TEXTS[path][0], "stop": ["e", " ", "\n"], "temperature": 1.0}
        del body["max_tokens"]
        answer = server.post(path, **body, **{name: -1}).json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert server.post(path, **body, **{name: -2}).json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        ("/v1/chat/completions", {"guided_json": SCHEMA}),
        ("/v1/chat/completions", {"structured_outputs": {"json": SCHEMA}}),
        ("/v1/completions", {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ("/v1/completions", {"response_format": FORM}),
        ("/v1/completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        ("/v1/completions", {"json_schema": SCHEMA, "grammar": ""}),
        ("/v1/chat/completions", {"json_schema": json.dumps(SCHEMA)}),
        ("/v1/chat/completions", {"grammar": GBNF}),
        ("/v1/completions", {"ebnf": GBNF}),
        ("/v1/completions", {"guided_grammar": GBNF}),
        ("/v1/completions", {"structured_outputs": {"grammar": GBNF}}),
        ("/v1/completions", {"regex": r'\{"name": "(ada|bob)"\}'}),
    ],
)
def test_an_answer_follows_a_schema_by_each_of_its_names(server, path, fields):
    text, ignored = answered(server, path, max_tokens=60, **fields)
    name = json.loads(text)["name"]
    assert name in ("ada", "bob")
    assert not ignored


def test_an_answer_is_one_of_the_choices(server):
    fields = {"guided_choice": ["yes", "no"]}
    assert answered(server, "/v1/completions", **fields)[0] in ("yes", "no")


def test_top_logprobs_of_responses_alone_show_them(server):
    answer = server.post("/v1/responses", **INPUT, top_logprobs=2).json()
    told = answer["output"][0]["content"][0]["logprobs"]
    assert len(told) == answer["usage"]["output_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in told)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_pieces_of_text_are_padded_where_that_is_asked_for(server, path):
    body = {**TEXTS[path][0], "stream": True, "stream_options": {"include_obfuscation": True}}
    lines = [line[6:] for line in server.post(path, **body).text.splitlines() if "data: {" in line]
    pieces = [line for line in lines if "obfuscation" in json.loads(line)]
    assert len(pieces) > 3
    assert len({len(line) // 64 for line in pieces}) <= 2
    body["stream_options"]["include_obfuscation"] = False
    assert "obfuscation" not in server.post(path, **body).text


def test_a_stream_of_messages_begins_with_the_tokens_of_its_prompt(server):
    block = {"type": "text", "text": "Read this. " * 20, "cache_control": {"type": "ephemeral"}}
    for content in ("Write a class.", [block], [block]):  # computed, saved, and read
        body = {**MESSAGE, "messages": [{"role": "user", "content": content}], "stream": True}
        lines = server.post("/v1/messages", **body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        first, last = events[0]["message"]["usage"], events[-2]["usage"]
        assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [first[name] for name in names] == [last[name] for name in names]
        assert sum(first[name] for name in names) > 10


def test_a_stream_without_any_text_has_its_first_event(server):
    text = answered(server, "/v1/messages")[0]
    body = {**MESSAGE, "stop_sequences": [text[0]], "stream": True}
    told = server.post("/v1/messages", **body).text
    kinds = [line[7:] for line in told.splitlines() if line.startswith("event: ")]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_reasoning_of_earlier_answers_is_given_to_the_template():
    items = [
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "short"}],
            "content": [{"type": "reasoning_text", "text": "long"}],
            "encrypted_content": "x",
        },
        {"role": "assistant", "content": "Ho"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    body = ResponseRequest.model_validate({"input": items})
    told = messages_of(body.input)
    assert [one.get("reasoning_content") for one in told] == [None, "long", "why", None]
    blocks = [
        {"type": "thinking", "thinking": "long", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Ho"},
    ]
    messages = [*said("Hi"), {"role": "assistant", "content": blocks}, *said("Why?")]
    request = MessagesRequest.model_validate({"max_tokens": 1, "messages": messages})
    told, _ = messages_of_anthropic(request)
    assert told[1] == {"role": "assistant", "content": "Ho", "reasoning_content": "long"}


def test_a_template_that_knows_no_reasoning_has_the_same_prompt(server):
    items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    thought = {"type": "reasoning", "id": "rs", "summary": []}
    count = server.openai.responses.input_tokens.count
    plain = count(input=[*items, {"role": "user", "content": "Why?"}]).input_tokens
    with_it = [items[0], thought, items[1], {"role": "user", "content": "Why?"}]
    assert count(input=with_it).input_tokens == plain
    assert answered(server, "/v1/responses", input=with_it)


def test_a_template_with_such_variables_is_given_them(any_template):
    def prompt(path, **fields):
        body = {**TEXTS[path][0], **fields}
        answer = any_template.post(path, **body)
        assert IGNORED not in answer.headers, answer.headers[IGNORED]
        usage = answer.json()["usage"]
        return usage.get("prompt_tokens") or usage["input_tokens"]

    chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
    effort = prompt(chat, reasoning_effort="high")
    assert effort > prompt(chat)
    assert prompt(responses, reasoning={"effort": "high"}) == effort
    given = {"chat_template_kwargs": {"reasoning_effort": "x" * 40}}  # which comes first
    assert prompt(chat, reasoning_effort="high", **given) > effort
    thinking = prompt(chat, enable_thinking=True)
    assert thinking > prompt(chat, enable_thinking=False) == prompt(chat)
    assert prompt(messages, thinking={"type": "enabled"}) == thinking
    assert prompt(messages, output_config={"effort": "high"}) == effort


@pytest.fixture(scope="module")
def any_template():
    tokenizer = copy.deepcopy(text_models.byte_level())
    tokenizer.chat_template += "{{ reasoning_effort }}"
    options = {"pool_tokens": 2048, "rows": 16, "small_rows": "fixed"}
    with (
        Engine(text_models.model(), tokenizer=tokenizer, **options) as engine,
        running(engine, None) as server,
    ):
        yield server
