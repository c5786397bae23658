"""A stream that its replica's death does not end: another one goes on, with the same events."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kvpager.server.errors import ApiError
from kvpager.server.response_journal import ResponseJournal, part_of
from kvpager.server.turn import ServedTurn
from kvpager.stores.journals import DirectoryJournal, DirectoryJournals
from server.running import CODER, coder_engine, running

# FastAPI ignores it itself, but not for sure while another thread has filters of its own.
pytestmark = pytest.mark.filterwarnings("ignore:The 'alias' attribute")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "look_up", "parameters": SCHEMA}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FEATURES = {
    "sampling": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, **LOGPROBS},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
        **LOGPROBS,
    },
    "grammar": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "stop": {"temperature": 0.8, "stop": ["self.name", "print"], **LOGPROBS},
}


def body_of(feature, **more):
    given = {"model": CODER, "input": "Write a class that keeps a list of names.", "seed": 7}
    return {**given, "max_output_tokens": 48, "stream": True, **FEATURES[feature], **more}


def events_of(lines):
    """The data of server-sent events, each as the bytes that were sent."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def begin(server, **body):
    with server.http.stream("POST", "/v1/responses", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        return events_of(stream.iter_lines()), stream.headers


def read_on(server, response_id, after=-1):
    params = {"stream": "true", "starting_after": after}
    with server.http.stream("GET", f"/v1/responses/{response_id}", params=params) as stream:
        assert stream.status_code == 200, stream.read()
        return events_of(stream.iter_lines())


def id_of(events):
    return json.loads(events[0])["response"]["id"]


def timeless(events):
    """Events without the time at which the response was completed."""
    return [re.sub(r'"completed_at":\d+', '"completed_at":0', event) for event in events]


@contextlib.contextmanager
def replicas(engine, *stores, **settings):
    """Servers of one engine, one for each store."""
    with contextlib.ExitStack() as stack:
        settings = {"tool_calls": "hermes", **settings}
        yield [stack.enter_context(running(engine, store, **settings)) for store in stores]


@pytest.fixture
def kept_journals(monkeypatch, tmp_path):
    """Journals that were removed at the end of their responses, in a folder of copies."""
    folder = tmp_path / "copies"
    folder.mkdir()
    delete, leave = DirectoryJournal.delete, ResponseJournal.delete

    def copying(journal):
        shutil.copy(journal._path, folder)
        delete(journal)

    async def flushing(journal):
        await journal._flush()
        await leave(journal)

    monkeypatch.setattr(DirectoryJournal, "delete", copying)
    monkeypatch.setattr(ResponseJournal, "delete", flushing)
    return DirectoryJournals(str(folder), lambda: 0o600)


def parts_of(journals, response_id):
    """A journal's first part, and its tokens."""
    first, *batches = journals.read(response_id)[0]
    batches = [json.loads(batch) for batch in batches]
    return first, [token for batch in batches for token in batch["tokens"]], batches[0]["cached"]


def leave(server, response_id, first, tokens, cached):
    """Leaves a journal as a replica does that dies behind these tokens."""
    journals = server.service.conversations(server.service.tenants.all()[0]).store.journals
    journal = journals.create(response_id, first)
    if tokens:
        assert journal.append(part_of({"at": 0, "tokens": tokens, "cached": cached}))
    journal.close()


@pytest.mark.parametrize("feature", FEATURES)
def test_the_events_are_those_of_an_uninterrupted_run_wherever_it_was_cut_off(
    engine, tmp_path, kept_journals, feature
):
    with replicas(engine, tmp_path / "a", tmp_path / "b") as (first, second):
        whole, _ = begin(first, **body_of(feature))
        name = id_of(whole)
        request, tokens, cached = parts_of(kept_journals, name)
        assert len(tokens) > 8
        for count in (0, 1, 5, len(tokens) // 2, len(tokens) - 1, len(tokens)):
            leave(second, name, request, tokens[:count], cached)
            assert timeless(read_on(second, name)) == timeless(whole)
            assert timeless(read_on(second, name, 6)) == timeless(whole[7:])  # now it is kept
            second.openai.responses.delete(name)


def test_a_seed_that_was_drawn_goes_on_too(engine, tmp_path, kept_journals):
    body = body_of("sampling")
    del body["seed"]
    with replicas(engine, tmp_path / "a", tmp_path / "b") as (first, second):
        whole, _ = begin(first, **body)
        request, tokens, cached = parts_of(kept_journals, id_of(whole))
        leave(second, id_of(whole), request, tokens[:3], cached)
        assert timeless(read_on(second, id_of(whole))) == timeless(whole)


def test_a_response_that_nobody_computes_goes_on_once_however_many_ask(
    engine, tmp_path, kept_journals
):
    with replicas(engine, tmp_path / "a", tmp_path / "b", tmp_path / "b") as (first, *others):
        whole, _ = begin(first, **body_of("sampling"))
        name = id_of(whole)
        request, tokens, cached = parts_of(kept_journals, name)
        leave(others[0], name, request, tokens[:8], cached)
        with ThreadPoolExecutor(8) as threads:
            streams = list(threads.map(lambda i: read_on(others[i % 2], name), range(8)))
        assert [timeless(one) for one in streams] == [timeless(whole)] * 8
        ran = [server.service.scheduler.work[1] for server in others]
        assert min(ran) == 0


def test_a_replica_reads_along_while_another_computes_and_ends_it_there(engine, tmp_path):
    with replicas(engine, tmp_path, tmp_path) as (first, second):
        made = first.openai.responses.create(
            model=CODER,
            input="Write.",
            background=True,
            max_output_tokens=300,
            extra_body={"ignore_eos": True},
        )
        there = read_on(second, made.id)
        assert second.service.scheduler.work[1] == 0
        assert timeless(there) == timeless(read_on(first, made.id))
        assert second.openai.responses.retrieve(made.id).usage.output_tokens == 300
        for end in ("cancel", "delete"):
            made = first.openai.responses.create(
                model=CODER,
                input="Write.",
                background=True,
                max_output_tokens=4000,
                extra_body={"ignore_eos": True},
            )
            assert second.openai.responses.retrieve(made.id).status == "in_progress"
            getattr(second.openai.responses, end)(made.id)
            while first.service.scheduler.running:
                time.sleep(0.01)
            if end == "cancel":
                for server in (first, second):
                    assert server.openai.responses.retrieve(made.id).status == "cancelled"
            else:
                for server in (first, second):
                    with pytest.raises(openai.NotFoundError):
                        server.openai.responses.retrieve(made.id)


def test_a_stream_of_a_replica_that_stops_goes_on_at_another(coder, tmp_path):
    with coder_engine(*coder) as engine, running(engine, tmp_path) as second:
        with coder_engine(*coder) as other, running(other, tmp_path, drain_seconds=0) as first:
            body = body_of("sampling", max_output_tokens=400, ignore_eos=True)
            got = []
            with first.http.stream("POST", "/v1/responses", json=body) as stream:
                for line in stream.iter_lines():
                    got += events_of([line])
                    if len(got) == 20:
                        first.server.stop()
        assert 20 <= len(got) < 400
        assert '"type":"response.output_text.delta"' in got[-1]
        name = id_of(got)
        rest = read_on(second, name, len(got) - 1)
        assert timeless(got + rest) == timeless(read_on(second, name))
        assert json.loads(rest[-1])["response"]["usage"]["output_tokens"] == 400


def test_a_journal_of_another_model_is_409_and_an_unknown_one_404(
    coder, engine, tmp_path, kept_journals
):
    with running(engine, tmp_path / "a") as first:
        whole, _ = begin(first, **body_of("sampling"))
    name = id_of(whole)
    request, tokens, cached = parts_of(kept_journals, name)
    with coder_engine(*coder, kv_dtype="q8") as other, running(other, tmp_path / "b") as server:
        leave(server, name, request, tokens[:8], cached)
        with pytest.raises(openai.ConflictError) as raised:
            server.openai.responses.retrieve(name, stream=True)
        assert raised.value.code == "fingerprint_mismatch"
        with pytest.raises(openai.NotFoundError):
            server.openai.responses.retrieve("resp_none", stream=True)


@pytest.mark.parametrize("when", ["create", "append", "delete"])
def test_a_store_that_cannot_be_written_costs_the_resumption_and_no_answer(
    engine, tmp_path, monkeypatch, caplog, when
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(engine, tmp_path) as server:
        expected, headers = begin(server, **body_of("sampling", max_output_tokens=24))
        assert "x-kvpager-not-resumable" not in headers
        monkeypatch.setattr(DirectoryJournals if when == "create" else DirectoryJournal, when, full)
        monkeypatch.setattr("kvpager.stores.DirectoryStore.save", full)
        events, headers = begin(server, **body_of("sampling", max_output_tokens=24))
        assert text_of(events) == text_of(expected)
        last = json.loads(events[-1])["response"]
        assert (last["status"], last["store"]) == ("incomplete", False)
        expected = "insufficient_storage" if when == "create" else None
        assert headers.get("x-kvpager-not-resumable") == expected
        assert ("no other process can go on" in caplog.text) == (when == "create")
        assert ("journal cannot be written" in caplog.text) == (when == "append")
        assert ("journal cannot be left" in caplog.text) == (when == "delete")
        assert "cannot be saved" in caplog.text


def test_a_replica_without_room_goes_on_once_it_has_some(
    engine, tmp_path, kept_journals, monkeypatch
):
    refused, begun = [], ServedTurn.begin

    async def busy(turn):
        if len(refused) < 2:
            refused.append(turn)
            await turn.release()
            raise ApiError(429, "the queue is full", code="queue_full")
        await begun(turn)

    with replicas(engine, tmp_path / "a", tmp_path / "b") as (first, second):
        whole, _ = begin(first, **body_of("sampling"))
        request, tokens, cached = parts_of(kept_journals, id_of(whole))
        leave(second, id_of(whole), request, tokens[:8], cached)
        monkeypatch.setattr(ServedTurn, "begin", busy)
        assert timeless(read_on(second, id_of(whole))) == timeless(whole)
    assert len(refused) == 2


def test_a_client_that_leaves_a_stream_of_its_own_ends_it_everywhere(engine, tmp_path):
    with replicas(engine, tmp_path, tmp_path) as (first, second):
        body = body_of("sampling", max_output_tokens=4000, ignore_eos=True)
        with first.http.stream("POST", "/v1/responses", json=body) as stream:
            line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        while first.service.scheduler.running:
            time.sleep(0.01)
        name = id_of(events_of([line]))
        while list(tmp_path.glob("*/journals/*.journal")):
            time.sleep(0.01)
        for server in (first, second):
            with pytest.raises(openai.NotFoundError):
                server.openai.responses.retrieve(name)


def text_of(events):
    values = [json.loads(event) for event in events]
    return "".join(one["delta"] for one in values if one["type"].endswith("text.delta"))
