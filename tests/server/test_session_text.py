"""A request that names a session goes on with its text, or is refused: nothing is dropped."""

from __future__ import annotations

import pytest

from server.running import GREEDY, coder, said, started

FIRST, SECOND = "Write a class that keeps a list of names.", "Sort them."
OPTIONS = {"max_tokens": 8, **GREEDY}


@pytest.fixture(scope="module")
def pair():
    return coder()


@pytest.fixture
def server(pair, tmp_path):
    with started(pair, tmp_path) as client:
        yield client


def chat(server, messages, **fields):
    body = {"messages": messages, "session_id": "ada", **OPTIONS, **fields}
    return server.post("/v1/chat/completions", **body)


def answered(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def refused(response):
    """The error of a 409 that says how to mean it, and that no client tries again."""
    assert response.status_code == 409, response.text
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("conflict_error", "session_differs")
    assert "session_replace: true" in error["message"]
    return error


def tokens(server):
    return server.http.get("/v1/sessions/ada").json()["tokens"]


def test_one_new_user_message_follows_the_sessions_text(server):
    first = answered(chat(server, said(FIRST)))
    second = chat(server, said(SECOND)).json()
    whole = server.chat(FIRST, first, SECOND)
    assert second["choices"][0]["message"]["content"] == whole.choices[0].message.content
    assert second["usage"]["prompt_tokens"] == whole.usage.prompt_tokens
    held = server.http.get("/v1/sessions/ada").json()
    assert held["tokens"] > second["usage"]["prompt_tokens"]
    # A client that sends the whole conversation goes on with the same session.
    third = chat(server, said(FIRST, first, SECOND, answered_in(second), "Why?")).json()
    details = third["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= second["usage"]["total_tokens"] - 1


def answered_in(body):
    return body["choices"][0]["message"]["content"]


def test_several_choices_follow_the_session_too(server):
    first = answered(chat(server, said(FIRST)))
    options = {"n": 2, "temperature": 1.0, "seed": 3}
    found = chat(server, said(SECOND), **options).json()
    whole = server.chat(FIRST, first, SECOND, **options)
    assert [one["message"]["content"] for one in found["choices"]] == [
        one.message.content for one in whole.choices
    ]


def test_a_session_goes_on_after_a_restart_with_the_new_message_alone(pair, tmp_path):
    with started(pair, tmp_path) as client:
        first = answered(chat(client, said(FIRST)))
    with started(pair, tmp_path) as client:
        found = answered(chat(client, said(SECOND)))
        assert found == client.chat(FIRST, first, SECOND).choices[0].message.content


def test_the_last_answer_can_be_asked_for_again(server):
    first = answered(chat(server, said(FIRST)))
    assert answered(chat(server, said(FIRST))) == first
    second = said(FIRST, first, SECOND)
    assert answered(chat(server, second)) == answered(chat(server, second))


def test_an_answer_may_have_the_clients_own_form(server):
    answered(chat(server, said(FIRST)))
    answered(chat(server, said(FIRST, "what a client made of it", SECOND)))


def test_messages_that_are_not_the_sessions_are_refused_and_change_nothing(server):
    first = answered(chat(server, said(FIRST)))
    second = answered(chat(server, said(FIRST, first, SECOND)))
    held = tokens(server)
    other = said("Something else.", first, SECOND)
    message = refused(chat(server, other))["message"]
    assert "messages[0] (user) differs from that of its 4 messages" in message
    assert refused(chat(server, other))["param"] == "messages"
    system = [{"role": "system", "content": "Be brief."}, *said(SECOND)]
    assert "messages[0] (system) differs" in refused(chat(server, system))["message"]
    two = [*said(FIRST), *said(SECOND)]
    assert "messages[1] (user) differs" in refused(chat(server, two))["message"]
    assert tokens(server) == held
    answered(chat(server, said(FIRST, first, SECOND, second, "Why?")))


def test_a_beginning_of_the_session_is_refused(server):
    first = answered(chat(server, said(FIRST)))
    second = answered(chat(server, said(FIRST, first, SECOND)))
    answered(chat(server, said(FIRST, first, SECOND, second, "Why?")))
    shorter = chat(server, said(FIRST, first, SECOND))
    assert "messages are the first 3 of its 6" in refused(shorter)["message"]


def test_a_replacement_is_made_where_it_is_meant(server):
    answered(chat(server, said(FIRST)))
    other = said("Something else.", "An answer.", SECOND)
    found = answered(chat(server, other, session_replace=True))
    expected = server.chat("Something else.", "An answer.", SECOND)
    assert found == expected.choices[0].message.content
    answered(chat(server, said("Something else.", "An answer.", SECOND, found, "Why?")))


def test_streams_responses_and_anthropics_messages_are_refused_alike(server):
    first = answered(chat(server, said(FIRST)))
    other = said("Something else.", first, SECOND)
    refused(chat(server, other, stream=True))
    body = {"session_id": "ada", **GREEDY}
    refused(server.post("/v1/responses", input=other, max_output_tokens=8, **body))
    response = server.post("/v1/messages", messages=other, max_tokens=8, **body)
    assert response.status_code == 409
    assert "session_replace: true" in response.json()["error"]["message"]
    done = server.post("/v1/responses", input=SECOND, max_output_tokens=8, **body).json()
    assert done["usage"]["input_tokens_details"]["cached_tokens"] > 0
    messages = [*said("And?")]
    done = server.post("/v1/messages", messages=messages, max_tokens=8, **body).json()
    assert done["usage"]["cache_read_input_tokens"] > 0


def test_a_count_of_tokens_has_those_of_the_session(server):
    first = answered(chat(server, said(FIRST)))
    body = {"input": SECOND, "session_id": "ada"}
    count = server.post("/v1/responses/input_tokens", **body).json()["input_tokens"]
    whole = {"input": said(FIRST, first, SECOND)}
    assert count == server.post("/v1/responses/input_tokens", **whole).json()["input_tokens"]


def test_a_completions_prompt_goes_on_with_the_session_or_is_refused(server):
    def complete(prompt, **fields):
        body = {"prompt": prompt, "session_id": "ada", **OPTIONS, **fields}
        return server.post("/v1/completions", **body)

    first = complete("import os").json()["choices"][0]["text"]
    assert complete("import os").json()["choices"][0]["text"] == first  # again
    assert complete(f"import os{first}\nimport sys").status_code == 200
    assert (
        "prompt differs from its text at character 7" in refused(complete("import re"))["message"]
    )
    assert "are no conversation of messages" in refused(chat(server, said(FIRST)))["message"]
    assert complete("import re", session_replace=True).status_code == 200


def test_a_conversation_that_was_cut_off_by_a_stop_goes_on(pair, tmp_path):
    """The server's end saves what was generated; the client may know less of it."""
    with started(pair, tmp_path, drain_seconds=0.1) as client:
        body = {"messages": said(FIRST), "session_id": "ada", "stream": True, "max_tokens": 600}
        body |= {"ignore_eos": True, **GREEDY}
        with client.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            client.server.stop()
    with started(pair, tmp_path) as client:
        answered(chat(client, said(FIRST, "a part", SECOND)))
