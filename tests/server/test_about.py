"""Health, versions, models and tokens."""

from __future__ import annotations

import kvpager
from server.running import CODER, said


def test_health_ready_and_version(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.http.get("/version").json() == {"version": kvpager.__version__}


def test_text_goes_to_tokens_and_back(server, engine):
    text = "def reverse(items):\n"
    told = server.post("/tokenize", prompt=text).json()
    assert told["tokens"] == engine.tokenizer.encode(text)
    assert told["count"] == len(told["tokens"])
    assert server.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": text}


def test_messages_have_the_tokens_of_their_prompt(server):
    told = server.post("/tokenize", messages=said("Hi"), return_token_strs=True).json()
    answer = server.chat("Hi", max_tokens=1)
    assert told["count"] == answer.usage.prompt_tokens
    assert "".join(told["token_strs"]).startswith("<|im_start|>user\nHi")


def test_an_unknown_path_is_an_error_in_openais_shape(server):
    answer = server.http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_model_is_found_by_any_of_its_names(server):
    assert [model.id for model in server.openai.models.list()] == [CODER]
    assert server.openai.models.retrieve(CODER).id == CODER
    assert server.http.get("/v1/models/other").status_code == 404
