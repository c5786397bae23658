"""Calls of tools in text: found in any pieces of it; and what is no call stays text.

Each format is held to a template of its family, in three ways: what the template writes is read as
the call that it was, in any pieces, and is a text of the grammar that forces calls.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from tokenizer_settings import wrapped

from call_templates import ALONE, TEMPLATES
from kvpager import InvalidArgumentError
from kvpager._runtime.text.call_parsing import CallDelta, ReasoningDelta, TextDelta
from kvpager._runtime.text.json_values import typed
from kvpager._runtime.text.tokenizer import Rendering, Tokenizer
from kvpager._runtime.text.tool_calls import (
    FORMATS,
    call_ids_of,
    format_of_template,
    tool_call_format,
    unknown_format,
)
from kvpager.grammar import Grammar, compiler_of

ONE = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "kelvin"]},
                "days": {"type": "integer"},
                "places": {"type": "array", "items": {"type": "number"}},
                "exact": {"type": "boolean"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "stop",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
]
CALLS = [
    ("weather", {"city": "Oslo", "unit": "kelvin", "days": 2, "places": [1, 2.5], "exact": True}),
    ("weather", {"city": "5", "exact": False}),
    ("weather", {"city": 'A "quoted" {name},\n  in <two> lines\\', "days": -1}),
    ("weather", {"city": "漢字 é 🙂"}),
    ("stop", {}),
]


def parse(name, *pieces, tools=TOOLS):
    """Text beside the calls, and the calls as (name, arguments)."""
    parser = tool_call_format(name).parser(tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.end()
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls = [event for event in events if isinstance(event, CallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


def tokenizer_of(name):
    made = wrapped.__wrapped__("llama3", "chatml")
    made.chat_template = TEMPLATES[name]
    return Tokenizer(made, 1 << 20)


def written(name, *calls):
    """What the family's template writes for an answer that is these calls."""
    tokenizer = tokenizer_of(name)
    made = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments)},
        }
        for number, (tool, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    rendering = Rendering({"tools": [{"function": one} for one in TOOLS]}, "tokens", False, False)
    whole = tokenizer.render([message], rendering)
    rest = tokenizer.render([{**message, "tool_calls": [], "content": "ANSWER"}], rendering)
    before, _, after = rest.partition("ANSWER")
    if name == "harmony":
        before, after = before.removesuffix("<|channel|>final<|message|>"), ""
    return whole[len(before) : len(whole) - len(after)]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_what_a_template_writes_is_read_as_the_same_call(name, call):
    told, calls = parse(name, written(name, call))
    assert calls == [call]
    assert told.strip() == ""


@pytest.mark.parametrize("name", [one for one in TEMPLATES if one not in ALONE])
def test_several_calls_are_read_one_by_one(name):
    told, calls = parse(name, written(name, *CALLS))
    assert calls == CALLS
    assert told.strip() == ""


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_pieces_tell_what_the_whole_text_tells(name):
    text = "Let me see. " * (name not in ALONE) + written(name, *CALLS[: 1 if name in ALONE else 3])
    expected = parse(name, text)
    assert expected[1]
    for size in (1, 2, 3, 7, 20):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(name, *pieces) == expected


@pytest.mark.parametrize(
    "name", [one for one in TEMPLATES if one not in ("granite", "mistral", "mistral_args", *ALONE)]
)
def test_a_call_is_told_at_its_end_and_no_text_of_it_before(name):
    parser = tool_call_format(name).parser(TOOLS)
    text = written(name, *CALLS[:2])
    events, told_at = [], []
    for number, letter in enumerate(text):
        new = parser.push(letter)
        told_at += [number] * any(isinstance(event, CallDelta) for event in new)
        events += new
    assert len(told_at) == 2 or name in ("phi4_mini", "command_r")  # which write a list
    assert all(isinstance(event, CallDelta) or not event.text.strip() for event in events)


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_call_that_is_cut_what_is_known_is_told_and_no_markup(name):
    for call in CALLS:
        text, told_calls = written(name, call).lstrip(), []
        for length in range(2, len(text)):
            if name == "llama3" and length < len('{"name"'):
                continue  # it may be text that is JSON
            parser = tool_call_format(name).parser(TOOLS)
            events = parser.push(text[:length]) + parser.end(cut=True)
            calls = [event for event in events if isinstance(event, CallDelta)]
            assert all(isinstance(event, CallDelta) or not event.text.strip() for event in events)
            assert all(one.name == call[0] for one in calls)
            for one in calls:
                known = from_json(one.arguments or "{}", allow_partial=True)
                assert known.items() <= call[1].items() or list(known)[-1] == "places"
            told_calls += calls
        assert len({one.arguments for one in told_calls}) >= min(3, 1 + len(call[1]))
        known = from_json(told_calls[-1].arguments or "{}", allow_partial=True)
        assert len(known) >= len(call[1]) - (name == "glm")  # whose values end with what follows


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_a_template_is_told_by_its_text(name):
    assert format_of_template(TEMPLATES[name]).name == name
    assert format_of_template({"default": "plain", "tool_use": TEMPLATES[name]}).name == name


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_template_writes_is_a_text_of_the_grammar_that_forces_calls(name, parallel):
    tokenizer = tokenizer_of(name)
    ends = frozenset(tokenizer.wrapped.convert_tokens_to_ids(["</s>"]))
    grammar = Grammar.lark(tool_call_format(name).lark(TOOLS, parallel=parallel))
    compiler = compiler_of(tokenizer, 1 << 10, ends)
    several = parallel and name not in ALONE
    for calls in ([CALLS[0]], [CALLS[1]], [CALLS[4]], CALLS[:2] if several else [CALLS[3]]):
        text = written(name, *calls).removesuffix("<|call|>").lstrip("\n")
        if name == "mistral":
            text = without_ids(text)
        ids = tokenizer.encode(text, "text", special_tokens=False).tolist()
        matcher = compiler._matcher(grammar).deep_copy()
        taken = [token for token in ids if matcher.consume_token(token)]
        assert taken == ids, text
        assert matcher.is_accepting()
        assert parse(name, text)[1] == calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_with_a_schema_an_answer_is_a_call_or_json_of_it(name):
    tokenizer = tokenizer_of(name)
    ends = frozenset(tokenizer.wrapped.convert_tokens_to_ids(["</s>"]))
    schema = {"type": "object", "properties": {"name": {"enum": [1]}}, "required": ["name"]}
    calls = Grammar.lark(tool_call_format(name).lark(TOOLS, parallel=False))
    grammar = Grammar.either(Grammar.json_schema(schema), calls)
    call = written(name, CALLS[4]).removesuffix("<|call|>").lstrip("\n")
    call = without_ids(call) if name == "mistral" else call
    for text, fits in ((call, True), ('{"name": 1}', True), ('{"name": 2}', False), ("Hi", False)):
        matcher = compiler_of(tokenizer, 1 << 10, ends)._matcher(grammar).deep_copy()
        ids = tokenizer.encode(text, "text", special_tokens=False).tolist()
        assert all(matcher.consume_token(token) for token in ids) == fits, text


def without_ids(text):
    """The answer of a Mistral model: ids are the client's, and only in history."""
    calls = json.loads(text.removeprefix("[TOOL_CALLS]"))
    return "[TOOL_CALLS]" + json.dumps(
        [{key: one[key] for key in ("name", "arguments")} for one in calls], ensure_ascii=False
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_that_are_control_tokens_are_these_in_the_grammar(name):
    form = tool_call_format(name)
    tokens = {mark: 300 + number for number, mark in enumerate(form.marks)}
    source = form.lark(TOOLS, parallel=True, tokens=tokens)
    assert Grammar.lark(source).source
    written_marks = [mark for mark in form.marks if json.dumps(mark)[1:-1] in source]
    assert written_marks == []
    assert not form.marks or name == "llama3" or "<[30" in source


# What is no call


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text",
    [
        "a < b",
        "Hello {}",
        "[1, 2]",
        "<tool_",
        "</tool_call>",
        "<",
        "[TOOL",
        '{"name": 3}',
        "<｜tool",
    ],
)
def test_text_that_looks_like_a_beginning_is_released(name, text):
    assert parse(name, text) == (text, [])
    assert parse(name, *text) == (text, [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_is_cut_off_is_text_and_no_other_call(name):
    text = written(name, CALLS[0])
    for end in range(1, len(text)):
        told, calls = parse(name, text[:end])
        assert calls in ([], [CALLS[0]])
        if not calls and name != "harmony":
            assert told == text[:end]


TEXTS = st.lists(
    st.sampled_from(
        [
            *sorted({mark for form in FORMATS.values() for mark in form.marks}),
            *(
                "<function=f>",
                "</function>",
                "<parameter=a>",
                "</parameter>",
                "<arg_key>",
                "</arg_key>",
            ),
            *("<arg_value>", "</arg_value>", '<invoke name="f">', "</invoke>", "call:f{", "a:1}"),
            *(ONE, "[", "]", "{", "}", '"name"', "text ", "<", "\n", "f", "functions.f:0", "{}"),
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.data())
def test_any_pieces_of_any_text_tell_what_the_whole_tells(name, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(name, *pieces) == parse(name, text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tol_ca/>{}[]" \n|', max_size=60))
def test_text_without_calls_is_never_changed(name, text):
    if name == "harmony" and "|" in text:
        return
    assert parse(name, text) == (text, [])


# Single formats


def test_calls_amid_text_are_found():
    text = f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>"
    told, calls = parse("hermes", text)
    assert told.strip() == "Let me see."
    assert calls == [("add", {"a": 1, "b": "x"})] * 2


def test_a_call_that_was_not_closed_is_one_if_it_is_whole():
    assert parse("hermes", f"<tool_call>{ONE}")[1]
    assert parse("hermes", "<tool_call>{")[0] == "<tool_call>{"


def test_a_closing_mark_within_an_argument_closes_nothing():
    arguments = {"city": "x </tool_call> y </parameter> z </arg_value> w"}
    for name in ("hermes", "qwen3_coder", "glm", "seed_oss", "minimax"):
        assert parse(name, written(name, ("weather", arguments)))[1] == [("weather", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text_where_it_stands(text):
    assert parse("hermes", text) == (text, [])
    assert parse("hermes", f"{text}<tool_call>{ONE}</tool_call>")[0] == text


def test_a_whole_answer_is_a_call_of_llama_3():
    one = '{"name": "add", "parameters": {"a": 1}}'
    assert parse("llama3", one) == ("", [("add", {"a": 1})])
    assert parse("llama3", f"<|python_tag|>{one}; {one}")[1] == [("add", {"a": 1})] * 2
    assert parse("llama3", '{"type": "function", ' + one[1:])[1] == [("add", {"a": 1})]
    called = '<|python_tag|>brave_search.call(query="a, b", count=3)'
    assert parse("llama3", called) == ("", [("brave_search", {"query": "a, b", "count": 3})])
    for text in ("<|python_tag|>import os", '<|python_tag|>f.call(x=open("y"))', '{"name": 3}'):
        assert parse("llama3", text) == (text, [])


def test_json_that_is_no_call_of_llama_3_is_released_before_its_end():
    parser = tool_call_format("llama3").parser()
    assert parser.push('{"name": "Ada", "ag') == []
    assert parser.push('e": 36') == [TextDelta('{"name": "Ada", "age": 36')]


def test_both_ways_of_mistral_are_read_whichever_is_written():
    for name in ("mistral", "mistral_args"):
        assert parse(name, f"Wait.[TOOL_CALLS][{ONE}, {ONE}]") == (
            "Wait.",
            [("add", {"a": 1, "b": "x"})] * 2,
        )
        text = '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
        assert parse(name, text) == ("", [("f", {"a": 1}), ("g", {})])


def test_the_channels_of_gpt_oss_are_reasoning_text_and_calls():
    parser = tool_call_format("harmony").parser()
    text = (
        "<|channel|>analysis<|message|>Hm. I look.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Wait.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    events = [event for letter in text for event in parser.push(letter)] + parser.end()
    reasoning = "".join(one.text for one in events if isinstance(one, ReasoningDelta))
    spoken = "".join(one.text for one in events if isinstance(one, TextDelta))
    assert (reasoning, spoken) == ("Hm. I look.", "Wait.")
    assert events[-1] == CallDelta(0, "f", '{"a": 1}')
    assert parse("harmony", "<|channel|>final<|message|>Hi <|there<|return|>") == ("Hi <|there", [])
    assert parse("harmony", "no channel at all") == ("no channel at all", [])


def test_a_section_without_calls_is_text():
    text = "<|tool_calls_section_begin|>no<|tool_calls_section_end|>"
    assert parse("kimi_k2", text) == (text, [])
    assert parse("kimi_k2", *text) == (text, [])


def test_names_without_their_line_break_are_read_of_glm():
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
    assert parse("glm", text) == ("", [("weather", {"city": "Oslo"})])


def test_a_call_without_its_outer_tag_is_read_of_qwen3_coder():
    text = (
        "So:\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    )
    assert parse("qwen3_coder", text)[1] == [("weather", {"city": "Oslo"})]


# Arguments whose format writes texts without quotes

DEFS = {"$defs": {"Kind": {"enum": ["a", "b"]}, "Size": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("True", {"type": "string"}, "True"),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("five", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ("[1]", {"items": {}}, [1]),
        ("1", {"enum": ["1", 2]}, "1"),
        ("2", {"enum": ["1", 2]}, 2),
        ("2", {"const": 2}, 2),
        ("2", {"$ref": "#/$defs/Size"}, 2),
        ("a", {"$ref": "#/$defs/Kind"}, "a"),
        ("7", {"allOf": [{"$ref": "#/$defs/Size"}]}, 7),
        ("7", {"$ref": "#/$defs/None"}, 7),
        ("five", {"type": "integer"}, "five"),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 100_000, {}, "[" * 100_000),
        ("Oslo", None, "Oslo"),
        ("5", None, 5),
        ('"x"', None, '"x"'),
    ],
)
def test_plain_text_is_the_value_that_the_schema_says(text, schema, value):
    found = typed(text, schema, DEFS)
    assert found == value
    assert type(found) is type(value)


def test_a_schema_that_refers_to_itself_ends():
    schema = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}]}}}
    assert typed("5", {"$ref": "#/$defs/A"}, schema) == 5


# Which format it is


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% if tools %}<TOOLCALL>{{ x }}</TOOLCALL>{% endif %}", "<TOOLCALL>"),
        ("{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}", "<tool_call>"),
        ("{% if tools %}<function=x>{}</function>{% endif %}", "<function=x>"),
        ("{% if tools %}{{ x }}{% endif %}", "no marks of calls"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', "no marks of calls"),
        ("plain", "shows it no tools"),
        (None, "shows it no tools"),
    ],
)
def test_a_format_that_is_not_known_is_named_and_not_guessed(template, word):
    assert format_of_template(template) is None
    said = unknown_format(template)
    assert word in said
    assert all(name in said for name in FORMATS)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidArgumentError, match="tool_calls is 'no'; expected hermes, llama3"):
        tool_call_format("no")


def test_ids_are_as_the_template_insists():
    mistral, kimi = call_ids_of(TEMPLATES["mistral"]), call_ids_of(TEMPLATES["kimi_k2"])
    assert len(mistral("call_0123456789", "f", 0)) == 9
    assert mistral("abcDEF123", "f", 0) == "abcDEF123"
    assert mistral("toolu_1", "f", 0) != mistral("toolu_2", "f", 1)
    assert kimi("call_7", "f", 3) == "functions.f:3"
    assert kimi("functions.g:1", "g", 3) == "functions.g:1"
    assert call_ids_of(TEMPLATES["hermes"]) is None


def test_an_answer_to_a_call_has_the_id_of_its_call():
    made = wrapped.__wrapped__("llama3", "chatml")
    made.chat_template = (
        "<|tool_call_argument_begin|>{% for m in messages %}{{ m.tool_call_id }}"
        "{% for call in m.tool_calls or [] %}{{ call.id }};{% endfor %}{% endfor %}"
    )
    calls = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in ("x", "y")]
    answers = [{"role": "tool", "tool_call_id": one, "content": ""} for one in ("y", "x")]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]
    text = Tokenizer(made, 1 << 20).render(messages, Rendering())
    assert text.endswith("functions.f:0;functions.f:1;functions.f:1functions.f:0")
