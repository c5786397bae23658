"""Servers of one store: each goes on with the conversations of the others."""

from __future__ import annotations

import errno
import itertools

import openai
import pytest

from kvpager.errors import InvalidArgumentError
from kvpager.server.settings import ServerSettings
from server.running import CODER, GREEDY, coder_engine, running

# FastAPI ignores it itself, but not for sure while another thread has filters of its own.
pytestmark = pytest.mark.filterwarnings("ignore:The 'alias' attribute")
QUESTIONS = ("Write a class that keeps a list of names.", "Add a method.", "Why?")


@pytest.fixture
def pair(coder, tmp_path):
    """Two servers, each with an engine of its own."""
    with (
        coder_engine(*coder) as one,
        coder_engine(*coder) as other,
        running(one, tmp_path, shared_store=True) as first,
        running(other, tmp_path, shared_store=True) as second,
    ):
        yield first, second


def converse(servers, **options):
    """A chat whose turns are each at the next server: its texts, and the usage of its turns."""
    told, usages = [], []
    for number, question in enumerate(QUESTIONS):
        server = servers[number % len(servers)]
        made = server.chat(*told, question, max_tokens=20, **options)
        told += [question, made.choices[0].message.content]
        usages.append(made.usage)
    return told, usages


@pytest.mark.parametrize("options", [{}, {"extra_body": {"session_id": "ada"}}])
def test_a_chat_goes_on_at_another_server_behind_all_of_its_tokens(pair, options):
    told, usages = converse(pair, **options)
    for before, after in itertools.pairwise(usages):
        assert after.prompt_tokens_details.cached_tokens == before.total_tokens - 1
    # And it is the chat that one server alone has.
    assert converse(pair[:1], extra_body={"cache_salt": "alone"})[0] == told


def test_a_response_is_continued_by_any_server(pair):
    previous, before = None, None
    for number, question in enumerate(QUESTIONS):
        made = pair[number % 2].openai.responses.create(
            model=CODER,
            input=question,
            previous_response_id=previous,
            max_output_tokens=20,
            **GREEDY,
        )
        if before is not None:
            cached = made.usage.input_tokens_details.cached_tokens
            assert cached == before.usage.total_tokens - 1
        previous, before = made.id, made


def test_what_one_server_deletes_is_gone_from_the_memory_of_all(pair):
    first, second = pair
    made = first.openai.responses.create(
        model=CODER, input=QUESTIONS[0], max_output_tokens=8, **GREEDY
    )
    first.chat("Hi", extra_body={"session_id": "ada"})
    assert second.openai.responses.retrieve(made.id).output_text == made.output_text
    second.openai.responses.delete(made.id)
    assert second.http.delete("/v1/sessions/ada").status_code == 200
    with pytest.raises(openai.NotFoundError):
        first.openai.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        first.openai.responses.create(model=CODER, input="Why?", previous_response_id=made.id)
    assert first.chat("Hi", extra_body={"session_id": "ada"}).choices[0].message.content


def test_a_conversation_without_a_name_that_cannot_be_saved_is_answered(pair, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvpager.stores.DirectoryStore.save", full)
    assert pair[0].chat("Hi").choices[0].message.content
    assert "a conversation without a name cannot be saved" in caplog.text


def test_a_shared_store_is_a_folder():
    with pytest.raises(InvalidArgumentError, match="shared_store is True, and store is 'off'"):
        ServerSettings(store="off", shared_store=True)
