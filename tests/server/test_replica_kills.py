"""SIGKILL of the replica that streams: another process goes on with the same text, bits and events.

Each case is killed behind another number of events.
"""

from __future__ import annotations

import json
import re
import time

import httpx
import pytest

from server.running import ServerProcess
from server.test_takeover import FEATURES, body_of, events_of, id_of, read_on

MOST_SILENCE = 5.0  # seconds: it did not wait until the lease of the killed one, 10 s, ran out
_NAME = re.compile(r"\b(resp|msg|fc|call)_[0-9a-f]{32}")
_FREE = re.compile(r'"(completed_at|created_at|cached_tokens|cache_write_tokens)":\d+')


def comparable(events):
    """Events with ids by their order, and without times and what was cached."""
    names: dict[str, str] = {}

    def renamed(match):
        return names.setdefault(match[0], f"{match[1]}_{len(names)}")

    return [_FREE.sub(r'"\1":0', _NAME.sub(renamed, event)) for event in events]


def begin_and_kill(process, count, **body):
    """The first events of a stream whose server is killed behind `count` of them, or later."""
    events = []
    try:
        with process.client.http.stream("POST", "/v1/responses", json=body) as stream:
            for line in stream.iter_lines():
                events += events_of([line])
                if len(events) == count:
                    process.process.kill()
    except httpx.TransportError:
        pass
    process.process.wait(30)
    return events


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    """A replica that lives, and the folder that it shares with those that do not."""
    folder = tmp_path_factory.mktemp("shared")
    with ServerProcess(folder, "--tool-calls", "hermes") as process:
        yield process, folder


@pytest.mark.parametrize(("feature", "count"), [*zip(FEATURES, (3, 9, 17, 4, 30))])
def test_a_stream_goes_on_at_another_replica_when_its_own_is_killed(survivor, feature, count):
    other, folder = survivor
    body = body_of(feature, max_output_tokens=120)
    with ServerProcess(folder, "--tool-calls", "hermes") as process:
        got = begin_and_kill(process, count, **body)
    asked = time.perf_counter()
    name, rest, arrived = id_of(got), [], []
    params = {"stream": "true", "starting_after": len(got) - 1}
    with other.client.http.stream("GET", f"/v1/responses/{name}", params=params) as stream:
        for line in stream.iter_lines():
            rest += events_of([line])
            arrived.append(time.perf_counter())
    with other.client.http.stream("POST", "/v1/responses", json=body) as stream:
        whole = events_of(stream.iter_lines())
    assert comparable(got + rest) == comparable(whole)
    assert comparable(read_on(other.client, name)) == comparable(whole)
    assert rest
    assert arrived[0] - asked < MOST_SILENCE


def test_a_conversation_goes_on_from_replica_to_replica_each_killed_within_its_turn(survivor):
    other, folder = survivor
    previous, texts, before = None, [], None
    for turn in range(2):
        body = body_of("sampling", max_output_tokens=60, previous_response_id=previous)
        body = {key: value for key, value in body.items() if value is not None}
        with ServerProcess(folder, "--tool-calls", "hermes") as process:
            got = begin_and_kill(process, 12 + 6 * turn, **body)
        previous = id_of(got)
        last = json.loads((got + read_on(other.client, previous, len(got) - 1))[-1])["response"]
        texts.append(last["output"][0]["content"][0])
    for expected in texts:
        body = body_of("sampling", max_output_tokens=60)
        body |= {} if before is None else {"previous_response_id": before}
        with other.client.http.stream("POST", "/v1/responses", json=body) as stream:
            last = json.loads(events_of(stream.iter_lines())[-1])["response"]
        before = last["id"]
        assert last["output"][0]["content"][0] == expected
