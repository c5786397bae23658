"""openai-agents: agents by OpenAI's two APIs, tools, typed output, streams and handoffs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from trials import CITIES, MODEL, main

set_tracing_disabled(True)
# A Responses stream that `max_tokens` cuts off is an error of this client: answers that end.
SETTINGS = ModelSettings(max_tokens=2000, extra_body={"seed": 1})
CALLING = replace(SETTINGS, tool_choice="required", parallel_tool_calls=False)


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def models(url):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    yield OpenAIChatCompletionsModel(MODEL, client)
    yield OpenAIResponsesModel(MODEL, client)


async def try_text_and_streams(url):
    for model in models(url):
        agent = Agent("writer", "Be brief.", model=model, model_settings=SETTINGS)
        assert (await Runner.run(agent, "Write a class.")).final_output
        streamed = Runner.run_streamed(agent, "Write a class.")
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output


async def try_a_tool(url):
    for model in models(url):
        agent = Agent("forecaster", model=model, model_settings=CALLING, tools=[weather])
        done = await Runner.run(agent, "Weather?")
        assert any("rain in" in str(item.raw_item) for item in done.new_items)


async def try_typed_output(url):
    for model in models(url):
        agent = Agent("finder", model=model, model_settings=SETTINGS, output_type=Place)
        assert (await Runner.run(agent, "Where?")).final_output.city in CITIES


async def try_a_handoff(url):
    for model in models(url):
        other = Agent("writer", model=model, model_settings=SETTINGS)
        agent = Agent("first", model=model, model_settings=CALLING, handoffs=[other])
        assert (await Runner.run(agent, "Write.")).last_agent.name == "writer"


if __name__ == "__main__":
    main(globals())
