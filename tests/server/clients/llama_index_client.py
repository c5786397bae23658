"""LlamaIndex: OpenAILike's chat, completions, streams, tools and structured output."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from trials import CITIES, MODEL, main

PROMPT = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="Write a class.")]


class Place(BaseModel):
    """A place."""

    city: Literal["Oslo", "Rome"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def model(url, **options):
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=80,
        context_window=8192,
        is_function_calling_model=True,
        **options,
    )


def try_chat(url):
    chat = model(url, is_chat_model=True)
    assert chat.chat(PROMPT).message.content
    assert "".join(part.delta or "" for part in chat.stream_chat(PROMPT))


def try_plain_completions(url):
    assert model(url).complete("import os").text
    assert "".join(part.delta for part in model(url).stream_complete("import os"))


def try_tools(url):
    tool = FunctionTool.from_defaults(weather)
    chat = model(url, is_chat_model=True)
    asked = chat.chat_with_tools([tool], user_msg="Weather?", tool_required=True)
    calls = chat.get_tool_calls_from_response(asked)
    assert all(call.tool_kwargs["city"] in CITIES for call in calls)


def try_structured_output(url):
    chat = model(url, is_chat_model=True)
    assert chat.as_structured_llm(Place).chat(PROMPT).raw.city in CITIES


if __name__ == "__main__":
    main(globals())
