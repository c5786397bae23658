"""Calls of tools in text: found in any pieces of it; and what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.grammar import Grammar
from kvpager.text.tool_calls import Call, TextDelta, format_of_template, tool_call_format

FORMATS = ("hermes", "llama3", "mistral")
ONE = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'


def parse(name, *pieces):
    """Text beside the calls, and the calls as (name, arguments)."""
    parser = tool_call_format(name).parser()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.end()
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls = [event for event in events if isinstance(event, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def test_calls_amid_text_are_found():
    text = f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>"
    told, calls = parse("hermes", text)
    assert told.strip() == "Let me see."
    assert calls == [("add", {"a": 1, "b": "x"})] * 2


def test_a_call_that_was_not_closed_is_one_if_it_is_whole():
    assert parse("hermes", f"<tool_call>{ONE}")[1]
    assert parse("hermes", "<tool_call>{")[0] == "<tool_call>{"


@pytest.mark.parametrize(
    "text",
    ["<tool_call>no</tool_call>", "<tool_call>{}</tool_call>", "a < b", "<tool_", "</tool_call>"],
)
def test_what_is_no_call_stays_text(text):
    assert parse("hermes", text) == (text, [])


def test_a_whole_answer_is_a_call_of_llama_3():
    one = '{"name": "add", "parameters": {"a": 1}}'
    assert parse("llama3", one) == ("", [("add", {"a": 1})])
    assert parse("llama3", f"{one}; {one}")[1] == [("add", {"a": 1})] * 2
    assert parse("llama3", "Hello {}") == ("Hello {}", [])
    assert parse("llama3", '{"name": 3}') == ('{"name": 3}', [])


def test_an_array_is_calls_of_mistral():
    assert parse("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]")[1] == [("add", {"a": 1, "b": "x"})] * 2
    assert parse("mistral", f"[{ONE}]")[1]  # the marker is a special token, which is left out
    assert parse("mistral", "[1, 2]") == ("[1, 2]", [])


TEXTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            ONE,
            "[TOOL_CALLS]",
            "[",
            "]",
            "{",
            '"name"',
            "text ",
            "<",
            "\n",
        ]
    )
).map("".join)


@given(st.sampled_from(FORMATS), TEXTS, st.data())
def test_any_pieces_tell_what_the_whole_text_tells(name, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(name, *pieces) == parse(name, text)


@given(st.sampled_from(FORMATS), st.text(alphabet='<tol_ca/>{}[]" \n', max_size=60))
def test_text_without_calls_is_never_changed(name, text):
    told, calls = parse(name, text)
    assert calls == []
    assert told == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', "llama3"),
        ({"default": "plain", "tool_use": "tools <tool_call>"}, "hermes"),
        ("plain", None),
        (None, None),
    ],
)
def test_the_format_is_that_of_the_chat_template(template, name):
    found = format_of_template(template)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_forced_call_is_a_grammar(name, parallel):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"name": "add", "parameters": schema}, {"name": "stop"}]
    assert Grammar.lark(tool_call_format(name).lark(tools, parallel=parallel)).source
