"""Responses that are read again: their events, the items of their input, and counts of tokens."""

from __future__ import annotations

import asyncio

import openai
import pytest

from kvpager.server.background import EventLog
from server.running import CODER, GREEDY


def create(server, text="Write a class.", **options):
    given = {"model": CODER, "max_output_tokens": 12, **GREEDY, **options}
    return server.openai.responses.create(input=text, **given)


def told(events):
    """The text of a stream's pieces, and its last event."""
    events = list(events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type.endswith("text.delta")]
    return "".join(pieces), events[-1]


@pytest.mark.parametrize("background", [False, True])
def test_a_response_is_retrieved_as_a_stream(server, background):
    made = create(server, background=background)
    text, last = told(server.openai.responses.retrieve(made.id, stream=True))
    again, end = told(server.openai.responses.retrieve(made.id, stream=True))
    found = server.openai.responses.retrieve(made.id)
    assert text == again == found.output_text
    assert last.type == end.type == "response.incomplete"
    assert last.response.id == made.id
    assert end.response.usage == found.usage


def test_a_response_in_the_background_streams_from_its_start(server):
    events = create(server, background=True, stream=True)
    first = next(iter(events))
    assert first.response.background
    text, last = told([first, *events])
    assert text == last.response.output_text == create(server).output_text
    assert server.openai.responses.retrieve(first.response.id).output_text == text


def test_a_stream_goes_on_behind_the_event_that_was_last_seen(server):
    made = create(server)
    whole = list(server.openai.responses.retrieve(made.id, stream=True))
    rest = list(server.openai.responses.retrieve(made.id, stream=True, starting_after=3))
    assert rest == whole[4:]
    assert not list(server.openai.responses.retrieve(made.id, stream=True, starting_after=500))


def test_one_that_was_cancelled_ends_its_streams(server):
    made = create(server, background=True, max_output_tokens=4000, extra_body={"seed": 1})
    events = server.openai.responses.retrieve(made.id, stream=True)
    first = next(iter(events))
    server.openai.responses.cancel(made.id)
    *_, last = [first, *events]
    assert last.response.status == "cancelled"
    *_, later = server.openai.responses.retrieve(made.id, stream=True)
    assert later.response.status == "cancelled"


def test_the_items_of_an_input_are_listed_in_pages(server):
    given = [{"role": "user", "content": f"Number {i}."} for i in range(5)]
    made = create(server, given)
    newest = server.openai.responses.input_items.list(made.id, limit=2)
    texts = [item.content[0].text for item in newest]  # all pages
    assert texts == [f"Number {i}." for i in reversed(range(5))]
    assert (len(newest.data), newest.has_more) == (2, True)
    oldest = server.openai.responses.input_items.list(made.id, order="asc")
    assert [item.content[0].text for item in oldest] == texts[::-1]
    assert {item.type for item in oldest} == {"message"}
    after = server.http.get(f"/v1/responses/{made.id}/input_items", params={"after": "none"})
    assert after.status_code == 404
    assert server.http.get("/v1/responses/none/input_items").status_code == 404


def test_input_tokens_are_those_of_the_response(server):
    count = server.openai.responses.input_tokens.count
    made = create(server, instructions="Be terse.")
    assert count(input="Write a class.", instructions="Be terse.").input_tokens == (
        made.usage.input_tokens
    )
    second = create(server, "Why?", previous_response_id=made.id)
    counted = count(input="Why?", previous_response_id=made.id)
    assert counted.input_tokens == second.usage.input_tokens
    assert counted.object == "response.input_tokens"
    with pytest.raises(openai.BadRequestError) as raised:
        count(input="Why?", previous_response_id="resp_none")
    assert raised.value.code == "previous_response_not_found"


def test_events_are_read_from_any_one_on_while_they_come():
    async def read():
        replay = EventLog()
        replay.add(("a", {}))
        readers = [asyncio.ensure_future(_numbers(replay, after)) for after in (-1, 0, 1)]
        await asyncio.sleep(0)
        replay.add(("b", {}))
        await asyncio.sleep(0)
        replay.add(("c", {}), last=True)
        late = await _numbers(replay, 1)
        return [await reader for reader in readers], late

    readers, late = asyncio.run(read())
    assert readers == [[0, 1, 2], [1, 2], [2]]
    assert late == [2]


async def _numbers(replay, after):
    return [number async for number, _ in replay.events(after)]
