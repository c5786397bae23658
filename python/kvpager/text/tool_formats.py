"""The formats in which open models write calls of tools: how each is read, and its grammar.

Each is written down as the model's own chat template has it.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from kvpager.text.call_parsing import (
    BLANK,
    Call,
    CallParser,
    Event,
    Found,
    Marks,
    Reading,
    ReasoningDelta,
    SpanParser,
    WholeParser,
    as_text,
    joined,
    overlap,
)
from kvpager.text.json_values import is_text, loads, typed

NO_TOKENS: Mapping[str, int] = MappingProxyType({})
Tools: TypeAlias = Sequence[Mapping[str, Any]]
# Any number of blanks would be JSON too, and some models write nothing else.
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {**JSON_SPACING, "item_separator": ",", "key_separator": ":"}


class ToolCallFormat(ABC):
    """How a model writes calls.

    Attributes:
        name: of the format.
        marks: texts that are control tokens of a tokenizer where it has them.
        always: whether answers without tools are written in it too.
    """

    name = ""
    marks: tuple[str, ...] = ()
    always = False

    @abstractmethod
    def parser(self, tools: Tools = ()) -> CallParser:
        """For one answer. tools: functions, each with a name and parameters (a JSON schema)."""

    def lark(self, tools: Tools, *, parallel: bool, tokens: Mapping[str, int] = NO_TOKENS) -> str:
        """A grammar of answers that are calls of these tools and nothing else, for `Grammar.lark`.

        Args:
            tools: as for `parser`.
            parallel: whether there may be several calls.
            tokens: ids of the marks that are control tokens.
        """
        grammar = _Lark(tokens, self.marks)
        before, calls, between, after = self._rules(grammar, tools)
        repeated = f"call ({between} call)*" if parallel and between is not None else "call"
        return grammar.text(f"{before} {repeated} {after}", " | ".join(calls))

    @abstractmethod
    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        """What is before the calls, each tool's call, what is between (None: one alone), behind."""


class Json(ToolCallFormat):
    """Calls as JSON objects between marks: Hermes, Qwen and many others."""

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str | None,
        *,
        listed: bool = False,
        keys: tuple[str, str] = ("name", "arguments"),
        number: str | None = None,
        blank: str = "",
        others: tuple[tuple[str, str | None], ...] = (),
    ) -> None:
        """Writes calls so.

        Args:
            name: of the format.
            opening: mark before a call, or a list of calls.
            closing: mark behind it; None: it ends with the answer.
            listed: whether the marks are around a list.
            keys: of a call's name and arguments.
            number: key of a call's number, as text; None: it has none.
            blank: what is written between a mark and JSON.
            others: marks that are read, and not written.
        """
        self.name = name
        self.marks = tuple(mark for mark in (opening, closing) if mark)
        self._spans = ((opening, closing), *others)
        self._listed, self._keys, self._blank, self._number = listed, keys, blank, number

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        return SpanParser(Marks(self._spans), self._read)

    def _read(self, span: str) -> Found | Reading:
        body = span
        for opening, closing in self._spans:
            if span.startswith(opening):
                body = span.removeprefix(opening).removesuffix(closing or "")
                break
        return _json_calls(body, self._keys)

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        opening, closing = self._spans[0]
        begin = grammar.literal(opening + self._blank)
        end = grammar.literal(self._blank + closing) if closing else ""
        objects = [grammar.json(_call_schema(tool, self._keys, self._number)) for tool in tools]
        if self._listed:
            separator = grammar.literal(", ")
            return f'{begin} "["', objects, separator, f'"]" {end}'
        return "", [f"{begin} {one} {end}" for one in objects], grammar.literal("\n"), ""


class Llama3(ToolCallFormat):
    """`{"name": ..., "parameters": {...}}`, as a whole answer, also behind `<|python_tag|>`."""

    name = "llama3"
    marks = ("<|python_tag|>",)
    _head = re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"([^"]*)"'
    )

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        beginnings = ('{"name"', '{ "name"', '{"type": "function"', "<|python_tag|>")
        return WholeParser(beginnings, self._read, self._is_other)

    def _is_other(self, text: str) -> bool:
        found = self._head.match(text)
        return found is not None and found[1] not in ("parameters", "arguments")

    def _read(self, text: str) -> Found | Reading:
        body = text.removeprefix("<|python_tag|>").strip(BLANK)
        called = re.fullmatch(r"([A-Za-z_]\w*)\.call\((.*)\)", body, re.DOTALL)
        if called is not None and body != text:
            return _python_call(called[1], called[2])
        return _json_calls(body, ("name", "parameters"))

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        keys = ("name", "parameters")
        return "", [grammar.json(_call_schema(tool, keys)) for tool in tools], None, ""


class Mistral(ToolCallFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, and newer `[TOOL_CALLS]name[ARGS]{...}`."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _named = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]", re.DOTALL)

    def __init__(self, name: str, *, named: bool) -> None:
        """named: whether it is written in the newer way; both are read."""
        self.name = name
        self._writes_names = named

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        return SpanParser(Marks((("[TOOL_CALLS]", None),)), self._read)

    def _read(self, span: str) -> Found | Reading:
        body = span.removeprefix("[TOOL_CALLS]").strip(BLANK)
        if self._named.match(body) is None:
            return _json_calls(body, ("name", "arguments"))
        found: Found = []
        at = 0
        while at < len(body):
            named = self._named.match(body, at)
            if named is None:
                return Reading.NOT_A_CALL
            try:
                value, at = _raw_json(body, named.end())
            except ValueError:
                return Reading.NOT_A_CALL
            if not isinstance(value, dict):
                return Reading.NOT_A_CALL
            found.append((named[1], _dumped(value)))
            at = _behind(body, at, "[TOOL_CALLS]")
        return found

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        mark = grammar.literal("[TOOL_CALLS]")
        if self._writes_names:
            calls = [
                f"{mark} {grammar.literal(tool['name'])} {grammar.literal('[ARGS]')} "
                f"{grammar.json(_parameters(tool))}"
                for tool in tools
            ]
            return "", calls, '""', ""
        objects = [grammar.json(_call_schema(tool, ("name", "arguments"))) for tool in tools]
        return f'{mark} "["', objects, grammar.literal(", "), '"]"'


class DeepSeek(ToolCallFormat):
    """Name and arguments between special tokens, in a section; V3 puts arguments in a fence."""

    marks = (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
        "<｜tool▁call▁begin｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        "<｜tool▁sep｜>",  # noqa: RUF001
    )

    def __init__(self, name: str, *, fenced: bool) -> None:
        """fenced: whether arguments are written in a fence, as V3 does; both are read."""
        self.name = name
        self._fenced = fenced

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        opening, closing, call, close = self.marks[:4]
        return SpanParser(Marks(((call, close),), (opening, closing)), self._read)

    def _read(self, span: str) -> Found | Reading:
        body = span.removeprefix(self.marks[2]).removesuffix(self.marks[3])
        first, separator, rest = body.partition(self.marks[4])
        fenced = re.fullmatch(r"\s*(\S+?)\s*```json\s*(.*?)\s*(?:```)?\s*", rest, re.DOTALL)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first.strip(BLANK), rest)
        return _one(name if separator else "", arguments, closed=span.endswith(self.marks[3]))

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        begin, end, call, close, separator = map(grammar.literal, self.marks)
        calls = []
        for tool in tools:
            name, body = grammar.literal(tool["name"]), grammar.json(_parameters(tool))
            if self._fenced:
                fence = grammar.literal(f"{tool['name']}\n```json\n")
                calls.append(f'{call} "function" {separator} {fence} {body} "\\n```" {close}')
            else:
                calls.append(f"{call} {name} {separator} {body} {close}")
        return begin, calls, '"\\n"' if self._fenced else '""', end


class Kimi(ToolCallFormat):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    name = "kimi_k2"
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    )

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        opening, closing, call, close = self.marks[:4]
        return SpanParser(Marks(((call, close),), (opening, closing)), self._read)

    def _read(self, span: str) -> Found | Reading:
        body = span.removeprefix(self.marks[2]).removesuffix(self.marks[3])
        head, separator, rest = body.partition(self.marks[4])
        name = re.sub(r":\d+$", "", head.strip(BLANK)).removeprefix("functions.")
        return _one(name if separator else "", rest, closed=span.endswith(self.marks[3]))

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        begin, end, call, close, separator = map(grammar.literal, self.marks)
        calls = [
            f"{call} {grammar.literal('functions.' + tool['name'] + ':')} /[0-9]{{1,3}}/ "
            f"{separator} {grammar.json(_parameters(tool))} {close}"
            for tool in tools
        ]
        return begin, calls, '""', end


class Tags(ToolCallFormat):
    """Calls in tags, with a tag for each argument, whose value is plain text if it is a text."""

    def __init__(
        self,
        name: str,
        span: tuple[str, str],
        call: tuple[str, str],
        argument: tuple[str, str, str],
        *,
        sectioned: bool = False,
        line: str = "\n",
        others: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Writes calls so.

        Args:
            name: of the format.
            span: marks around one call, or with `sectioned` around all of them.
            call: what is before and behind a call's name.
            argument: what is before and behind an argument's name, and behind its value.
            sectioned: whether `span` is around all calls.
            line: what is written around a value.
            others: marks that are read, and not written.
        """
        self.name = name
        self._span, self._call, self._argument = span, call, argument
        self._sectioned, self._line, self._others = sectioned, line, others
        self.marks = span
        tag = re.match(r"<\w+", call[0])
        self._closing = "" if tag is None else f"</{tag[0][1:]}>"
        before, behind, end = (re.escape(one).replace("\\\n", r"\s*") for one in argument)
        follows = rf"(?=\s*(?:{before}|{re.escape(self._closing) or before}|\Z))"
        self._arguments = re.compile(
            rf"\s*{before}(?P<name>.*?){behind}(?P<value>.*?){end}{follows}", re.DOTALL
        )

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        schemas = {tool["name"]: _parameters(tool) for tool in tools}
        if self._sectioned:
            marks = Marks(((self._call[0], self._closing), *self._others), self._span)
        else:
            marks = Marks((self._span, *self._others))
        return SpanParser(marks, lambda span: self._read(span, schemas))

    def _read(self, span: str, schemas: Mapping[str, Any]) -> Found | Reading:
        body = span
        if not self._sectioned and span.startswith(self._span[0]):
            body = span.removeprefix(self._span[0]).removesuffix(self._span[1])
        body = body.strip(BLANK)
        before, behind = self._call
        if not body.startswith(before):
            return Reading.NOT_A_CALL
        body = body.removeprefix(before)
        name = re.match(r"\s*([A-Za-z0-9_.\-]+)\s*", body)
        if name is None or not body[name.end() :].startswith(behind):
            return Reading.NOT_A_CALL
        at, schema = name.end() + len(behind), schemas.get(name[1], {})
        properties, _ = _properties(schema)
        values: dict[str, Any] = {}
        while (found := self._arguments.match(body, at)) is not None:
            key, value = found["name"].strip(BLANK), found["value"]
            if self._line:
                value = value.removeprefix(self._line).removesuffix(self._line)
            values[key] = typed(value, properties.get(key), schema)
            at = found.end()
        rest = body[at:].strip(BLANK)
        if rest not in ("", self._closing):
            return Reading.MORE if self._argument[0] in rest else Reading.NOT_A_CALL
        if not rest and not span.endswith(self._span[1]):
            return Reading.NOT_A_CALL  # it was cut off, perhaps before another argument
        return [(name[1], _dumped(values))]

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        calls = []
        opening, closing = self._span
        for tool in tools:
            head = self._call[0] + tool["name"] + self._call[1]
            head = f"{opening}\n{head}\n" if self._opens_line else f"{opening}{head}\n"
            if self._sectioned:
                head = self._call[0] + tool["name"] + self._call[1] + "\n"
            tail = f"{self._closing}\n" if self._closing else ""
            tail += "" if self._sectioned else closing
            arguments = self._argument_rules(grammar, _parameters(tool))
            calls.append(f"{grammar.literal(head)} {arguments} {grammar.literal(tail)}")
        if self._sectioned:
            return grammar.literal(f"{opening}\n"), calls, '""', grammar.literal(closing)
        return "", calls, grammar.literal("\n"), ""

    @property
    def _opens_line(self) -> bool:
        return bool(self._call[0])

    def _argument_rules(self, grammar: _Lark, schema: Mapping[str, Any]) -> str:
        before, behind, end = self._argument
        properties, required = _properties(schema)
        rules = []
        for key, value in properties.items():
            opening = grammar.literal(f"{before}{key}{behind}{self._line}")
            closing = f"{self._line}{end}\n"
            rule = f"{opening} {grammar.value(value, schema, closing)}"
            rules.append(rule if key in required else f"({rule})?")
        return " ".join(rules) or '""'


class Gemma(ToolCallFormat):
    """`call:name{key:<escape>text<escape>,other:5}` between marks."""

    def __init__(self, name: str, span: tuple[str, str], quote: str) -> None:
        """span: marks around a call. quote: mark around texts."""
        self.name = name
        self.marks = (*span, quote)
        self._quote = quote

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        return SpanParser(Marks(((self.marks[0], self.marks[1]),)), self._read)

    def _read(self, span: str) -> Found | Reading:
        body = span.removeprefix(self.marks[0]).removesuffix(self.marks[1])
        called = re.fullmatch(r"\s*call:\s*([A-Za-z0-9_.\-]+)\s*(\{.*\})\s*", body, re.DOTALL)
        if body.count(self._quote) % 2:
            return Reading.MORE
        if called is None:
            return Reading.NOT_A_CALL
        texts = called[2].split(self._quote)
        for number in range(len(texts)):
            if number % 2:
                texts[number] = json.dumps(texts[number])
            else:
                texts[number] = re.sub(
                    r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:", r'\1"\2":', texts[number]
                )
        return _one(called[1], "".join(texts), closed=True)

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        begin, end, quote = map(grammar.literal, self.marks)
        calls = []
        for tool in tools:
            schema = _parameters(tool)
            properties, required = _properties(schema)
            pairs = []
            for key, value in properties.items():
                first = grammar.literal(f"{key}:")
                pairs.append((key in required, f"{first} {grammar.quoted(value, schema, quote)}"))
            body = _separated(pairs)
            head = grammar.literal("call:" + tool["name"] + "{")
            calls.append(f'{begin} {head} {body} "}}" {end}')
        return "", calls, '""', ""


class Harmony(ToolCallFormat):
    """gpt-oss: channels of an answer, of which `commentary to=functions.name` is a call."""

    name = "harmony"
    marks = (
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|call|>",
        "<|start|>",
        "<|end|>",
        "<|return|>",
    )
    always = True

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        return _HarmonyParser()

    def _rules(self, grammar: _Lark, tools: Tools) -> tuple[str, list[str], str | None, str]:
        channel, message, constrain = map(grammar.literal, self.marks[:3])
        calls = [
            f"{channel} {grammar.literal('commentary to=functions.' + tool['name'] + ' ')} "
            f'{constrain} "json" {message} {grammar.json(_parameters(tool))}'
            for tool in tools
        ]
        return "", calls, None, ""


class _HarmonyParser:
    """Header and body by turns: `<|channel|>` ... `<|message|>` body `<|end|>`."""

    _to = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.\-]+)")
    _ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = None  # of what follows; None: of an answer without any
        self._reads_header = False
        self._body = ""
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return joined(events)

    def end(self) -> list[Event]:
        events: list[Event] = []
        held, self._held = self._held, ""
        if not self._reads_header:
            self._add(held, events)
            self._close(events, closed=False)
        return joined(events)

    def _step(self, events: list[Event]) -> bool:
        marks = ("<|message|>",) if self._reads_header else self._ends
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            if not self._reads_header:
                kept = max(overlap(self._held, mark) for mark in marks)
                self._add(self._held[: len(self._held) - kept], events)
                self._held = self._held[len(self._held) - kept :]
            return False
        at, mark = min(found)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        if self._reads_header:
            self._header, self._reads_header = before, False
            return True
        self._add(before, events)
        self._close(events, closed=True)
        self._reads_header = mark in ("<|start|>", "<|channel|>")
        return True

    def _add(self, text: str, events: list[Event]) -> None:
        header = self._header or ""
        if self._to.search(header):
            self._body += text
        elif "analysis" in header:
            events += [ReasoningDelta(text)] if text else []
        else:
            events += as_text(text)

    def _close(self, events: list[Event], *, closed: bool) -> None:
        """At the end of a body, that of the answer or a mark."""
        called = self._to.search(self._header or "")
        if called is not None:
            body, self._body = self._body, ""
            found = _one(called[1], body, closed=closed)
            if isinstance(found, Reading):
                events += as_text(body)
            else:
                events.append(Call(self._calls, *found[0]))
                self._calls += 1
        self._header = None


class _Lark:
    """Makes the text of a grammar."""

    def __init__(self, tokens: Mapping[str, int], marks: Sequence[str]) -> None:
        known = sorted((mark for mark in marks if mark in tokens), key=len, reverse=True)
        self._tokens = tokens
        self._marks = re.compile(f"({'|'.join(map(re.escape, known))})") if known else None
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Text, in which marks are their tokens."""
        if not text:
            return '""'
        parts = [text] if self._marks is None else self._marks.split(text)
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part)
            for part in parts
            if part
        )

    def json(self, schema: Mapping[str, Any], spacing: Mapping[str, Any] = JSON_SPACING) -> str:
        """JSON of a schema."""
        return self._rule("%json " + json.dumps({"x-guidance": spacing, **schema}))

    def value(self, schema: Any, root: Mapping[str, Any], closing: str) -> str:
        """A value as plain text if it is a text, else as JSON; and what is behind it."""
        texts = _choices(schema)
        if texts is not None:
            return f"({' | '.join(map(self.literal, texts))}) {self.literal(closing)}"
        if isinstance(schema, Mapping) and schema.get("type") == "boolean":
            return f'("true" | "false" | "True" | "False") {self.literal(closing)}'
        if is_text(schema, root):
            return self._rule("/(?s:.*)/", f"[suffix={json.dumps(closing)}]")
        return f"{self.json(_rooted(schema, root))} {self.literal(closing)}"

    def quoted(self, schema: Any, root: Mapping[str, Any], quote: str) -> str:
        """A value with marks around a text."""
        texts = _choices(schema)
        if texts is not None:
            return f"{quote} ({' | '.join(map(self.literal, texts))}) {quote}"
        if is_text(schema, root):
            return f"{quote} {self._rule('/[^<]*/')} {quote}"
        return self.json(_rooted(schema, root), _COMPACT)

    def text(self, start: str, call: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", f"call: {call}", *self._rules, ""])

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments; a tool without one has none."""
    given = tool.get("parameters")
    return given if isinstance(given, Mapping) and given else {"type": "object"}


def _properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """The properties of a schema, and which are required; a schema may be anything."""
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, Mapping) else {},
        required if isinstance(required, list) else (),
    )


def _call_schema(
    tool: Mapping[str, Any], keys: tuple[str, str], number: str | None = None
) -> dict[str, Any]:
    """Of the JSON object that is a call of a tool."""
    parameters = _parameters(tool)
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        **shared,
        "type": "object",
        "properties": {
            **({number: {"type": "string", "pattern": "^[0-9]{1,3}$"}} if number else {}),
            keys[0]: {"const": tool["name"]},
            keys[1]: parameters,
        },
        "required": [*([number] if number else []), *keys],
        "additionalProperties": False,
    }


def _rooted(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema} if isinstance(schema, Mapping) else shared


def _choices(schema: Any) -> list[str] | None:
    """The texts that a value can be, where these are few and known."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return values
    return None


def _separated(pairs: list[tuple[bool, str]]) -> str:
    """Pairs behind one another with commas between those that are there."""
    if not pairs:
        return '""'
    first = [
        f"{pairs[number][1]} " + _behind_pairs(pairs[number + 1 :])
        for number in range(len(pairs))
        if not any(required for required, _ in pairs[:number])
    ]
    if not any(required for required, _ in pairs):
        first.append('""')
    return "(" + " | ".join(first) + ")"


def _behind_pairs(pairs: list[tuple[bool, str]]) -> str:
    return " ".join(f'("," {pair})' if required else f'("," {pair})?' for required, pair in pairs)


def _json_calls(text: str, keys: tuple[str, str]) -> Found | Reading:
    """Calls that are JSON objects, behind one another or in an array."""
    values: list[Any] = []
    at = _behind(text, 0)
    while at < len(text):
        try:
            value, at = _raw_json(text, at)
        except ValueError as error:
            return Reading.MORE if "Unterminated string" in str(error) else Reading.NOT_A_CALL
        values.append(value)
        at = _behind(text, at)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    found: Found = []
    for value in values:
        name = value.get(keys[0], value.get("name")) if isinstance(value, dict) else None
        given = value.get(keys[1], value.get("arguments", {})) if isinstance(value, dict) else None
        arguments = _arguments(given)
        if not isinstance(name, str) or arguments is None:
            return Reading.NOT_A_CALL
        found.append((name, arguments))
    return found or Reading.NOT_A_CALL


def _one(name: str, arguments: str, *, closed: bool) -> Found | Reading:
    """One call, whose arguments are JSON text; of one that was closed they may be left out."""
    text = arguments.strip(BLANK)
    found = _arguments(text or ({} if closed else None))
    return Reading.NOT_A_CALL if not name or found is None else [(name, found)]


def _arguments(given: Any) -> str | None:
    """JSON text of an object of arguments; None: it is none."""
    if isinstance(given, str):
        try:
            given = loads(given)
        except ValueError:
            return None
    return _dumped(given) if isinstance(given, dict) else None


def _dumped(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


def _raw_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends. Raises ValueError."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _behind(text, at, separators=""))
        loads(text[at:end])
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value, end


def _behind(text: str, at: int, *marks: str, separators: str = ";") -> int:
    """The place behind blanks, separators and marks."""
    while at < len(text):
        mark = next((one for one in marks if text.startswith(one, at)), "")
        if mark:
            at += len(mark)
        elif text[at] in BLANK + separators:
            at += 1
        else:
            break
    return at


def _python_call(name: str, arguments: str) -> Found | Reading:
    """A call of a built-in tool as Llama 3 writes it: `name.call(key="value")`."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        values = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
        return [(name, json.dumps(values, ensure_ascii=False, allow_nan=False))]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, AssertionError):
        return Reading.NOT_A_CALL
