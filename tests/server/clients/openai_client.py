"""openai: chat, completions, responses, and the errors its users catch."""

from __future__ import annotations

import json

import openai
from trials import CITIES, LONG, MODEL, WEATHER, error_of, main

USER = [{"role": "user", "content": "Write a class that keeps names."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}


def connect(url, kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def try_models(url):
    client = connect(url)
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def try_chat(url):
    client = connect(url)
    whole = client.chat.completions.create(
        model=MODEL, messages=USER, max_completion_tokens=12, seed=1, reasoning_effort="low"
    )
    parts = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_completion_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    text, usage = "", None
    for part in parts:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


def try_structured_output(url):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}
    answer = connect(url).chat.completions.create(
        model=MODEL, messages=USER, response_format=form, max_tokens=60
    )
    assert json.loads(answer.choices[0].message.content)["city"] in CITIES


def try_tools(url):
    client = connect(url)
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, tools=[TOOL], tool_choice="required", max_tokens=80
    )
    calls = answer.choices[0].message.tool_calls
    assert all(json.loads(call.function.arguments)["city"] in CITIES for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    turn = [answer.choices[0].message, *results]
    client.chat.completions.create(
        model=MODEL, messages=[*USER, *turn], tools=[TOOL], tool_choice="none", max_tokens=4
    )


def try_log_probabilities(url):
    client = connect(url)
    chat = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2, max_tokens=8
    )
    tokens = chat.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == chat.choices[0].message.content
    text = client.completions.create(
        model=MODEL, prompt="import os\n", logprobs=2, echo=True, max_tokens=4
    )
    found = text.choices[0].logprobs
    assert "".join(found.tokens) == text.choices[0].text
    assert all(
        text.choices[0].text[start:].startswith(token)
        for start, token in zip(found.text_offset, found.tokens, strict=True)
    )


def try_completions_of_several_prompts_as_a_stream(url):
    texts = {0: "", 1: ""}
    stream = connect(url).completions.create(
        model=MODEL, prompt=["import os", "import re"], echo=True, max_tokens=4, stream=True
    )
    for part in stream:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts[0].startswith("import os")
    assert texts[1].startswith("import re")


def try_responses(url):
    client = connect(url)
    first = client.responses.create(
        model=MODEL,
        input=[{"role": "developer", "content": "Be brief."}, *USER],
        max_output_tokens=12,
        truncation="auto",
        service_tier="flex",
    )
    second = client.responses.create(
        model=MODEL, input="Sort them.", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id).data
    assert {item.role for item in items} == {"developer", "user"}
    counted = client.responses.input_tokens.count(model=MODEL, input="Sort them.")
    assert counted.input_tokens > 0
    client.responses.delete(first.id)


def try_responses_as_a_stream(url):
    client = connect(url)
    stream = client.responses.create(
        model=MODEL, input="Sort.", max_output_tokens=8, stream=True, top_logprobs=2
    )
    events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    made = events[-1].response
    assert events[-1].type in ("response.incomplete", "response.completed")
    assert text == made.output_text
    again = list(client.responses.retrieve(made.id, stream=True))
    assert again[-1].response.output_text == made.output_text


def try_tools_of_responses(url):
    client = connect(url)
    made = client.responses.create(
        model=MODEL,
        input="Weather?",
        tools=[RESPONSE_TOOL],
        tool_choice="required",
        max_output_tokens=80,
    )
    calls = [item for item in made.output if item.type == "function_call"]
    assert all(json.loads(call.arguments)["city"] in CITIES for call in calls)
    client.responses.create(
        model=MODEL,
        previous_response_id=made.id,
        input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in calls
        ],
        max_output_tokens=4,
    )


async def try_the_async_client(url):
    client = connect(url, openai.AsyncOpenAI)
    answer = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4)
    assert answer.choices[0].message.content


def try_errors(url):
    client = connect(url)
    long = [{"role": "user", "content": LONG}]
    error = error_of(
        openai.BadRequestError, client.chat.completions.create, model=MODEL, messages=long
    )
    assert error.code == "context_length_exceeded"
    error = error_of(
        openai.NotFoundError, client.chat.completions.create, model="none", messages=USER
    )
    assert error.code == "model_not_found"
    error = error_of(
        openai.BadRequestError,
        client.responses.create,
        model=MODEL,
        input="Hi",
        previous_response_id="resp_none",
    )
    assert error.code == "previous_response_not_found"


if __name__ == "__main__":
    main(globals())
