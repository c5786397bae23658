"""Responses: kept as snapshots under their ids, gone on from, looked up, deleted and cancelled."""

from __future__ import annotations

import openai
import pytest

from server.running import CODER, GREEDY


@pytest.fixture
def responses(server):
    def create(text, **options):
        return server.openai.responses.create(
            model=CODER, input=text, **{**GREEDY, "max_output_tokens": 12, **options}
        )

    return create


def test_a_response_can_be_retrieved_and_deleted(server, responses):
    made = responses("Write a class.")
    found = server.openai.responses.retrieve(made.id)
    assert found.output_text == made.output_text
    assert found.usage.total_tokens == made.usage.total_tokens
    server.openai.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as error:
        server.openai.responses.retrieve(made.id)
    assert error.value.code == "response_not_found"


def test_a_turn_goes_on_from_the_response_before_it(server, responses):
    first = responses("Write a class.")
    second = responses("And another one.", previous_response_id=first.id)
    whole = first.usage.total_tokens
    assert second.usage.input_tokens > whole
    assert second.usage.input_tokens_details.cached_tokens >= whole - 1
    assert second.previous_response_id == first.id


def test_two_turns_may_go_on_from_one_response(responses):
    first = responses("Write a class.")
    one = responses("Why?", previous_response_id=first.id)
    other = responses("Why?", previous_response_id=first.id)
    assert one.output_text == other.output_text
    assert one.usage.input_tokens == other.usage.input_tokens
    assert one.id != other.id


def test_an_unknown_response_is_404_and_to_go_on_from_it_is_400(server, responses):
    for ask in (server.openai.responses.retrieve, server.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask("resp_none")
    with pytest.raises(openai.BadRequestError) as raised:
        responses("Hi", previous_response_id="resp_none")
    assert raised.value.body == {
        "message": "Previous response with id 'resp_none' not found.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }


def test_what_is_not_stored_cannot_be_retrieved(server, responses):
    made = responses("Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(made.id)


def test_instructions_hold_for_one_turn(server, responses):
    first = responses("Hi", instructions="Be terse.")
    plain = responses("Hi")
    assert first.usage.input_tokens > plain.usage.input_tokens
    second = responses("Why?", previous_response_id=first.id)
    same = responses("Why?", previous_response_id=first.id, instructions="Be terse.")
    assert same.usage.input_tokens - second.usage.input_tokens == (
        first.usage.input_tokens - plain.usage.input_tokens
    )


def test_events_come_in_their_order_and_tell_the_whole_answer(server):
    with server.openai.responses.create(
        model=CODER, input="Write a list.", max_output_tokens=6, stream=True, **GREEDY
    ) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert text == events[-1].response.output_text
    assert server.openai.responses.retrieve(events[-1].response.id).output_text == text


def test_a_response_in_the_background_is_found_when_it_is_done(server, responses):
    made = responses("Write a module.", background=True)
    assert made.status == "in_progress"
    for _ in range(400):
        found = server.openai.responses.retrieve(made.id)
        if found.status != "in_progress":
            break
    assert found.status == "incomplete"
    assert found.usage.output_tokens == 12


def test_a_response_in_the_background_can_be_cancelled(server, responses):
    made = responses("Write a module.", background=True, max_output_tokens=4000)
    assert server.openai.responses.cancel(made.id).status == "cancelled"
    assert server.openai.responses.retrieve(made.id).status == "cancelled"
    assert not server.service.scheduler.running


def test_a_response_in_the_background_can_be_deleted_while_it_runs_and_after(server, responses):
    for cancelled in (False, True):
        made = responses("Write a module.", background=True, max_output_tokens=4000)
        if cancelled:
            server.openai.responses.cancel(made.id)
        server.openai.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            server.openai.responses.retrieve(made.id)
