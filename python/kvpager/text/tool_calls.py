"""Calls of tools in a model's text, in the formats that chat templates teach.

A call is told once all of it has come, so that what only looks like one stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from kvpager.errors import InvalidArgumentError

HERMES, LLAMA3, MISTRAL = "hermes", "llama3", "mistral"
REQUIRED: Literal["required"] = "required"
_BLANK = " \t\r\n"
# Any number of blanks would be JSON too, and some models write nothing else.
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class TextDelta:
    """Text beside calls."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        index: from 0, within the answer.
        name: of the tool.
        arguments: JSON text of an object.
    """

    index: int
    name: str
    arguments: str


Event: TypeAlias = TextDelta | Call


class CallParser(Protocol):
    """Takes an answer apart as it comes."""

    def push(self, text: str) -> list[Event]:
        """What is certain with a further piece of text."""
        ...

    def end(self) -> list[Event]:
        """The rest, when no text follows."""
        ...


class ToolCallFormat(Protocol):
    """How a model writes calls."""

    name: str

    def parser(self) -> CallParser:
        """For one answer."""
        ...

    def lark(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """A grammar of answers that are calls of these tools and nothing else, for `Grammar.lark`.

        Args:
            tools: functions, each with a name and parameters (a JSON schema).
            parallel: whether there may be several calls.
        """
        ...


class _TaggedParser:
    """Calls between an opening and a closing tag, amid text."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._held = ""
        self._inside = False
        self._calls = 0

    def push(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while True:
            tag = self._closing if self._inside else self._opening
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._held = after
            events += self._body(before, tag) if self._inside else _text(before)
            self._inside = not self._inside
        if not self._inside:
            kept = overlap(self._held, self._opening)
            events += _text(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return _joined(events)

    def end(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._inside:  # some models end right behind the call
            self._inside = False
            return self._body(held, "")
        return _text(held)

    def _body(self, body: str, closing: str) -> list[Event]:
        call = _call_of(_parsed(body), "arguments", self._calls)
        if call is None:
            return _text(self._opening + body + closing)
        self._calls += 1
        return [call]


class _WholeParser:
    """Calls that are a whole answer; held back until its end where it begins like one."""

    def __init__(self, beginnings: tuple[str, ...], arguments: str) -> None:
        self._beginnings = beginnings
        self._arguments = arguments
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Event]:
        if self._is_text:
            return _text(text)
        self._held += text
        seen = self._held.lstrip(_BLANK)
        if any(seen.startswith(one) or one.startswith(seen) for one in self._beginnings):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return _text(held)

    def end(self) -> list[Event]:
        held, self._held = self._held, ""
        text = held.strip(_BLANK)
        for marker in ("[TOOL_CALLS]", "<|python_tag|>"):
            text = text.removeprefix(marker).strip(_BLANK)
        calls = [
            _call_of(value, self._arguments, index) for index, value in enumerate(_values(text))
        ]
        if not calls or None in calls:
            return _text(held)
        return [call for call in calls if call is not None]


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, and others."""

    name = HERMES

    def parser(self) -> CallParser:
        """See `ToolCallFormat`."""
        return _TaggedParser("<tool_call>", "</tool_call>")

    def lark(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """See `ToolCallFormat`."""
        schema = json.dumps(_schema(tools, "arguments"))
        repeated = r'call ("\n" call)*' if parallel else "call"
        return (
            f"start: {repeated}\n"
            rf'call: "<tool_call>\n" body "\n</tool_call>"'
            f"\nbody: %json {schema}\n"
        )


class Llama3:
    """`{"name": ..., "parameters": {...}}`, as a whole answer."""

    name = LLAMA3

    def parser(self) -> CallParser:
        """See `ToolCallFormat`."""
        return _WholeParser(('{"name"', '{ "name"', "<|python_tag|>"), "parameters")

    def lark(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """See `ToolCallFormat`; this format has one call in an answer."""
        return f"start: %json {json.dumps(_schema(tools, 'parameters'))}\n"


class Mistral:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, as a whole answer."""

    name = MISTRAL

    def parser(self) -> CallParser:
        """See `ToolCallFormat`."""
        return _WholeParser(("[TOOL_CALLS]", '[{"name"', '[{ "name"'), "arguments")

    def lark(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """See `ToolCallFormat`."""
        items = _schema(tools, "arguments")
        schema: dict[str, Any] = {"x-guidance": items.pop("x-guidance"), "type": "array"}
        schema |= {"items": items, "minItems": 1}
        if not parallel:
            schema["maxItems"] = 1
        return f'start: "[TOOL_CALLS]" calls\ncalls: %json {json.dumps(schema)}\n'


_FORMATS: Mapping[str, ToolCallFormat] = {one.name: one for one in (Hermes(), Llama3(), Mistral())}


def tool_call_format(name: str) -> ToolCallFormat:
    """A format by its name. Raises InvalidArgumentError for an unknown one."""
    if name not in _FORMATS:
        raise InvalidArgumentError(f"tool_calls is {name!r}; expected {', '.join(_FORMATS)}")
    return _FORMATS[name]


def format_of_template(template: object) -> ToolCallFormat | None:
    """The format that a chat template teaches; None: it knows no tools.

    template: of a tokenizer: text, {name: text}, or None.
    """
    texts = template.values() if isinstance(template, Mapping) else [template]
    text = "\n".join(one for one in texts if isinstance(one, str))
    if "tools" not in text:
        return None
    if "<tool_call>" in text:
        return _FORMATS[HERMES]
    if "[TOOL_CALLS]" in text:
        return _FORMATS[MISTRAL]
    return _FORMATS[LLAMA3] if '"parameters"' in text else None


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` with which `tag` begins, less than all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """Of a call of any of these tools."""
    return {
        "x-guidance": JSON_SPACING,
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    arguments: tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ],
    }


def _call_of(value: Any, arguments: str, index: int) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, value.get("arguments", {}))
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, dict):
        return None
    return Call(index, value["name"], json.dumps(given, ensure_ascii=False))


def _values(text: str) -> list[Any]:
    """JSON values after one another, or those of one array; none if the text is anything else."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        while at < len(text) and text[at] in _BLANK + ";":
            at += 1
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(text: str) -> list[Event]:
    return [TextDelta(text)] if text else []


def _joined(events: list[Event]) -> list[Event]:
    """The events, with text that follows text in one piece."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + event.text)
        else:
            joined.append(event)
    return joined
