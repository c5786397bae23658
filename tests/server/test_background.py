"""Responses in the background that a drain or a kill cuts off: they are there, incomplete."""

from __future__ import annotations

import time

import openai
import pytest

from kvpager.server import accepted
from kvpager.server.accepted import Accepted
from server.running import CODER, ServerProcess, coder_engine, running

LONG = {"model": CODER, "input": "Write.", "background": True, "max_output_tokens": 3000}


def begin(server, count, **options):
    return [server.openai.responses.create(**{**LONG, **options}) for _ in range(count)]


def check_incomplete(server, response_id):
    found = server.openai.responses.retrieve(response_id)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "server_stopped"
    items = server.openai.responses.input_items.list(response_id).data
    assert items[0].content[0].text == "Write."
    return found.output_text


def test_what_a_drain_cut_off_is_there_incomplete_also_what_was_queued(coder, tmp_path):
    with coder_engine(*coder) as engine:
        with running(engine, tmp_path, drain_seconds=0, max_running=1) as server:
            ran, *queued = begin(server, 3)
            while server.openai.responses.retrieve(ran.id).status != "in_progress":
                time.sleep(0.01)
            scheduler = server.service.scheduler
            while scheduler.running < 1 or scheduler.work[0] < 30:
                time.sleep(0.01)
        with running(engine, tmp_path) as server:
            assert check_incomplete(server, ran.id)
            assert [check_incomplete(server, one.id) for one in queued] == ["", ""]
            stream = server.openai.responses.retrieve(ran.id, stream=True)
            assert list(stream)[-1].type == "response.incomplete"
            for one in (ran, *queued):
                server.openai.responses.delete(one.id)
                with pytest.raises(openai.NotFoundError):
                    server.openai.responses.retrieve(one.id)
        assert not list((tmp_path / ".responses").rglob("*.json"))


def test_what_a_kill_cut_off_is_there_incomplete(tmp_path):
    with ServerProcess(tmp_path) as process:
        (made,) = begin(process.client, 1)
        process.kill()
    with ServerProcess(tmp_path) as process:
        check_incomplete(process.client, made.id)


def test_a_cancelled_one_is_remembered_and_a_finished_one_is_in_its_snapshot(engine, tmp_path):
    with running(engine, tmp_path) as server:
        (gone,) = begin(server, 1)
        server.openai.responses.cancel(gone.id)
        (done,) = begin(server, 1, max_output_tokens=3)
        while server.openai.responses.retrieve(done.id).status == "in_progress":
            time.sleep(0.01)
    assert [one.stem for one in (tmp_path / ".responses").rglob("*.json")] == [gone.id]
    with running(engine, tmp_path) as server:
        assert server.openai.responses.retrieve(gone.id).status == "cancelled"
        assert server.openai.responses.retrieve(done.id).usage.output_tokens == 3


def test_records_are_few_private_and_their_damage_is_a_missing_response(tmp_path, monkeypatch):
    monkeypatch.setattr(accepted, "MOST", 3)
    records = Accepted(str(tmp_path))
    for number in range(5):
        records.write("a", {"id": f"resp_{number}", "status": "failed"}, [])
    files = sorted((tmp_path / ".responses" / "a").iterdir())
    assert [one.stem for one in files] == ["resp_2", "resp_3", "resp_4"]
    assert {one.stat().st_mode & 0o777 for one in files} == {0o600}
    assert records.read("b", "resp_4") is None
    files[-1].write_text("{")
    assert records.read("a", "resp_4") is None
    assert records.remove("a", "resp_3")
    assert not records.remove("a", "resp_3")
