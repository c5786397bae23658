"""LangChain: ChatOpenAI by OpenAI's two APIs, ChatAnthropic, tools and structured output."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from trials import CITIES, MODEL, WEATHER, main


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


SCHEMA = {"title": "place", "description": "A place.", **WEATHER}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


def models(url):
    options = {"model": MODEL, "max_retries": 0, "max_tokens": 60, "temperature": 0}
    yield ChatOpenAI(base_url=f"{url}/v1", api_key="none", **options)
    yield ChatOpenAI(base_url=f"{url}/v1", api_key="none", use_responses_api=True, **options)
    yield ChatAnthropic(base_url=url, api_key="none", **options)


def try_invoking_streaming_and_batches(url):
    prompt = [SystemMessage("Be brief."), HumanMessage("Write a class.")]
    for model in models(url):
        assert model.invoke(prompt).text
        assert "".join(part.text for part in model.stream(prompt))
        assert len(model.batch([prompt, prompt])) == 2


def try_tools_and_their_results(url):
    for model in models(url):
        asked = model.bind_tools([FUNCTION], tool_choice="any").invoke("Weather?")
        assert asked.tool_calls[0]["args"]["city"] in CITIES  # the last may be cut off
        results = [ToolMessage("rain", tool_call_id=call["id"]) for call in asked.tool_calls]
        turns = [HumanMessage("Weather?"), asked, *results]
        assert isinstance(model.bind_tools([FUNCTION]).invoke(turns), AIMessage)


def try_structured_output(url):
    for model in models(url):
        found = model.with_structured_output(SCHEMA, method="json_schema").invoke("Where?")
        assert found["city"] in CITIES


def try_an_agent(url):
    for model in models(url):
        agent = create_agent(model, tools=[weather], system_prompt="Be brief.")
        answer = agent.invoke({"messages": [HumanMessage("Weather in Oslo?")]})
        assert answer["messages"][-1].type == "ai"


def try_plain_completions(url):
    model = OpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=8)
    assert model.invoke("import os")
    assert "".join(model.stream("import os"))


if __name__ == "__main__":
    main(globals())
