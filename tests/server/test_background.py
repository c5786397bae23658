"""Responses in the background that a drain or a kill cuts off: they go on when asked for."""

from __future__ import annotations

import time

import openai
import pytest

from server.running import CODER, ServerProcess, coder_engine, running

LONG = {
    "model": CODER,
    "input": "Write.",
    "background": True,
    "max_output_tokens": 3000,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def begin(server, count, **options):
    return [server.openai.responses.create(**{**LONG, **options}) for _ in range(count)]


def asked_by(fields):
    """Options of `begin` with further fields of the body."""
    return {"extra_body": {**LONG["extra_body"], **fields}}


def ended(server, response_id):
    """A response that goes on as soon as it is asked for, once it has ended."""
    found = server.openai.responses.retrieve(response_id)
    while found.status == "in_progress":
        time.sleep(0.01)
        found = server.openai.responses.retrieve(response_id)
    items = server.openai.responses.input_items.list(response_id).data
    assert items[0].content[0].text == "Write."
    return found


def journals_in(folder):
    return [path.stem for path in folder.glob("*/journals/*.journal")]


def test_what_a_drain_cut_off_goes_on_also_what_was_queued(coder, tmp_path):
    with coder_engine(*coder) as engine:
        with running(engine, tmp_path, drain_seconds=0, max_running=1) as server:
            ran, *queued = begin(server, 3, max_output_tokens=600)
            while server.openai.responses.retrieve(ran.id).status != "in_progress":
                time.sleep(0.01)
            scheduler = server.service.scheduler
            while scheduler.running < 1 or scheduler.work[0] < 30:
                time.sleep(0.01)
        assert sorted(journals_in(tmp_path)) == sorted(one.id for one in (ran, *queued))
        with running(engine, tmp_path) as server:
            whole = server.openai.responses.create(
                **{**LONG, "background": False, "max_output_tokens": 600}
            )
            for one in (ran, *queued):
                assert ended(server, one.id).output_text == whole.output_text
                server.openai.responses.delete(one.id)
                with pytest.raises(openai.NotFoundError):
                    server.openai.responses.retrieve(one.id)
        assert not journals_in(tmp_path)


def test_what_a_kill_cut_off_goes_on_when_it_is_asked_for(tmp_path):
    with ServerProcess(tmp_path) as process:
        (made,) = begin(process.client, 1, max_output_tokens=300)
        process.kill()
    with ServerProcess(tmp_path) as process:
        assert ended(process.client, made.id).usage.output_tokens == 300


def test_a_background_answer_to_a_session_is_kept_in_it_alone(engine, tmp_path):
    asked = {"session_id": "talk", "store": False}
    with running(engine, tmp_path) as server:
        for text in ("Write a class.", "Add a method."):
            (made,) = begin(server, 1, input=text, max_output_tokens=8, **asked_by(asked))
            found = server.http.get("/v1/sessions/talk/messages").json()
            assert found["response_id"] == made.id
            *_, last = server.openai.responses.retrieve(made.id, stream=True)
            found = server.http.get("/v1/sessions/talk/messages").json()
            assert found["response_id"] is None
            assert found["data"][-2]["content"] == text
            assert found["data"][-1]["content"] == last.response.output_text
            assert server.http.get(f"/v1/responses/{made.id}").status_code == 404
        assert len(found["data"]) == 4
        names = [one["id"] for one in server.http.get("/v1/sessions").json()["data"]]
        assert names == ["talk"]
    assert not journals_in(tmp_path)


def test_an_answer_that_is_stopped_keeps_what_it_has(engine, tmp_path):
    with running(engine, tmp_path) as server:
        (made,) = begin(server, 1, **asked_by({"session_id": "talk", "store": False}))
        events = server.openai.responses.retrieve(made.id, stream=True)
        text = next(one.delta for one in events if one.type == "response.output_text.delta")
        stopped = server.http.post(f"/v1/responses/{made.id}/cancel", params={"keep": True}).json()
        assert stopped["status"] == "incomplete"
        assert stopped["incomplete_details"] == {"reason": "stopped"}
        *_, last = events
        assert last.response.output_text.startswith(text)
        said = server.http.get("/v1/sessions/talk/messages").json()["data"]
        assert [one["content"] for one in said] == ["Write.", last.response.output_text]
        assert last.response.usage.output_tokens < LONG["max_output_tokens"]


def test_an_answer_to_a_session_goes_on_after_a_kill(tmp_path):
    asked = asked_by({"session_id": "talk", "store": False})
    with ServerProcess(tmp_path) as process:
        (first,) = begin(process.client, 1, max_output_tokens=20, **asked)
        list(process.client.openai.responses.retrieve(first.id, stream=True))
        (made,) = begin(process.client, 1, max_output_tokens=300, input="Go on.", **asked)
        process.kill()
    with ServerProcess(tmp_path) as process:
        *_, last = process.client.openai.responses.retrieve(made.id, stream=True)
        assert last.response.usage.output_tokens == 300
        said = process.client.http.get("/v1/sessions/talk/messages").json()["data"]
        assert len(said) == 4
        assert said[-1]["content"] == last.response.output_text


def gone_on(server, response_id):
    """Continues the session of a response that was cut off; the response must leave that be."""
    server.chat("Go on.", extra_body={"session_id": "talk"})
    said = server.http.get("/v1/sessions/talk/messages").json()["data"]
    *_, last = server.openai.responses.retrieve(response_id, stream=True)
    assert last.response.status == "failed"
    assert last.response.error.code == "session_differs"
    assert server.http.get("/v1/sessions/talk/messages").json()["data"] == said
    return said


def test_an_answer_that_a_kill_cut_off_drops_nothing_that_its_session_got_since(tmp_path):
    with ServerProcess(tmp_path) as process:
        (made,) = begin(process.client, 1, **asked_by({"session_id": "talk", "store": False}))
        process.kill()
    with ServerProcess(tmp_path) as process:
        assert len(gone_on(process.client, made.id)) == 2


def test_an_answer_that_a_drain_cut_off_drops_nothing_that_its_session_got_since(coder, tmp_path):
    asked = asked_by({"session_id": "talk", "store": False})
    with coder_engine(*coder) as engine:
        with running(engine, tmp_path, drain_seconds=0) as server:
            (made,) = begin(server, 1, **asked)
            while server.service.scheduler.work[0] < 30:
                time.sleep(0.01)
        with running(engine, tmp_path) as server:
            assert len(gone_on(server, made.id)) == 4  # it was saved as far as it had come


def test_a_cancelled_one_is_remembered_and_a_finished_one_is_in_its_snapshot(engine, tmp_path):
    with running(engine, tmp_path) as server:
        (gone,) = begin(server, 1)
        server.openai.responses.cancel(gone.id)
        (done,) = begin(server, 1, max_output_tokens=3)
        while server.openai.responses.retrieve(done.id).status == "in_progress":
            time.sleep(0.01)
    assert journals_in(tmp_path) == [gone.id]
    with running(engine, tmp_path) as server:
        assert server.openai.responses.retrieve(gone.id).status == "cancelled"
        assert server.openai.responses.retrieve(done.id).usage.output_tokens == 3
