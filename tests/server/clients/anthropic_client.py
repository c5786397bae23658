"""anthropic: messages, tools, counting, and the errors its users catch."""

from __future__ import annotations

import anthropic
from trials import CITIES, LONG, MODEL, WEATHER, error_of, main

USER = [{"role": "user", "content": "Write a class that keeps names."}]
GREEDY = {"temperature": 0}  # a field of the API that this client no longer names
TOOL = {"name": "weather", "input_schema": WEATHER}


def connect(url, kind=anthropic.Anthropic):
    return kind(base_url=url, api_key="none", max_retries=0, timeout=120)


def try_messages(url):
    client = connect(url)
    options = {"model": MODEL, "max_tokens": 12, "system": "Be brief.", "messages": USER}
    whole = client.messages.create(**options, extra_body=GREEDY)
    with client.messages.stream(**options, extra_body=GREEDY) as stream:
        begun = next(e for e in stream if e.type == "message_start").message.usage
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert begun.input_tokens + begun.cache_read_input_tokens > 0
    assert final.usage.output_tokens == whole.usage.output_tokens


def try_counting(url):
    assert connect(url).messages.count_tokens(model=MODEL, messages=USER).input_tokens > 0


def try_tools(url):
    client = connect(url)
    made = client.messages.create(
        model=MODEL,
        max_tokens=80,
        messages=USER,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert made.stop_reason == "tool_use"
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    client.messages.create(model=MODEL, max_tokens=4, messages=[*USER, *turns], tools=[TOOL])


def try_an_answer_that_is_begun(url):
    begun = [*USER, {"role": "assistant", "content": "class Names:"}]
    answer = connect(url).messages.create(
        model=MODEL, max_tokens=8, messages=begun, extra_body=GREEDY
    )
    assert not answer.content[0].text.startswith("class Names")


def try_structured_output(url):
    answer = connect(url).messages.create(
        model=MODEL,
        max_tokens=60,
        messages=USER,
        output_config={"format": {"type": "json_schema", "schema": WEATHER}},
    )
    assert any(city in answer.content[0].text for city in CITIES)


def try_thinking_and_its_history(url):
    turns = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Names are words.", "signature": "s"},
            {"type": "text", "text": "class Names: pass"},
        ]},
        {"role": "user", "content": "Sort them."},
    ]  # fmt: skip
    answer = connect(url).messages.create(
        model=MODEL, max_tokens=4, messages=[*USER, *turns], thinking={"type": "disabled"}
    )
    assert answer.stop_reason in ("max_tokens", "end_turn")


async def try_the_async_client(url):
    answer = await connect(url, anthropic.AsyncAnthropic).messages.create(
        model=MODEL, max_tokens=4, messages=USER
    )
    assert answer.content


def try_errors(url):
    client = connect(url)
    long = [{"role": "user", "content": LONG}]
    error = error_of(
        anthropic.BadRequestError,
        client.messages.create,
        model=MODEL,
        max_tokens=4,
        messages=long,
    )
    assert error.body["error"]["message"].startswith("prompt is too long: ")
    error_of(
        anthropic.NotFoundError, client.messages.create, model="none", max_tokens=4, messages=USER
    )


if __name__ == "__main__":
    main(globals())
