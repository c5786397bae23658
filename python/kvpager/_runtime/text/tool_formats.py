"""The formats in which open models write calls of tools: how each is read, and its grammar.

Each is written down as the model's own chat template has it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from kvpager._runtime.text.call_parsing import (
    BLANK,
    CallParser,
    Found,
    Reading,
    ReasoningDelta,
    Span,
    SpanParser,
    WholeParser,
    as_text,
    overlap,
)
from kvpager._runtime.text.json_values import is_text, loads, typed

NO_TOKENS: Mapping[str, int] = MappingProxyType({})
Tools: TypeAlias = Sequence[Mapping[str, Any]]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # of arguments, by the tool's name
# Any number of blanks would be JSON too, and some models write nothing else.
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {**JSON_SPACING, "item_separator": ",", "key_separator": ":"}
_PLACES = re.compile(r"\{(call|arguments|number|tags|pairs)\}")
_NAME = r"([A-Za-z0-9_.\-]+)"


class Written(NamedTuple):
    """What a model writes for calls.

    Attributes:
        call: one call. In it are {name}, the tool's, and one of {call} (JSON of its name and its
            arguments), {arguments} (JSON of them), {tags} and {pairs} (see `Tags`, `Gemma`); also
            {number}, up to three digits.
        between: text between two calls; None: an answer has one.
        before: text before all calls.
        after: text behind them.
    """

    call: str
    between: str | None = ""
    before: str = ""
    after: str = ""


class ToolCallFormat:
    """How a model writes calls: here, as JSON between marks.

    A call is a JSON object, one of several, or one of a list; or its arguments alone behind a head.

    Attributes:
        name: of the format.
        marks: texts that are control tokens of a tokenizer where it has them.
        always: whether answers without tools are written in it too.
    """

    always = False

    def __init__(
        self,
        name: str,
        written: Written,
        *spans: Span,
        section: tuple[str, str] | None = None,
        marks: tuple[str, ...] = (),
        keys: tuple[str, str] = ("name", "arguments"),
        number: str | None = None,
        head: str | None = None,
    ) -> None:
        """Defines a format.

        Args:
            name: of the format.
            written: as its template has it.
            spans: marks of one call or several that are read; those of the first are written.
            section: marks around all calls.
            marks: further texts that are control tokens.
            keys: of a call's name and arguments in its JSON object.
            number: key of a call's number there, as text; None: it has none.
            head: pattern of what is before arguments, with a group for the name; None: they are in
                an object with the name.
        """
        self.name = name
        self.marks = (*(mark for mark in (*(section or ()), *spans[0]) if mark), *marks)
        self._written, self._spans, self._section = written, spans, section
        self._keys, self._number = keys, number
        self._head = re.compile(head or "(?!)", re.DOTALL)

    def parser(self, tools: Tools = ()) -> CallParser:
        """Makes the parser of one answer.

        tools: functions, each with a name and parameters (a JSON schema).
        """
        schemas = {tool["name"]: _parameters(tool) for tool in tools}
        return SpanParser(
            self._spans, self._section, lambda span, cut: self._read(span, schemas, cut=cut)
        )

    def lark(self, tools: Tools, *, parallel: bool, tokens: Mapping[str, int] = NO_TOKENS) -> str:
        """A grammar of answers that are calls of these tools and nothing else, for `Grammar.lark`.

        Args:
            tools: as for `parser`.
            parallel: whether there may be several calls.
            tokens: ids of the marks that are control tokens.
        """
        grammar = _Lark(tokens, self.marks)
        call, between, before, after = self._written
        repeated = "call"
        if parallel and between is not None:
            repeated = f"call ({grammar.literal(between)} call)*"
        calls = []
        for tool in tools:
            parts = _PLACES.split(call.replace("{name}", tool["name"]))
            parts[::2] = map(grammar.literal, parts[::2])
            parts[1::2] = (self._rule(place, grammar, tool) for place in parts[1::2])
            calls.append(" ".join(parts))
        start = f"{grammar.literal(before)} {repeated} {grammar.literal(after)}"
        return grammar.text(start, " | ".join(calls))

    def _rule(self, place: str, grammar: _Lark, tool: Mapping[str, Any]) -> str:
        """The rule of a place in a call."""
        if place == "number":
            return "/[0-9]{1,3}/"
        if place == "arguments":
            return grammar.json(_parameters(tool))
        return grammar.json(_call_schema(tool, self._keys, self._number))

    def _read(self, span: str, schemas: Schemas, *, cut: bool) -> Found | Reading:
        """The calls of a span; of one that was cut, those that are known, and never a Reading."""
        body, closed = self._body(span)
        if self._head.match(body) is None:
            return _json_calls(body, self._keys, cut=cut)
        found: Found = []
        at = 0
        while (head := self._head.match(body, at)) is not None:
            name, rest = head[head.lastindex or 0], body[head.end() :]
            try:
                value, at = _raw_json(body, head.end())
            except ValueError:
                last = _one(name, rest, closed=closed, cut=cut)
                return last if isinstance(last, Reading) else found + last
            if not isinstance(value, dict):
                return found if cut else Reading.NOT_A_CALL
            found.append((name, _dumped(value)))
            at = _behind(body, at, "```", self._spans[0][0])  # a fence, the next call's mark
        return found if cut or at == len(body) else Reading.NOT_A_CALL

    def _body(self, span: str) -> tuple[str, bool]:
        """A span without its marks, and whether it has the closing one."""
        for opening, closing in self._spans:
            if span.startswith(opening):
                closed = closing is not None and span.endswith(closing)
                return span.removeprefix(opening).removesuffix(closing or ""), closed
        return span, False


class Llama3(ToolCallFormat):
    """`{"name": ..., "parameters": {...}}`, as a whole answer, also behind `<|python_tag|>`."""

    _head_of_json = re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]*"\s*,\s*"([^"]*)"'
    )

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        beginnings = ('{"name"', '{ "name"', '{"type": "function"', *self.marks)
        return WholeParser(
            beginnings, lambda text, cut: self._read(text, {}, cut=cut), self._is_other
        )

    def _is_other(self, text: str) -> bool:
        found = self._head_of_json.match(text)
        return found is not None and found[1] not in ("parameters", "arguments")

    def _read(self, span: str, schemas: Schemas, *, cut: bool) -> Found | Reading:
        body = self._body(span)[0].strip(BLANK)
        called = re.match(r"([A-Za-z_]\w*)\.call\(", body) if body != span else None
        if called is None:
            return super()._read(span, schemas, cut=cut)
        whole = body.endswith(")")
        found = _python_call(called[1], body[called.end() : -1]) if whole else Reading.NOT_A_CALL
        return [(called[1], "")] if cut and isinstance(found, Reading) else found


class Tags(ToolCallFormat):
    """Calls in tags, with a tag for each argument, whose value is plain text if it is a text."""

    def __init__(
        self,
        name: str,
        written: Written,
        *spans: Span,
        argument: tuple[str, str, str],
        section: tuple[str, str] | None = None,
        line: str = "",
    ) -> None:
        """Defines a format.

        Args:
            name: of the format.
            written: as its template has it.
            spans: marks of a call.
            argument: what is before and behind an argument's name, and behind its value.
            section: marks around all calls.
            line: what is written around a value.
        """
        super().__init__(name, written, *spans, section=section)
        self._argument, self._line = argument, line
        opening, closing = spans[0] if section is None else ("", "")
        call = written.call.removeprefix(opening).removesuffix(closing or "")
        head, _, rest = call.partition("{name}")
        behind, _, tail = rest.partition("{tags}")
        before, behind, self._tail = head.strip(BLANK), behind.strip(BLANK), tail.strip(BLANK)
        self._named = re.compile(rf"\s*{re.escape(before)}\s*{_NAME}\s*{re.escape(behind)}")
        before, behind, end = (re.escape(one).replace("\\\n", r"\s*") for one in argument)
        follows = rf"(?=\s*(?:{before}|{re.escape(self._tail) or before}|\Z))"
        self._arguments = re.compile(
            rf"\s*{before}(?P<name>.*?){behind}(?P<value>.*?){end}{follows}", re.DOTALL
        )

    def _read(self, span: str, schemas: Schemas, *, cut: bool) -> Found | Reading:
        body, closed = self._body(span) if self._section is None else (span, False)
        body = body.strip(BLANK)
        named = self._named.match(body)
        if named is None:
            return [] if cut else Reading.NOT_A_CALL
        values, rest = self._values(body[named.end() :], schemas.get(named[1], {}))
        if rest == self._tail if rest else closed:
            return [(named[1], _dumped(values))]
        if cut and body == named[1]:
            return []  # more of the name may come
        if cut:
            return [(named[1], _dumped(values)[:-1] if values else "")]
        return Reading.MORE if self._argument[0] in rest else Reading.NOT_A_CALL

    def _body(self, span: str) -> tuple[str, bool]:
        opening, closing = self._spans[0]
        if span.startswith(opening):
            return super()._body(span)
        return span, span.endswith(closing or "")

    def _values(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments that are whole, and what is behind them."""
        properties, _ = _properties(schema)
        values: dict[str, Any] = {}
        at = 0
        while (found := self._arguments.match(text, at)) is not None:
            key, value = found["name"].strip(BLANK), found["value"]
            if self._line:
                value = value.removeprefix(self._line).removesuffix(self._line)
            values[key] = typed(value, properties.get(key), schema)
            at = found.end()
        return values, text[at:].strip(BLANK)

    def _rule(self, place: str, grammar: _Lark, tool: Mapping[str, Any]) -> str:
        before, behind, end = self._argument
        schema, closing = _parameters(tool), f"{self._line}{end}\n"
        properties, required = _properties(schema)
        rules = []
        for key, value in properties.items():
            opening = grammar.literal(f"{before}{key}{behind}{self._line}")
            rule = f"{opening} {grammar.value(value, schema, closing)}"
            rules.append(rule if key in required else f"({rule})?")
        return " ".join(rules) or '""'


class Gemma(ToolCallFormat):
    """`call:name{key:<escape>text<escape>,other:5}` between marks, the last of which is a quote."""

    def _read(self, span: str, schemas: Schemas, *, cut: bool) -> Found | Reading:
        body, quote = self._body(span)[0], self.marks[-1]
        called = re.match(rf"\s*call:\s*{_NAME}\s*(\{{.*)", body, re.DOTALL)
        if body.count(quote) % 2 and not cut:
            return Reading.MORE
        if called is None:
            return [] if cut else Reading.NOT_A_CALL
        written = called[2]
        if not cut:
            return _one(called[1], "".join(_unquoted(written, quote)), closed=True, cut=False)
        texts = _unquoted(written[: len(written) - overlap(written, quote)], quote)
        if len(texts) % 2 == 0:  # the last text has no end
            texts[-1] = texts[-1][:-1]
        else:
            texts[-1] = re.sub(r"([{,]\s*)[A-Za-z_][\w.\-]*$", r"\1", texts[-1])  # of a key
        return [(called[1], _cut_arguments("".join(texts)))]

    def _rule(self, place: str, grammar: _Lark, tool: Mapping[str, Any]) -> str:
        schema, quote = _parameters(tool), grammar.literal(self.marks[-1])
        properties, required = _properties(schema)
        pairs = []
        for key, value in properties.items():
            pair = f"{grammar.literal(f'{key}:')} {grammar.quoted(value, schema, quote)}"
            pairs.append((key in required, pair))
        return _separated(pairs)


class Harmony(ToolCallFormat):
    """gpt-oss: channels of an answer, of which `commentary to=functions.name` is a call."""

    always = True

    def parser(self, tools: Tools = ()) -> CallParser:
        """See `ToolCallFormat`."""
        return _HarmonyParser()


class _HarmonyParser(CallParser):
    """Header and body by turns: `<|channel|>` ... `<|message|>` body `<|end|>`."""

    _to = re.compile(rf"to=(?:functions\.)?{_NAME}")
    _ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def __init__(self) -> None:
        super().__init__()
        self._header = ""  # of what follows; none before the first one
        self._reads_header = False
        self._body = ""

    def _finish(self, held: str, *, cut: bool) -> None:
        if not self._reads_header:
            if not cut or len(held) < 2:  # more of them are the beginning of a mark
                self._extend(held)
            self._close(closed=False, cut=cut)

    def _step(self) -> bool:
        if self._reads_header:
            header, mark, rest = self._held.partition("<|message|>")
            if mark:
                self._header, self._held, self._reads_header = header, rest, False
            return bool(mark)
        before, mark = self._until(self._ends)
        self._extend(before)
        if mark:
            self._close(closed=True)
            self._reads_header = mark in ("<|start|>", "<|channel|>")
        return bool(mark)

    def _extend(self, text: str) -> None:
        if self._to.search(self._header):
            self._body += text
        elif "analysis" in self._header:
            self._events += [ReasoningDelta(text)] if text else []
        else:
            self._events += as_text(text)

    def _close(self, *, closed: bool, cut: bool = False) -> None:
        """At the end of a body, that of the answer or a mark."""
        if (called := self._to.search(self._header)) is not None:
            self._add(_one(called[1], self._body, closed=closed, cut=cut), self._body)
        self._header = self._body = ""


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
    """The JSON schema of a call of a tool."""
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


def _json_calls(text: str, keys: tuple[str, str], *, cut: bool) -> Found | Reading:
    """Calls that are JSON objects, behind one another or in an array.

    cut: whether the last one may have no end; it is left out if it has no name yet.
    """
    found: Found = []
    at = _behind(text, 0, *("[" * cut))
    while at < len(text):
        try:
            value, at = _raw_json(text, at)
        except ValueError as error:
            if not cut:
                return Reading.MORE if "Unterminated string" in str(error) else Reading.NOT_A_CALL
            name, arguments = map(re.escape, keys)
            begun = re.match(
                rf'\{{\s*(?:"(?!{name}")\w+"\s*:\s*"[^"]*"\s*,\s*)*"(?:{name}|name)"\s*:\s*'
                rf'"([^"\\]+)"(?:\s*,\s*"(?:{arguments}|arguments)"\s*:(.*))?',
                text[at:],
                re.DOTALL,
            )
            return found + ([(begun[1], _cut_arguments(begun[2] or ""))] if begun else [])
        for one in value if isinstance(value, list) else [value]:
            call = _call_of(one, keys)
            if call is None and not cut:
                return Reading.NOT_A_CALL
            found += [call] if call is not None else []
        at = _behind(text, at, separators=";," if cut else ";")
    return found if found or cut else Reading.NOT_A_CALL


def _call_of(value: Any, keys: tuple[str, str]) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object; None: it is no call."""
    if not isinstance(value, dict):
        return None
    name = value.get(keys[0], value.get("name"))
    arguments = _arguments(value.get(keys[1], value.get("arguments", {})))
    return (name, arguments) if isinstance(name, str) and arguments is not None else None


def _cut_arguments(text: str) -> str:
    """Arguments as far as they were written; nothing of what is no JSON object."""
    text = text.strip(BLANK)
    try:
        value, _ = _raw_json(text, 0)
    except ValueError:
        return text if text.startswith("{") else ""
    return _dumped(value) if isinstance(value, dict) else ""


def _one(name: str, arguments: str, *, closed: bool, cut: bool) -> Found | Reading:
    """One call, whose arguments are JSON text; of one that was closed they may be left out."""
    text = arguments.strip(BLANK)
    if cut:
        return [(name, _cut_arguments(text))]
    found = _arguments(text or ({} if closed else None))
    return Reading.NOT_A_CALL if found is None else [(name, found)]


def _unquoted(body: str, quote: str) -> list[str]:
    """Parts of JSON text of what Gemma writes; every second one was between quotes."""
    key = re.compile(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:")
    return [
        json.dumps(text) if number % 2 else key.sub(r'\1"\2":', text)
        for number, text in enumerate(body.split(quote))
    ]


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
