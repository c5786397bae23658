"""instructor: objects of a class by tools, JSON schemas and JSON."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from trials import CITIES, MODEL, main

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Where?"}], "temperature": 0}


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")  # this model would add fields without end
    city: Literal["Oslo", "Rome"]


def patched(url, mode):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def try_tools(url):
    made = patched(url, instructor.Mode.TOOLS).chat.completions.create(response_model=Place, **ASK)
    assert made.city in CITIES


def try_json_schemas(url):
    client = patched(url, instructor.Mode.JSON_SCHEMA)
    assert client.chat.completions.create(response_model=Place, **ASK).city in CITIES


def try_partial_objects_of_a_stream(url):
    client = patched(url, instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(response_model=Place, **ASK))
    assert parts[-1].city in CITIES


if __name__ == "__main__":
    main(globals())
