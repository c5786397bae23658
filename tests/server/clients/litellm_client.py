"""litellm: its calls by OpenAI's and Anthropic's interface, and the errors that it maps."""

from __future__ import annotations

import json

import litellm
from trials import CITIES, LONG, MODEL, WEATHER, error_of, main

litellm.drop_params = True
litellm.suppress_debug_info = True
USER = [{"role": "user", "content": "Write a class."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def ways(url):
    yield {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    yield {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    yield {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none"}


def try_chat(url):
    for way in ways(url):
        made = litellm.completion(messages=USER, max_tokens=12, **way)
        assert made.choices[0].message.content
        assert made.usage.completion_tokens
        parts = litellm.completion(messages=USER, max_tokens=12, stream=True, **way)
        assert "".join(part.choices[0].delta.content or "" for part in parts)


def try_tools(url):
    for way in ways(url):
        made = litellm.completion(
            messages=USER,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            temperature=0,
            **way,
        )
        (call, *_) = made.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES


def try_structured_output(url):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": WEATHER}}
    for way in ways(url):
        made = litellm.completion(messages=USER, response_format=form, max_tokens=80, **way)
        assert json.loads(made.choices[0].message.content)["city"] in CITIES


def try_responses(url):
    way = next(ways(url))
    made = litellm.responses(input="Write a class.", max_output_tokens=12, **way)
    assert made.output[0].content[0].text
    events = litellm.responses(input="Write.", max_output_tokens=12, stream=True, **way)
    assert "response.output_text.delta" in [str(event.type.value) for event in events]


def try_text_completions(url):
    way = {**next(ways(url)), "model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt="import os", max_tokens=4, **way).choices[0].text


def try_errors(url):
    long = [{"role": "user", "content": LONG}]
    for way in ways(url):
        error_of(
            litellm.ContextWindowExceededError,
            litellm.completion,
            messages=long,
            max_tokens=4,
            num_retries=0,
            **way,
        )


if __name__ == "__main__":
    main(globals())
