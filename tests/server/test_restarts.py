"""What survives: turns after a restart, a SIGKILL, a SIGTERM in the middle, and damaged files."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from kvpager import InvalidArgumentError
from kvpager.cli.needles import shipped_model_path
from server.running import CODER, GREEDY, ServerProcess, coder_engine, running, started

TURNS = ("Write a class that keeps a list of names.", "Add a method that sorts them.", "Why?")


def converse(client, turns, previous=None, **options):
    """A conversation by previous_response_id: the texts, ids and usages of its responses."""
    told = []
    for turn in turns:
        made = client.openai.responses.create(
            model=CODER,
            input=turn,
            previous_response_id=previous,
            **{**GREEDY, "max_output_tokens": 40, **options},
        )
        previous = made.id
        told.append(made)
    return told


def texts(responses):
    return [response.output_text for response in responses]


def test_a_turn_after_a_restart_has_the_bits_of_a_server_that_ran_on(coder, tmp_path):
    with started(coder, tmp_path / "a") as server:
        whole = converse(server, TURNS)
    with started(coder, tmp_path / "b") as server:
        first = converse(server, TURNS[:1])
    with started(coder, tmp_path / "b") as server:
        rest = converse(server, TURNS[1:], first[0].id)
    assert texts(first + rest) == texts(whole)
    assert [one.usage.input_tokens for one in first + rest] == [
        one.usage.input_tokens for one in whole
    ]
    # Of the conversation before, only the last token had no K/V.
    for before, after in zip([*first, *rest], rest):
        assert after.usage.input_tokens_details.cached_tokens == before.usage.total_tokens - 1


def test_a_session_of_chat_completions_goes_on_after_a_restart(coder, tmp_path):
    body = {"session_id": "ada"}
    with started(coder, tmp_path) as server:
        first = server.chat(TURNS[0], max_tokens=20, extra_body=body)
        text = first.choices[0].message.content
        expected = server.chat(TURNS[0], text, TURNS[1], max_tokens=20)
    with started(coder, tmp_path) as server:
        second = server.chat(TURNS[0], text, TURNS[1], max_tokens=20, extra_body=body)
    assert second.choices[0].message.content == expected.choices[0].message.content
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens - 1


def test_a_prompt_with_a_cache_key_is_found_after_a_restart(coder, tmp_path):
    body = {"prompt_cache_key": "tests", "prompt_cache_options": {"ttl": "12h"}}
    with started(coder, tmp_path) as server:
        first = server.chat(TURNS[0], max_tokens=4, extra_body=body)
    with started(coder, tmp_path) as server:
        second = server.chat(TURNS[0], max_tokens=4, extra_body=body)
    assert second.choices[0].message.content == first.choices[0].message.content
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_prompt_is_saved_up_to_its_breakpoint_to_the_token(coder, tmp_path):
    text = "A long description of a class. " * 4
    part = {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit"}}

    def ask(server, question):
        content = [part, {"type": "text", "text": question}]
        return server.openai.chat.completions.create(
            model=CODER, messages=[{"role": "user", "content": content}], max_tokens=4, **GREEDY
        )

    with started(coder, tmp_path) as server:
        ask(server, " Write it.")
        ids = coder[1].encode(f"<|im_start|>user\n{text}", add_special_tokens=False)
    with started(coder, tmp_path) as server:
        second = ask(server, " Explain it.")
    assert second.usage.prompt_tokens_details.cached_tokens == len(ids)


@pytest.fixture
def damaged(coder, tmp_path):
    """A store in which a response of two chunks has a damaged one, and the response."""
    with started(coder, tmp_path) as server:
        (made,) = converse(server, [TURNS[0] * 12])
    (pack,) = [path for path in Path(tmp_path).rglob("*.kvsnap") if "packs" in path.parts]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    return made


def test_a_damaged_conversation_is_an_error_that_names_the_chunk(coder, tmp_path, damaged):
    with (
        started(coder, tmp_path) as server,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        converse(server, ["Why?"], damaged.id)
    assert "chunk" in raised.value.message
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert raised.value.code == "snapshot_damaged"


def test_a_damaged_conversation_is_computed_again_where_that_is_asked_for(coder, tmp_path, damaged):
    with started(coder, tmp_path) as server:
        (again,) = converse(server, ["Why?"], damaged.id, extra_body={"on_corrupt": "recompute"})
    shutil.rmtree(tmp_path)
    with started(coder, tmp_path) as server:
        expected = converse(server, [TURNS[0] * 12, "Why?"])
    assert again.output_text == expected[1].output_text


def test_a_conversation_of_another_model_is_409(coder, tmp_path):
    with started(coder, tmp_path) as server:
        (made,) = converse(server, TURNS[:1])
    with (
        coder_engine(*coder, kv_dtype="q8") as other,
        running(other, tmp_path) as server,
        pytest.raises(openai.ConflictError) as raised,
    ):
        converse(server, TURNS[1:2], made.id)
    assert raised.value.code == "fingerprint_mismatch"
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_nothing_that_was_reported_is_lost_by_sigkill(coder, tmp_path):
    with started(coder, tmp_path / "whole") as server:
        whole = converse(server, TURNS)
    store = tmp_path / "killed"
    with ServerProcess(store) as process:
        first = converse(process.client, TURNS[:1])
        process.kill()
    with ServerProcess(store) as process:
        second = converse(process.client, TURNS[1:2], first[0].id)
        process.kill()
    with ServerProcess(store) as process:
        third = converse(process.client, TURNS[2:], second[0].id)
        found = process.client.openai.responses.retrieve(first[0].id)
        process.kill()
    assert texts(first + second + third) == texts(whole)
    assert found.output_text == first[0].output_text
    assert third[0].usage.input_tokens_details.cached_tokens == second[0].usage.total_tokens - 1


def test_sigterm_lets_a_request_end_and_exits_with_0(tmp_path):
    with ServerProcess(tmp_path) as process:
        stream = process.client.chat("Write a class.", max_tokens=60, stream=True)
        next(stream)
        process.process.terminate()
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.terminate() == 0


def begin_long_session(process):
    """A named session whose request does not end by itself, after 20 tokens."""
    body = {"session_id": "long", "ignore_eos": True}
    stream = process.client.chat("Write.", max_tokens=20_000, stream=True, extra_body=body)
    for _ in range(20):
        next(stream)
    return stream


def assert_long_session_was_saved(store):
    with ServerProcess(store) as process:
        (kept,) = process.client.http.get("/v1/sessions").json()["data"]
        assert kept["id"] == "long"
        assert kept["tokens"] > 20


def test_sigterm_saves_what_does_not_end_in_time(tmp_path):
    with ServerProcess(tmp_path, "--drain-seconds", "0") as process:
        _stream = begin_long_session(process)
        assert process.terminate() == 0
    assert_long_session_was_saved(tmp_path)


def test_a_second_sigint_waits_no_longer_and_saves_all_the_same(tmp_path):
    with ServerProcess(tmp_path) as process:
        _stream = begin_long_session(process)
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(30) == 0
        assert "Traceback" not in "".join(process.said)
    assert_long_session_was_saved(tmp_path)


LATE = """
import atexit, os, signal, sys
from kvpager import Engine, cli
from kvpager.cli import serve

interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)
serve._tell = interrupt
if sys.argv[1] == "closing":
    Engine.__exit__ = interrupt
else:
    atexit.register(interrupt)
options = ["--model", sys.argv[2], "--port", "0", "--store", "off", "--log-level", "error"]
sys.exit(cli.main(["serve", *options]))
"""


@pytest.mark.parametrize(("when", "code"), [("closing", 130), ("exiting", 0)])
def test_an_interrupt_after_the_servers_end_is_quiet(when, code):
    ended = subprocess.run(
        [sys.executable, "-c", LATE, when, shipped_model_path(CODER)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (code, "")


def test_a_conversation_in_an_encrypted_store_goes_on_and_is_in_no_file(coder, tmp_path):
    key, store = tmp_path / "key", tmp_path / "store"
    key.write_text("5f" * 32 + "\n")
    with started(coder, tmp_path / "plain") as server:
        whole = converse(server, TURNS)
    with started(coder, store, store_key=str(key)) as server:
        first = converse(server, TURNS[:1])
    with started(coder, store, store_key=str(key)) as server:
        rest = converse(server, TURNS[1:], first[0].id)
    assert texts(first + rest) == texts(whole)
    seen = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    ids = [response.id.encode() for response in first + rest]
    words = [b"keeps a list", *(response.output_text.encode()[:12] for response in first), *ids]
    assert seen
    assert not any(word in data for data in seen for word in words)
    with pytest.raises(InvalidArgumentError, match="key is None"), started(coder, store):
        pass
