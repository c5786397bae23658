"""Messages as a chat template takes them: arguments parsed, reasoning named, control tokens marked.

A control token that stands in a caller's text is marked there, so that the prompt's encoder can
tell it from those that the template writes itself; see `kvpager._runtime.text.encoder`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from kvpager._runtime.text.json_values import loads

ControlTokensAs: TypeAlias = Literal["text", "tokens"]
CONTROL_TOKENS: tuple[ControlTokensAs, ...] = ("text", "tokens")
CallIds: TypeAlias = Callable[[str, str, int], str]
# Noncharacters of Unicode, which no text is exchanged with.
BEGIN_TEXT, END_TEXT = "\ufdd0", "\ufdd1"
_MARKS = str.maketrans({BEGIN_TEXT: None, END_TEXT: None})
_REASONING = ("reasoning_content", "reasoning", "thinking")  # templates' names of one thing


def template_messages(
    messages: Iterable[Mapping[str, Any]], id_of: CallIds | None = None
) -> list[dict[str, Any]]:
    """Copies of messages for a chat template.

    The arguments of tool calls that are JSON text of an object become that object, as templates
    expect; other text stays as it is. An assistant's reasoning gets every name that templates know.
    Calls, and the messages that answer them, get the ids of `id_of`, if it is given: of (id, tool,
    number of the call).
    """
    copies = [_template_message(message) for message in messages]
    if id_of is not None:
        _rename_calls(copies, id_of)
    return copies


def unparsed_arguments(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The place of the first arguments that are text, as an error names it; None: there is none."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, (list, tuple)) else ()):
            if isinstance(call, Mapping) and isinstance(_function(call).get("arguments"), str):
                return f"messages[{number}].tool_calls[{place}].function.arguments"
    return None


def parsed_arguments(arguments: Any) -> Any:
    """The object that JSON text has; no text is the empty object. Anything else is unchanged."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


class ControlTokens:
    """Marks control tokens in what callers send.

    In all text these are the special tokens; in text of others than the assistant also those added
    tokens that the template writes, such as "<tool_response>". An assistant's text may have these:
    it is what the model wrote.
    """

    def __init__(self, special: Iterable[str], of_template: Iterable[str]) -> None:
        """special: contents of special tokens. of_template: of others that a template writes."""
        special = [one for one in special if one]
        self._special = _Marker(special)
        self._all = _Marker([*special, *of_template])

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of messages with every control token in their values marked."""
        return [
            {key: marker.marked(value) for key, value in message.items()}
            for message in messages
            for marker in (self._special if message.get("role") == "assistant" else self._all,)
        ]

    def marked_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a template's variables, tools among them, with control tokens marked."""
        return {key: self._all.marked(value) for key, value in values.items()}


class _Marker:
    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        beginnings = {token[:end] for token in tokens for end in range(1, len(token))}
        self._beginnings = tuple(beginnings)

    def marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self.marked(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(one) for one in value]
        return value

    def _text(self, text: str) -> str:
        if BEGIN_TEXT in text or END_TEXT in text:
            text = text.translate(_MARKS)
        marked = self._tokens.sub(f"{BEGIN_TEXT}\\g<0>{END_TEXT}", text)
        if text.endswith(self._beginnings):
            marked += END_TEXT  # what the template writes next shall not complete a token
        return marked


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(message)
    calls = values.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        values["tool_calls"] = [_template_call(call) for call in calls]
    reasoning = next((values[name] for name in _REASONING if values.get(name)), None)
    if reasoning is not None:
        values = {**dict.fromkeys(_REASONING, reasoning), **values}
        values["reasoning_content"] = reasoning
    return values


def _rename_calls(messages: list[dict[str, Any]], id_of: CallIds) -> None:
    names: dict[Any, str] = {}
    number = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                given = call.get("id")
                call["id"] = id_of(str(given), str(_function(call).get("name")), number)
                names[given] = call["id"]
                number += 1
        if (answered := message.get("tool_call_id")) in names:
            message["tool_call_id"] = names[answered]


def _template_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = _function(call)
    if "arguments" not in function:
        return dict(call)
    parsed = {**function, "arguments": parsed_arguments(function["arguments"])}
    return {**call, "function": parsed} if function is not call else parsed


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a call, which some write without the object around it."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call
