"""Calls of tools over HTTP, in formats whose marks are text and in those of control tokens."""

from __future__ import annotations

import json

import pytest

from call_templates import TEMPLATES
from kvpager._runtime.text.tool_calls import FORMATS
from server.running import CODER, coder, said, started

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "exact": {"type": "boolean"}},
    "required": ["city", "exact"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
# With marks that are special tokens, as the models' own are; the others are text.
SPECIAL = ("mistral_args", "kimi_k2", "harmony", "llama3")
# What these templates write before an answer.
HEADERS = {
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3_coder": "<|im_start|>assistant\n",
    "glm": "<|assistant|>\n",
}


@pytest.fixture(scope="module", params=[*SPECIAL, "qwen3_coder", "glm", "deepseek_v31"])
def calling(request, tmp_path_factory):
    """A server of a model whose chat template has this format."""
    model, tokenizer = coder()
    header = f"{{{{ {json.dumps(HEADERS.get(request.param, ''))} if add_generation_prompt }}}}"
    template = TEMPLATES[request.param].rstrip("\n") + header
    for end in ("</s>", "<|eot_id|>", "<｜end▁of▁sentence｜>"):  # noqa: RUF001
        template = template.replace(end, "<|im_end|>")  # which this model ends an answer with
    tokenizer.chat_template = template
    if request.param in SPECIAL:
        marks = list(FORMATS[request.param].marks)
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        model.resize_token_embeddings(len(tokenizer))
    with started((model, tokenizer), tmp_path_factory.mktemp(request.param)) as server:
        server.form = request.param
        yield server


def forced(server, **options):
    return server.chat("Weather?", tools=[WEATHER], tool_choice=NAMED, max_tokens=120, **options)


def test_a_forced_call_comes_back_as_a_call_and_no_text_with_it(calling):
    assert calling.service.tool_call_format.name == calling.form
    choice = forced(calling).choices[0]
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Oslo", "Rome")
    assert arguments["exact"] in (True, False)
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_a_stream_has_the_same_call_and_no_text(calling):
    (whole,) = forced(calling).choices[0].message.tool_calls
    name = arguments = content = ""
    for chunk in forced(calling, stream=True):
        content += chunk.choices[0].delta.content or ""
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert content.strip() == ""


def test_the_other_apis_have_it_too(calling):
    made = calling.openai.responses.create(
        model=CODER,
        input="Weather?",
        tools=[{"type": "function", **WEATHER["function"]}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=120,
    )
    (item,) = made.output
    assert (item.type, item.name) == ("function_call", "weather")
    body = {
        "max_tokens": 120,
        "messages": said("Weather?"),
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    answer = calling.http.post("/v1/messages", json=body).json()
    (block,) = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    assert block["input"]["city"] in ("Oslo", "Rome")


def test_the_turn_behind_a_call_shows_the_template_the_call(calling, monkeypatch):
    """Also behind previous_response_id, where the client sends the call's output alone."""
    texts = []
    render = type(calling.service.tokenizer).render

    def noted(self, *arguments):
        texts.append(render(self, *arguments))
        return texts[-1]

    monkeypatch.setattr(type(calling.service.tokenizer), "render", noted)
    tools = [{"type": "function", **WEATHER["function"]}]
    options = {"model": CODER, "tools": tools, "temperature": 0}
    first = calling.openai.responses.create(
        input="Weather?",
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=120,
        **options,
    )
    (item,) = first.output
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
    calling.openai.responses.create(
        input=[output], previous_response_id=first.id, max_output_tokens=2, **options
    )
    parser = FORMATS[calling.form].parser([WEATHER["function"]])
    prompt = texts[-1].partition("Weather?")[2].translate({0xFDD0: None, 0xFDD1: None})
    if calling.form == "llama3":  # whose calls are whole answers
        prompt = prompt[prompt.index('{"name"') :].partition("<|im_end|>")[0]
    if calling.form == "mistral_args":
        prompt = prompt[prompt.index("[TOOL_CALLS]") :].partition("<|im_end|>")[0]
    calls = [one for one in parser.push(prompt) + parser.end() if hasattr(one, "arguments")]
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [
        ("weather", json.loads(item.arguments))
    ]
    assert "rain" in texts[-1]


def test_a_message_of_the_client_is_the_same_prompt_as_the_servers_own(calling):
    """What the chat API gets back goes on from what was computed, as far as texts are equal."""
    first = forced(calling)
    message = first.choices[0].message
    messages = [
        *said("Weather?"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id},
    ]
    second = calling.openai.chat.completions.create(
        model=CODER, messages=messages, tools=[WEATHER], max_tokens=2, temperature=0
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1
    if calling.form in ("mistral_args", "llama3", "deepseek_v31"):  # written as the template does
        assert cached >= first.usage.total_tokens - 2
