"""Chat completions: what openai's client sees, and that an answer is what the engine produces."""

from __future__ import annotations

import asyncio

import openai
import pytest

from server.running import CODER, GREEDY, running, said


def answer_of(engine, *contents, max_new_tokens=8, **options):
    """What the engine itself answers."""
    with engine.session() as session:
        return session.chat(said(*contents), max_new_tokens, **{**GREEDY, **options})


def chunks_of(server, *contents, **options):
    return list(server.chat(*contents, stream=True, **options))


def test_an_answer_is_what_the_engine_produces(server, engine):
    answer = server.chat("Write a stack.", extra_body={"return_token_ids": True})
    alone = answer_of(engine, "Write a stack.")
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].token_ids == alone.tokens.tolist()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == alone.prompt_tokens


def test_a_stream_has_the_text_and_the_tokens_of_an_answer_that_is_not_streamed(server):
    options = {"seed": 7, "temperature": 0.8, "max_tokens": 24}
    whole = server.chat("Write a queue.", extra_body={"return_token_ids": True}, **options)
    chunks = chunks_of(server, "Write a queue.", extra_body={"return_token_ids": True}, **options)
    told = [chunk.choices[0] for chunk in chunks]
    assert "".join(one.delta.content or "" for one in told) == whole.choices[0].message.content
    ids = [token for one in told for token in getattr(one, "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids
    assert told[0].delta.role == "assistant"
    assert told[-1].finish_reason == "length"


def test_the_last_chunk_has_the_usage_where_it_was_asked_for(server):
    plain = chunks_of(server, "Hello")
    assert all(chunk.choices for chunk in plain)
    *others, last = chunks_of(server, "Hello", stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in others)


def test_every_chunk_has_the_usage_so_far_where_that_was_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, "Hello", stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 8
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_log_probabilities_are_those_of_the_engine_to_the_bit(server, engine):
    answer = server.chat("Write a heap.", logprobs=True, top_logprobs=3)
    alone = answer_of(engine, "Write a heap.", logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [one.logprob for one in content] == alone.logprobs.tolist()
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [value for _, value in top] for top in alone.top_logprobs
    ]
    streamed = chunks_of(server, "Write a heap.", logprobs=True, top_logprobs=3)
    told = [one for chunk in streamed for one in _content(chunk.choices[0].logprobs)]
    assert [one.logprob for one in told] == alone.logprobs.tolist()


def _content(logprobs):
    return [] if logprobs is None else logprobs.content


def test_choices_have_seeds_that_follow_from_the_first(server):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    several = server.chat("Write a tree.", n=3, **options)
    alone = server.chat("Write a tree.", **options)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) > 1
    chunks = chunks_of(server, "Write a tree.", n=3, **options)
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_the_next_turn_computes_only_what_is_new(server):
    first = server.chat("Write a class.", max_tokens=30)
    text = first.choices[0].message.content
    second = server.chat("Write a class.", text, "Now another one.")
    held = first.usage.total_tokens
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens >= held - 1  # the last token had no K/V yet
    assert details.cached_tokens + details.cache_write_tokens == second.usage.prompt_tokens


def test_a_session_goes_on_under_its_name(server):
    body = {"session_id": "ada-1"}
    first = server.chat("My name is Ada.", max_tokens=20, extra_body=body)
    text = first.choices[0].message.content
    second = server.chat("My name is Ada.", text, "Who am I?", extra_body=body)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    names = {one["id"] for one in server.http.get("/v1/sessions").json()["data"]}
    assert "ada-1" in names
    server.http.delete("/v1/sessions/ada-1").raise_for_status()


def test_the_header_names_a_session_as_well(server):
    answer = server.http.post(
        "/v1/chat/completions",
        json={"messages": said("Hi"), "max_tokens": 1},
        headers={"X-Session-ID": "by-header", "X-Request-Id": "mine"},
    )
    assert answer.headers["x-session-id"] == "by-header"
    assert answer.headers["x-request-id"] == "mine"
    assert server.http.delete("/v1/sessions/by-header").status_code == 200


def test_a_stop_string_ends_the_answer_before_it(server):
    plain = server.chat("Write a class.", max_tokens=30).choices[0].message.content
    stop = plain[12:15]
    stopped = server.chat("Write a class.", max_tokens=30, stop=[stop]).choices[0]
    assert stopped.message.content == plain.partition(stop)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop


def test_of_several_stops_the_one_that_ended_the_answer_is_named(server):
    def ended(**stops):
        return server.chat("Write a class.", max_tokens=30, **stops).choices[0].stop_reason

    plain = server.chat("Write a class.", max_tokens=30, extra_body={"return_token_ids": True})
    text, token = plain.choices[0].message.content, plain.choices[0].token_ids[4]
    assert ended(stop=["nowhere", text[20:26], text[12:15]]) == text[12:15]
    assert ended(stop=["nowhere"], extra_body={"stop_token_ids": [token]}) == token
    assert ended(stop=["nowhere"]) is None


def test_the_bytes_of_tokens_make_the_text_of_an_answer(server):
    tokenizer = server.service.engine.tokenizer
    ids = tokenizer.encode("π🎉", add_special_tokens=False)
    texts = server.service.token_texts
    entries = [texts.entry(token, 0.0) for token in ids]
    assert "\ufffd" in entries[0].token
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "π🎉"


def test_the_end_token_can_be_ignored(server):
    end = server.service.engine.model.generation_config.eos_token_id[0]
    options = {"max_tokens": 3, "logit_bias": {str(end): 100}}
    assert server.chat("Hi", **options).usage.completion_tokens == 1
    answer = server.chat("Hi", extra_body={"ignore_eos": True}, **options)
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("field", "value", "param", "says"),
    [
        ("temperature", "hot", "temperature", "number"),
        ("temperature", -1, "temperature", "greater than or equal to 0"),
        ("top_p", 0, "top_p", "greater than 0"),
        ("n", 99, "n", "1 to 16"),
        ("n", 0, "n", "greater than or equal to 1"),
        ("logit_bias", {"x": 1}, "logit_bias", "token ids"),
        ("logit_bias", {"999999": 1}, "logit_bias", "expected ids from 0"),
        ("stop", "", "stop", "not empty"),
        ("messages", [], "messages", "at least 1"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role", "user"),
        ("messages", [{"role": "user"}], "messages[0]", "content is missing"),
        ("audio", {}, "audio", "not supported"),
        ("functions", [{}], "functions", "expected [] or None"),
        ("repeat_penalty", 0, "repeat_penalty", "greater than 0"),
        ("typical_p", 0.5, "typical_p", "expected 1 or None"),
        ("use_beam_search", True, "use_beam_search", "nothing else"),
        ("session_id", "../etc", "session_id", "pattern"),
        ("top_logprobs", 3, "top_logprobs", "logprobs: true"),
        ("stream_options", {"include_usage": True}, "stream_options", "with stream"),
        ("chat_template_kwarg", {}, "chat_template_kwarg", "mean chat_template_kwargs"),
        ("max_token", 5, "max_token", "did you mean max_tokens?"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(server, field, value, param, says):
    answer = server.http.post(
        "/v1/chat/completions", json={"messages": said("Hi"), "max_tokens": 1, field: value}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_another_model_is_not_found(server):
    answer = server.post("/v1/chat/completions", model="gpt-9", messages=said("Hi"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_an_answer_that_starts_within_a_character_never_sends_half_of_it(server):
    # tokens of single bytes: their text is complete with the last byte only
    tokenizer = server.service.engine.tokenizer
    ids = tokenizer.encode("é", add_special_tokens=False)
    bias = {str(token): 100 for token in ids}
    chunks = chunks_of(server, "Hi", logit_bias=bias, max_tokens=6, temperature=1.0, seed=1)
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks[:-2])


def test_other_requests_change_no_token(server, engine):
    import concurrent.futures

    prompts = [f"Write function number {i}." for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda text: server.chat(text).choices[0].message.content, prompts)
        )
    assert together == [answer_of(engine, text).text for text in prompts]


def test_an_answer_has_as_many_tokens_as_the_server_allows_by_default(engine, tmp_path):
    with running(engine, tmp_path, max_tokens=5) as server:
        body = {"ignore_eos": True}
        answer = server.openai.chat.completions.create(
            model=CODER, messages=said("Hi"), extra_body=body
        )
        assert answer.usage.completion_tokens == 5
        long = server.chat("Hi", max_tokens=9, extra_body=body)
        assert long.usage.completion_tokens == 9


def test_the_async_client_streams_the_same_text(server):
    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(
                model=CODER, messages=said("Write a list."), max_tokens=8, stream=True, **GREEDY
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(stream()) == server.chat("Write a list.").choices[0].message.content
