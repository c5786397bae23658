"""Exports and imports: streamed, bounded, whole or not at all, and silent about folders."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvpager.server import bodies, transfers
from kvpager.server.errors import of, without_folders
from kvpager.server.transfers import Transfers
from kvpager.stores import FileStore
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
        assert "expected at most 8000000 (store_budget)" in refused.text
        assert server.http.get("/v1/sessions/huge").status_code == 404


def test_no_more_than_a_block_of_a_transfer_is_in_memory(
    server, conversation, tmp_path, monkeypatch
):
    monkeypatch.setattr(transfers, "_BLOCK", 100_000)
    largest = 0

    class Written(io.FileIO):
        def write(self, block):
            nonlocal largest
            largest = max(largest, len(block))
            return super().write(block)

    written = tmp_path / "written"
    monkeypatch.setattr(transfers.tempfile, "TemporaryFile", lambda **_: Written(written, "w+"))
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
    for name in ("whole", "over"):
        server.http.delete(f"/v1/sessions/{name}")
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

    class Full(io.BytesIO):
        write = full

    with monkeypatch.context() as patched:
        patched.setattr(transfers.tempfile, "TemporaryFile", lambda **_: Full())
        answer = bring(server, "full", conversation[1])
    assert answer.status_code == 507
    assert "secret" not in answer.text
    assert server.http.get("/v1/sessions/full").status_code == 404
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
    async def unread(image, seconds):
        yield image.read_piece(0)
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
        assert not list((tmp_path / ".transfers").iterdir())
        for one in open_ones:
            one.close()
        deadline = time.monotonic() + 30
        while server.service.transfers._running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert bring(server, "other", b"x").status_code == 400


def files_and_folders(*roots):
    """Regular files that this process has open, and when names were last put into folders."""
    opened = {}
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(one.stat().st_mode):
                opened[one.name] = str(one.readlink())
    folders = [one for root in roots for one in (root, *root.rglob("*")) if one.is_dir()]
    return opened, {one: one.stat().st_mtime_ns for one in folders}


@pytest.mark.parametrize("where", ["in memory", "in the store"])
def test_a_get_makes_no_files_and_keeps_nothing(coder, tmp_path, monkeypatch, where):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with coder_engine(*coder) as engine, running(engine, tmp_path / "store") as server:
        turn(server, "whole", QUESTION)
        source = next(iter(server.service._conversations.values()))
        if where == "in the store":
            assert source.release_oldest()
        server.http.get("/v1/sessions/whole")  # whatever is opened once
        during, send = [], transfers.send

        async def watched(*arguments):
            async for block in send(*arguments):
                during.append(files_and_folders(tmp_path))
                yield block

        monkeypatch.setattr(transfers, "_BLOCK", 100_000)
        monkeypatch.setattr(transfers, "send", watched)
        before, kept = files_and_folders(tmp_path), source.names()
        content = export(server, "whole")
        for path in ("", "/whole", "/whole/ledger"):
            server.http.get(f"/v1/sessions{path}").raise_for_status()
        assert len(during) >= 3
        packs = [folder for folder in before[1] if "store" in folder.parts]
        for opened, folders in [*during, files_and_folders(tmp_path)]:
            assert folders == before[1]
            # What a saved conversation is read from is there already.
            made = {name: file for name, file in opened.items() if before[0].get(name) != file}
            assert all(Path(file).parent in packs for file in made.values()), made
        assert source.names() == kept
        assert bring(server, "again", content).status_code == 200


def test_of_an_export_that_nobody_reads_a_block_is_made():
    made = []

    class Image:
        pieces = 1000

        def read_piece(self, piece):
            made.append(piece)
            return bytes([piece % 251]) * 70_000

    async def read():
        sent = transfers.send(Image(), 60.0)
        first = await anext(sent)
        assert len(first) < transfers._BLOCK + 70_000
        assert len(made) == len(first) // 70_000
        rest = [block async for block in sent]
        return first + b"".join(rest)

    assert asyncio.run(read()) == b"".join(bytes([i % 251]) * 70_000 for i in range(1000))


def test_an_export_is_the_file_that_a_save_writes_while_others_generate(server, tmp_path):
    answer = turn(server, "whole", QUESTION)["choices"][0]["message"]["content"]
    (source,) = server.service._conversations.values()
    with source.fork("whole", None, "fail")[0] as session:
        saved = session.save(tmp_path / "saved.kvsnap")
    ended = threading.Event()

    def others():
        while not ended.is_set():
            turn(server, "whole", QUESTION, answer, "Go on.", max_tokens=10)
            turn(server, "other", "A list.", max_tokens=30)

    content = export(server, "whole")
    thread = threading.Thread(target=others)
    thread.start()
    try:
        during = [export(server, "whole") for _ in range(10)]
    finally:
        ended.set()
        thread.join()
    (tmp_path / "sent.kvsnap").write_bytes(content)
    sent = FileStore().open(str(tmp_path / "sent.kvsnap"))
    assert (sent.logical_digest, len(sent.tokens)) == (saved.logical_digest, saved.tokens)
    assert len(content) == saved.bytes_written
    for one in during:
        (tmp_path / "during.kvsnap").write_bytes(one)
        assert FileStore().open(str(tmp_path / "during.kvsnap")).verify(1) == []
        assert bring(server, "again", one).status_code == 200
    for name in ("whole", "other", "again"):
        server.http.delete(f"/v1/sessions/{name}")


def test_head_and_ranges_of_an_export_write_no_second_file(server, conversation):
    head = server.http.head("/v1/sessions/whole/export")
    assert (head.status_code, head.headers["accept-ranges"]) == (200, "none")
    assert server.http.head("/v1/sessions/nobody/export").status_code == 404
    part = server.http.get("/v1/sessions/whole/export", headers={"range": "bytes=10-19"})
    assert part.status_code == 200
    assert len(part.content) == len(conversation[1])


def test_of_an_import_no_file_has_a_name_so_that_a_kill_leaves_none(tmp_path):
    async def parts():
        yield b"x" * 1000
        assert not list((tmp_path / ".transfers").iterdir())
        yield b"y"

    async def written():
        async with Transfers(tmp_path, 1).received(parts()) as path:
            assert not list((tmp_path / ".transfers").iterdir())
            return Path(path).read_bytes()

    assert asyncio.run(written()) == b"x" * 1000 + b"y"


def test_messages_name_no_folder():
    assert without_folders("/srv/store/a/x.kvsnap: bad") == "x.kvsnap: bad"
    assert without_folders("a/b is 'c/d'; GET /health") == "a/b is 'c/d'; GET /health"
    assert without_folders("see https://example.com/a/b") == "see https://example.com/a/b"
    error = of(OSError(errno.ENOSPC, "full", "/srv/store"))
    assert (error.status, "/srv" in error.message) == (507, False)
