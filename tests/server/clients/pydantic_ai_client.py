"""pydantic-ai: agents by OpenAI's two APIs and Anthropic's, tools, and typed output."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from trials import CITIES, MODEL, main


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]


def models(url):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    yield OpenAIChatModel(MODEL, provider=provider)
    yield OpenAIResponsesModel(MODEL, provider=provider)
    yield AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none"))


def outputs(model):
    yield ToolOutput(Place)
    if not isinstance(model, AnthropicModel):  # it looks the model up by its name
        yield NativeOutput(Place)


async def try_text_and_streams(url):
    for model in models(url):
        agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 12})
        assert (await agent.run("Write a class.")).output
        async with agent.run_stream("Write a class.") as answer:
            assert await answer.get_output()


async def try_a_conversation(url):
    for model in models(url):
        agent = Agent(model, model_settings={"max_tokens": 12})
        first = await agent.run("Write a class.")
        assert (await agent.run("Sort them.", message_history=first.all_messages())).output


async def try_typed_output(url):
    for model in models(url):
        for output in outputs(model):
            agent = Agent(model, output_type=output, model_settings={"max_tokens": 80})
            assert (await agent.run("Where?")).output.city in CITIES


async def try_a_tool_beside_text(url):
    for model in models(url):
        agent = Agent(model, model_settings={"max_tokens": 12})

        @agent.tool_plain
        def weather(city: str) -> str:
            """The weather in a city."""
            return f"rain in {city}"

        assert (await agent.run("Weather in Oslo?")).output


if __name__ == "__main__":
    main(globals())
