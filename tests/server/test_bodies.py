"""Bodies of requests: what is counted before they are parsed, and what one of them may cost."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.server import bodies, json_limits
from kvpager.server.bodies import BodyBudget
from kvpager.server.errors import ApiError
from kvpager.server.json_limits import JsonStructure, check_schemas
from kvpager.server.routes import caller
from server.running import running, said

TEXT = st.text('a"\\\\[]{},:\u00e9\U0001f600\n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def counted(value):
    """values, names, texts and depth of a value, as `JsonStructure` defines them."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, (list, dict)):
        return 0, 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    sums = [sum(one[place] for one in inner) for place in range(3)]
    commas = max(0, len(value) - 1)
    depth = 1 + max((one[3] for one in inner), default=0)
    return sums[0] + commas + 1, sums[1] + names, sums[2] + names + 1, depth


@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.integers(1, 9))
def test_the_structure_is_what_a_parser_finds(value, ascii_only, piece):
    text = json.dumps(value, ensure_ascii=ascii_only)
    kept, json_limits._PIECE = json_limits._PIECE, piece
    try:
        found = JsonStructure.of(text.encode())
    finally:
        json_limits._PIECE = kept
    assert (found.values, found.names, found.texts, found.depth) == counted(value)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.integers(0, 3))
def test_a_text_is_simple_exactly_within_the_limits(value, ascii_only, beyond):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    most, names, texts, depth = counted(value)
    limits = {"MOST_NAMES": names, "MOST_TEXTS": texts, "MOST_DEPTH": depth}
    lowered = ["most", *limits][beyond]
    too_much = {"most": most, **limits}[lowered] > 0
    with mock.patch.multiple(json_limits, **limits):
        assert json_limits._is_simple(text, most)
    limits["most"] = most
    limits[lowered] -= too_much
    most = limits.pop("most")
    with mock.patch.multiple(json_limits, **limits):
        assert json_limits._is_simple(text, most) != too_much


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 65, "65 levels of lists and objects; expected at most 64"),
        (b"[" * 65 + b"]" * 65, "65 levels of lists and objects; expected at most 64"),
        (b"[" + b"1," * 300_000 + b"1]", "300001 values; expected at most 262144"),
        (b"[" + b"{}," * 200_000 + b"{}]", "values; expected at most"),
        (b"[" + b'{"a":"b"},' * 99_999 + b"1]", "299998 names, texts, lists and objects"),
        (b"{" + b'"a":1,' * 100_000 + b'"b":1}', "100001 names of fields; expected at most"),
    ],
)
def test_what_would_be_long_to_parse_is_refused_by_its_counts(body, says):
    with pytest.raises(ApiError) as refused:
        json_limits.check_structure(body, json_limits.LEAST_VALUES)
    assert says in refused.value.message
    assert refused.value.status == 400


@pytest.mark.parametrize("values", [["x"] * 300_000, [[]] * 300_000, {"a": [1] * 300_000}])
def test_the_field_that_has_too_much_is_named(values):
    body = json.dumps({"model": "a,b:[", "messages": [{"a": 1}] * 100, "stop": values, "n": 1})
    with pytest.raises(ApiError) as refused:
        json_limits.check_structure(body.encode(), json_limits.LEAST_VALUES)
    assert refused.value.param == "stop"
    assert re.match(r"stop has [36]0000\d values; expected at most 262144", refused.value.message)
    deep = b'{"model": "a", "tools" : ' + b"[" * 70 + b"]" * 70 + b', "n": 1}'
    with pytest.raises(ApiError) as refused:
        json_limits.check_structure(deep, json_limits.LEAST_VALUES)
    assert refused.value.param == "tools"


def test_bodies_together_stay_below_a_budget_and_the_oldest_always_ends(monkeypatch):
    monkeypatch.setattr(bodies, "_WAIT_SECONDS", 0.2)

    async def run():
        budget = BodyBudget(100)
        async with budget.opened() as first:
            await first(60)
            async with budget.opened() as second:
                await second(40)
                with pytest.raises(ApiError) as busy:
                    await second(1)
                assert (busy.value.status, busy.value.code) == (503, "busy")
                await first(1000)  # so that it ends
            waiting = asyncio.ensure_future(taken(budget, 100))
            await asyncio.sleep(0)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 1)

    async def taken(budget, count):
        async with budget.opened() as account:
            await account(count)

    asyncio.run(run())


def nested(schema, levels):
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def ask(server, body, path="/v1/chat/completions", **headers):
    kind = {"content-type": "application/json"}
    return server.http.post(path, content=body, headers=kind | headers)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "no UTF-8"),
        ('{"messages": []}'.encode("utf-16"), "no UTF-8"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "100000 levels"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"", "the body"),
        (b"[]", "the body"),
        (b'"x"', "the body"),
        (b"null", "the body"),
    ],
)
def test_a_body_that_is_no_object_of_json_is_400(server, body, says):
    answer = ask(server, body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_packed_body_is_415(server):
    import gzip

    packed = gzip.compress(b'{"messages": []}')
    assert ask(server, packed, **{"content-encoding": "gzip"}).status_code == 415


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("stop", ["x"] * 65, "stop: list should have at most 64 items"),
        ("stop", "x" * 5000, "of 5000 characters: string should have at most 4096"),
        ("stop_token_ids", [1] * 5000, "stop_token_ids: list should have at most 4096 items"),
        ("logit_bias", {str(i): 1 for i in range(5000)}, "logit_bias: dictionary should have at"),
        ("tools", [None] * 513, "tools: list should have at most 512 items"),
        ("messages", said(*["x"] * 8193), "messages: list should have at most 8192 items"),
        ("messages", said("x" * 600_000), "messages has 600"),
        ("user", "x" * 5000, "user is 'xxx"),
        ("n", 17, "n is 17; expected 1 to 16"),
    ],
)
def test_sizes_have_limits_that_name_the_field_its_size_and_the_limit(server, field, value, says):
    body = {"messages": said("Hi"), "max_tokens": 1, field: value}
    answer = ask(server, json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == field


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {str(i): {} for i in range(1001)}}, "1001 properties; expected at most"),
        (
            {"properties": {str(i): {} for i in range(101)}, "minProperties": 1},
            "101 properties beside minProperties",
        ),
        ({"enum": list(range(10_001))}, "10001 values of enums; expected at most 10000"),
        ({"anyOf": [{"enum": list(range(6000))}] * 2}, "12000 values of enums"),
        ({"const": "x" * 5000}, "5000 characters of a name, value or pattern"),
        ({"pattern": "x{1,100000}"}, "repetitions in a pattern; expected at most 4096"),
        ({"anyOf": [{}] * 5000}, "4001 schemas; expected at most 4000"),
        ({"properties": {"x" * 5000: {}}}, "5000 characters"),
        ({"enum": ["x" * 4000 + str(i) for i in range(60)]}, "names, values and patterns; exp"),
        (nested({}, 40), "33 levels of schemas; expected at most 32"),
    ],
)
def test_a_schema_that_would_be_long_to_compile_is_refused_by_its_counts(server, schema, says):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = ask(server, json.dumps({"messages": said("Hi"), "response_format": form}))
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    answer = ask(server, json.dumps({"input": "Hi", "text": text}), "/v1/responses")
    assert says in answer.json()["error"]["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ApiError) as refused:
        check_schemas([tool["function"]["parameters"]], "tools")
    assert says in refused.value.message


def test_prose_in_a_schema_has_no_limit_of_its_own():
    check_schemas([{"description": "x" * 100_000, "properties": {"a": {"title": "y" * 9000}}}], "a")


def test_an_error_shows_little_of_a_long_value(server):
    for body in ({"messages": "x" * 1_000_000}, {"model": "y" * 1_000_000, "messages": []}):
        answer = ask(server, json.dumps(body))
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 5000


def test_a_body_that_does_not_come_is_408(server, monkeypatch):
    import http.client

    monkeypatch.setattr(bodies, "_SECONDS", 0.2)
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    client.putrequest("POST", "/v1/chat/completions")
    client.putheader("content-type", "application/json")
    client.putheader("content-length", "1000")
    client.endheaders(b'{"messages": ')
    answer = client.getresponse()
    assert answer.status == 408
    assert "13 bytes" in json.loads(answer.read())["error"]["message"]
    client.close()


def test_reading_a_request_has_its_time(engine, monkeypatch):
    parsed, answered = bodies.parsed, threading.Event()

    def slow(validate, body, fields=()):
        if b"slow" in body:
            answered.wait(60)
        return parsed(validate, body, fields)

    monkeypatch.setattr(caller, "parsed", slow)
    with running(engine, None, read_timeout=0.3) as server:
        answer = server.post("/v1/completions", prompt="slow", max_tokens=1)
        answered.set()
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert "0.3 s, which read_timeout allows" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
