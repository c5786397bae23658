"""A prompt beyond the context: errors by which agents know that they have to shorten it."""

from __future__ import annotations

import copy
import re

import openai
import pytest

from kvpager import Engine
from kvpager.errors import CorruptSnapshotError
from kvpager.server import errors
from kvpager.server.errors import for_clients
from model import text_models
from server.running import CODER, GREEDY, coder_engine, running, said

LONG = "word " * 40_000
PYTHON = re.compile(r"PagerConfig|Engine\(|_bytes|=None|tokenizer\.|Session|kvpager")
OPENAI = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, your (messages|prompt) "
    r"resulted in (\d+) tokens"
)


@pytest.fixture(scope="module")
def small(coder):
    """A server whose memory has room for 1920 tokens, less than the model has positions."""
    with coder_engine(*coder, host_bytes=0) as engine, running(engine, None) as server:
        yield server


def refused(server, path, **body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.headers.get("x-should-retry") != "true"
    assert not PYTHON.search(answer.text)
    return answer.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": said(LONG)}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "echo": True, "max_tokens": 0}),
        ("/v1/responses", {"input": LONG}),
    ],
)
def test_the_error_has_openais_code_and_words(server, path, prompt, stream):
    error = refused(server, path, **prompt, stream=stream)
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    limit, _, size = OPENAI.match(error["message"]).groups()
    assert limit == "32768"
    assert 40_000 <= int(size) <= 40_020


def test_the_error_has_anthropics_words_under_messages(server):
    error = refused(server, "/v1/messages", messages=said(LONG), max_tokens=8)
    assert error["type"] == "invalid_request_error"
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found[2] == "32768"
    counted = server.post("/v1/messages/count_tokens", messages=said(LONG)).json()
    assert int(found[1]) == counted["input_tokens"]


def test_openais_client_raises_its_error_with_the_code(server):
    with pytest.raises(openai.BadRequestError) as raised:
        server.chat(LONG)
    assert raised.value.code == "context_length_exceeded"


def test_memory_limits_the_context_as_positions_do(small):
    limit = small.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert limit == 1920
    error = refused(small, "/v1/chat/completions", messages=said("word " * 2500))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 1920 tokens" in error["message"]
    full = small.chat("word " * 1880, max_tokens=30_000, extra_body={"ignore_eos": True})
    assert full.usage.total_tokens == limit


@pytest.mark.parametrize("most", [2_000, 32_000, 10**9])
def test_what_is_asked_for_beyond_the_context_is_cut_to_it(small, most):
    body = {"ignore_eos": True, **GREEDY}
    text = "word " * 1880
    chat = small.post("/v1/chat/completions", messages=said(text), max_tokens=most, **body).json()
    assert chat["usage"]["total_tokens"] == 1920
    assert chat["choices"][0]["finish_reason"] == "length"
    plain = small.post("/v1/completions", prompt=text, max_tokens=most, **body).json()
    assert plain["usage"]["total_tokens"] == 1920
    message = small.post("/v1/messages", messages=said(text), max_tokens=most).json()
    assert message["usage"]["output_tokens"] <= 100
    response = small.post("/v1/responses", input=text, max_output_tokens=most, store=False)
    assert response.json()["usage"]["total_tokens"] <= 1920


def test_a_prompt_that_leaves_one_token_has_an_answer_of_one(small):
    ids = small.service.engine.tokenizer.encode("word " * 2500)[:1920]
    assert small.post("/v1/completions", prompt=ids[:1919], max_tokens=9).status_code == 200
    assert refused(small, "/v1/completions", prompt=ids)["code"] == "context_length_exceeded"


def test_an_unknown_previous_response_has_a_code_of_its_own(server):
    for name in ("resp_none", "no/name", ""):
        with pytest.raises(openai.BadRequestError) as raised:
            server.openai.responses.create(model=CODER, input="Hi", previous_response_id=name)
        assert raised.value.code == "previous_response_not_found"
        assert raised.value.param == "previous_response_id"


def test_no_error_tells_a_client_what_to_do_in_python():
    for text, told in (
        ("a has no b; give Engine(model, b=...)", "a has no b"),
        ("a is 3; expected 4. Raise host_bytes to at least 5", "a is 3; expected 4"),
        ("a is 3 (x=4); expected 4 or 5", "a is 3 (x=4); expected 4 or 5"),
        ("a is no b, or use engine.score(ids)", "a is no b"),
    ):
        assert for_clients(text) == told
    damaged = CorruptSnapshotError('x: chunk 3 is damaged; restore with on_corrupt="recompute"')
    assert errors.of(damaged).message == (
        'x: chunk 3 is damaged; send on_corrupt: "recompute" to have it computed again'
    )


def test_a_model_without_a_template_says_so_and_no_more():
    tokenizer = copy.deepcopy(text_models.byte_level())
    tokenizer.chat_template = None
    options = {"pool_tokens": 2048, "rows": 16, "small_rows": "fixed"}
    with (
        Engine(text_models.model(), tokenizer=tokenizer, **options) as engine,
        running(engine, None) as server,
    ):
        error = refused(server, "/v1/chat/completions", messages=said("Hi"))
    assert "no chat template" in error["message"]
