"""SIGKILL at random moments: what was reported is there, and goes on with the same bits."""

from __future__ import annotations

import contextlib
import random
import threading

import openai
import pytest

from server.running import CODER, GREEDY, ServerProcess, running

KILLS = 100
TURNS = 10  # of a conversation; then another one begins
LONGEST_LIFE = 1.5  # seconds that a server is let run


def question(conversation, turn):
    return f"Conversation {conversation}, question {turn}: write a function."


def ask(client, conversation, turn, previous):
    """A turn, streamed: its response, once the last event has come; None if it does not."""
    with client.openai.responses.create(
        model=CODER,
        input=question(conversation, turn),
        previous_response_id=previous,
        max_output_tokens=12,
        stream=True,
        **GREEDY,
    ) as stream:
        ends = (event.response for event in stream if event.type == "response.incomplete")
        return next(ends, None)


def told(response):
    usage = response.usage
    return response.output_text, usage.input_tokens, usage.output_tokens


@pytest.mark.deep
def test_a_hundred_kills_lose_nothing_that_was_reported(engine, tmp_path):
    draw = random.Random(11)
    done: list[list] = [[]]  # responses by conversation, as they were reported
    for _ in range(KILLS):
        with ServerProcess(tmp_path / "store") as process:
            for conversation in done[-2:]:
                for response in conversation:
                    found = process.client.openai.responses.retrieve(response.id)
                    assert told(found) == told(response)
            killer = threading.Timer(draw.uniform(0, LONGEST_LIFE), process.process.kill)
            killer.start()
            with contextlib.suppress(openai.APIError):
                while True:
                    if len(done[-1]) == TURNS:
                        done.append([])
                    previous = done[-1][-1].id if done[-1] else None
                    number = len(done) - 1
                    response = ask(process.client, number, len(done[-1]), previous)
                    if response is None:
                        break
                    done[-1].append(response)
            killer.join()
            process.process.wait(30)
    assert sum(map(len, done)) > KILLS / 2
    with running(engine, tmp_path / "whole") as server:
        for number, conversation in enumerate(done):
            previous = None
            for turn, response in enumerate(conversation):
                expected = ask(server, number, turn, previous)
                assert told(expected) == told(response)
                previous = expected.id
