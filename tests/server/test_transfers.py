"""Exports and imports: streamed, bounded, whole or not at all, and silent about folders."""

from __future__ import annotations

import asyncio
import errno
import io
import tempfile
import time
from pathlib import Path

import pytest

from kvpager.server import bodies, transfers
from kvpager.server.errors import of, without_folders
from kvpager.server.transfers import Transfers
from server.running import coder_engine, running, said

QUESTION = "Write a class that keeps names and sorts them. " * 3


def turn(server, name, *contents, **options):
    body = {"messages": said(*contents), "max_tokens": 20, "temperature": 0, "session_id": name}
    answer = server.post("/v1/chat/completions", **{**body, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def export(server, name):
    answer = server.http.get(f"/v1/sessions/{name}/export")
    answer.raise_for_status()
    return answer.content


def bring(server, name, content, **options):
    return server.http.post(f"/v1/sessions/{name}/import", content=content, **options)


@pytest.fixture
def conversation(server):
    """A session of the shared server, its answer and its file; what is made of it is deleted."""
    answer = turn(server, "whole", QUESTION)["choices"][0]["message"]["content"]
    yield answer, export(server, "whole")
    for one in server.http.get("/v1/sessions").json()["data"]:
        server.http.delete(f"/v1/sessions/{one['id']}")


def test_what_is_exported_can_be_imported_however_large_a_request_may_be(coder, tmp_path):
    with (
        coder_engine(*coder) as engine,
        running(engine, tmp_path, max_request_bytes=2000, store_budget="8MB") as server,
    ):
        turn(server, "large", QUESTION)
        content = export(server, "large")
        assert len(content) > 1_000_000

        def parts():
            yield from (content[at : at + 10_000] for at in range(0, len(content), 10_000))

        for name, body in (("again", content), ("streamed", parts())):
            answer = bring(server, name, body)
            assert answer.status_code == 200, answer.text
        refused = bring(server, "huge", b"x" * 8_000_001)
        assert refused.status_code == 413
        assert "expected at most 8000000, which is store_budget" in refused.text
        assert server.http.get("/v1/sessions/huge").status_code == 404


def test_no_more_than_a_block_of_a_transfer_is_in_memory(server, conversation, monkeypatch):
    monkeypatch.setattr(transfers, "_BLOCK", 100_000)
    largest = 0

    class Written(io.FileIO):
        def write(self, block):
            nonlocal largest
            largest = max(largest, len(block))
            return super().write(block)

    monkeypatch.setattr(Path, "open", lambda path, mode: Written(path, mode.rstrip("b")))
    assert bring(server, "blocks", conversation[1]).status_code == 200
    assert 100_000 <= largest < 400_000
    sizes = []
    with server.http.stream("GET", "/v1/sessions/whole/export") as answer:
        sizes += [len(part) for part in answer.iter_raw()]
    assert max(sizes) < 400_000
    assert sum(sizes) == int(answer.headers["content-length"])


@pytest.mark.parametrize("options", [{}, {"stop": ["("]}, {"stop": ["s"]}, {"max_tokens": 60}])
@pytest.mark.parametrize("over", [None, QUESTION, "Something else"])
def test_an_imported_session_goes_on_with_all_its_tokens(server, conversation, over, options):
    answer = turn(server, "whole", QUESTION, **options)["choices"][0]["message"]["content"]
    content = export(server, "whole")
    if over is not None:
        turn(server, "over", over)
    assert bring(server, "over", content).status_code == 200
    tokens = server.http.get("/v1/sessions/over").json()["tokens"]
    expected = turn(server, "whole", QUESTION, answer, "Go on.")
    went_on = turn(server, "over", QUESTION, answer, "Go on.")
    assert went_on["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 1
    assert went_on["choices"][0]["message"] == expected["choices"][0]["message"]


def damaged(content, place):
    spoilt = bytearray(content)
    spoilt[place] ^= 1
    return bytes(spoilt)


BROKEN = {
    "empty": lambda content: b"",
    "text": lambda content: b"not a snapshot" * 1000,
    "truncated": lambda content: content[:-100],
    "half": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"x",
    "head": lambda content: damaged(content, 100),
    **{f"at-{tenth}": lambda content, tenth=tenth: damaged(content, len(content) * tenth // 10)
       for tenth in range(1, 10)},
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_of_a_damaged_import_nothing_stays_and_no_folder_is_named(server, conversation, kind):
    _, content = conversation
    turn(server, "known", "Something else")
    before = server.http.get("/v1/sessions/known").json()["tokens"]
    for name in ("fresh", "known"):
        refused = bring(server, name, BROKEN[kind](content))
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "body"
        assert tempfile.gettempdir() not in refused.text
        assert "/kvpager" not in refused.text
    assert server.http.get("/v1/sessions/fresh").status_code == 404
    assert server.http.get("/v1/sessions/known").json()["tokens"] == before


def test_a_file_of_another_salt_is_refused_and_leaves_nothing(server, conversation):
    answer = server.http.post("/v1/sessions/other/import?cache_salt=x", content=conversation[1])
    assert answer.status_code == 409
    assert "/" not in answer.json()["error"]["message"].replace("/v1", "")
    assert server.http.get("/v1/sessions/other").status_code == 404


def test_a_session_that_the_store_cannot_hold_is_not_kept_in_memory_either(coder, tmp_path):
    with coder_engine(*coder) as engine, running(engine, tmp_path / "a") as server:
        turn(server, "large", QUESTION)
        content = export(server, "large")
        with running(engine, tmp_path / "b", store_budget=len(content) - 200_000) as small:
            assert bring(small, "large", content).status_code == 413
        with running(engine, tmp_path / "c", store_budget=len(content) + 10) as small:
            answer = bring(small, "large", content)
            if answer.status_code != 200:
                assert small.http.get("/v1/sessions/large").status_code == 404


def test_a_full_disk_is_507_and_changes_nothing(server, conversation, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/srv/secret")

    class Full(io.FileIO):
        write = full

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode: Full(path, mode.rstrip("b")))
        answer = bring(server, "full", conversation[1])
    assert answer.status_code == 507
    assert "secret" not in answer.text
    assert server.http.get("/v1/sessions/full").status_code == 404
    monkeypatch.setattr("kvpager.session.Session.save", full)
    assert server.http.get("/v1/sessions/whole/export").status_code == 507
    assert not server.service.transfers._running


def test_an_import_that_comes_too_slowly_ends_and_leaves_nothing(server, monkeypatch):
    monkeypatch.setattr(bodies, "_SECONDS", 0.2)

    def dripping():
        for _ in range(100):
            yield b"x"
            time.sleep(0.02)

    answer = bring(server, "slow", dripping())
    assert answer.status_code == 408
    assert not server.service.transfers._running


def test_exports_that_nobody_reads_are_few_and_leave_no_file(engine, tmp_path, monkeypatch):
    async def unread(file, seconds):
        yield file.read(1000)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(transfers, "send", unread)
    with running(engine, tmp_path, max_transfers=2) as server:
        turn(server, "whole", QUESTION)
        open_ones = []
        for _ in range(2):
            request = server.http.build_request("GET", "/v1/sessions/whole/export")
            open_ones.append(server.http.send(request, stream=True))
        refused = server.http.get("/v1/sessions/whole/export")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_transfers"
        assert bring(server, "other", b"x").status_code == 429
        files = [one for one in (tmp_path / ".transfers").rglob("*") if one.is_file()]
        assert [one.name for one in files] == ["lock"]
        for one in open_ones:
            one.close()
        deadline = time.monotonic() + 30
        while server.service.transfers._running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert bring(server, "other", b"x").status_code == 400
    assert not list((tmp_path / ".transfers").iterdir())


def test_head_and_ranges_of_an_export_write_no_second_file(server, conversation):
    head = server.http.head("/v1/sessions/whole/export")
    assert (head.status_code, head.headers["accept-ranges"]) == (200, "none")
    assert server.http.head("/v1/sessions/nobody/export").status_code == 404
    part = server.http.get("/v1/sessions/whole/export", headers={"range": "bytes=10-19"})
    assert part.status_code == 200
    assert len(part.content) == len(conversation[1])


def test_what_a_killed_server_was_writing_goes_when_the_next_one_starts(tmp_path):
    killed, running_one = Transfers(str(tmp_path), 1), Transfers(str(tmp_path), 1)
    killed._lock.close()  # as the kernel does
    (killed._folder / "half").mkdir()
    (killed._folder / "half" / "session.kvsnap").write_bytes(b"x" * 1000)
    third = Transfers(str(tmp_path), 1)
    left = {one.name for one in (tmp_path / ".transfers").iterdir()}
    assert left == {running_one._folder.name, third._folder.name}
    for one in (running_one, third):
        one.close()


def test_messages_name_no_folder():
    assert without_folders("/srv/store/a/x.kvsnap: bad") == "x.kvsnap: bad"
    assert without_folders("a/b is 'c/d'; GET /health") == "a/b is 'c/d'; GET /health"
    assert without_folders("see https://example.com/a/b") == "see https://example.com/a/b"
    error = of(OSError(errno.ENOSPC, "full", "/srv/store"))
    assert (error.status, "/srv" in error.message) == (507, False)
