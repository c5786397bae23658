"""Tokens in completions: joined they are the text, with tokenizers whose decoders strip spaces."""

from __future__ import annotations

import pytest

from kvpager import Engine
from model import text_models
from server.running import running

LOGPROBS = {"logprobs": 20, "max_tokens": 24, "temperature": 1.0}


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def any_server(request):
    """A server of a model with random weights, which writes any bytes."""
    tokenizer = getattr(text_models, request.param)()
    options = {"pool_tokens": 2048, "rows": 16, "small_rows": "fixed"}
    with (
        Engine(text_models.model(), tokenizer=tokenizer, **options) as engine,
        running(engine, None) as server,
    ):
        yield server


def completed(server, prompt, **options):
    body = {"prompt": prompt, "ignore_eos": True, **LOGPROBS, **options}
    return server.post("/v1/completions", **body).json()


def as_bytes(name):
    """What a token of a completion adds to the text."""
    plain = not name.startswith("bytes:")
    return name.encode() if plain else bytes.fromhex(name[6:].replace("\\x", ""))


@pytest.mark.parametrize("echo", [False, True])
def test_joined_tokens_are_the_text_and_offsets_point_into_it(any_server, echo):
    tokenizer = any_server.service.engine.tokenizer
    special = set(tokenizer.all_special_tokens)
    # A decoder of single bytes breaks those before a broken one as well: none are written here.
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    bias = {str(token): -100 for token, name in enumerate(names) if name.startswith("<0x")}
    spaces = 0
    for seed in range(6):
        answer = completed(any_server, "A cache keeps keys", echo=echo, seed=seed, logit_bias=bias)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        shown = [
            (name, offset)
            for name, offset in zip(found["tokens"], found["text_offset"])
            if name not in special
        ]
        joined = b"".join(as_bytes(name) for name, _ in shown).decode(errors="ignore")
        assert joined == choice["text"].replace("\ufffd", "")
        for name, offset in shown:
            if not name.startswith("bytes:"):
                assert choice["text"][offset:].startswith(name)
                spaces += name.startswith(" ")
    assert spaces


def test_no_alternative_is_lost_and_the_chosen_token_is_among_them(any_server):
    for seed in range(4):
        found = completed(any_server, "A cache", seed=seed)["choices"][0]["logprobs"]
        for name, value, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert len(top) in (20, 21)
            assert top[name] == value
            assert "\ufffd" not in "".join(top)
        names = {name for top in found["top_logprobs"] for name in top}
        assert any(name.startswith("bytes:\\x") for name in names)


def test_a_character_that_the_prompt_begins_comes_whole(any_server):
    tokenizer = any_server.service.engine.tokenizer
    ids = tokenizer.encode("keys \U0001f389", add_special_tokens=False)
    last = ids[-1]
    bias = {str(last): 100}
    options = {"logit_bias": bias, "max_tokens": 1, "temperature": 0}
    plain = completed(any_server, ids[:-1], **options)["choices"][0]
    echoed = completed(any_server, ids[:-1], echo=True, **options)["choices"][0]
    assert plain["text"] == "\U0001f389"
    assert echoed["text"] == "keys \U0001f389"
    body = {"prompt": ids[:-1], "ignore_eos": True, "echo": True, **options, "stream": True}
    told = any_server.post("/v1/completions", **body).text
    assert "\ufffd" not in told
    assert "\U0001f389" in told


def test_tokens_of_chats_have_their_spaces(any_server):
    body = {
        "messages": [{"role": "user", "content": "keys"}],
        "logprobs": True,
        "top_logprobs": 5,
        "ignore_eos": True,
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 3,
    }
    (choice,) = any_server.post("/v1/chat/completions", **body).json()["choices"]
    special = set(any_server.service.engine.tokenizer.all_special_tokens)
    content = [one for one in choice["logprobs"]["content"] if one["token"] not in special]
    joined = b"".join(bytes(one["bytes"]) for one in content).decode(errors="ignore")
    assert joined == choice["message"]["content"].replace("\ufffd", "")
