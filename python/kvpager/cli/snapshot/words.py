"""The session section of a snapshot, in words."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpager._support.words import counted

_CONVERSATION = "conversation"
_MOST_CHARACTERS = 72  # of a message


def session_facts(session: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of each field, one of each message of the conversation."""
    for name, value in sorted(session.items()):
        yield name.replace("_", " "), _in_words(name, value)
        if name == _CONVERSATION:
            for message in _messages(value):
                yield f"  {message.get('role')}", _content(message)


def session_differences(session: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """(name, what differs) of each field with two values; of a mapping its fields that differ."""
    for name, (a, b) in session.items():
        label = name.replace("_", " ")
        if name == _CONVERSATION:
            yield label, _conversation_difference(_messages(a), _messages(b))
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            parts = [
                f"{key} {_in_words(key, a.get(key))} / {_in_words(key, b.get(key))}"
                for key in {**a, **b}
                if a.get(key) != b.get(key)
            ]
            yield label, ", ".join(parts)
        else:
            yield label, f"{_in_words(name, a)} / {_in_words(name, b)}"


def _conversation_difference(a: list[Any], b: list[Any]) -> str:
    counts = f"{counted(len(a), 'message')} / {counted(len(b), 'message')}"
    pairs = [index for index, (x, y) in enumerate(zip(a, b)) if x != y]
    if not pairs and len(a) == len(b):
        return f"{counts}, equal; they were rendered or ended differently"
    first = pairs[0] if pairs else min(len(a), len(b))
    shown = " / ".join(_content(one[first]) if first < len(one) else "none" for one in (a, b))
    return f"{counts}, first different: number {first + 1}, {shown}"


def _in_words(name: str, value: Any) -> str:
    if name == _CONVERSATION:
        return counted(len(_messages(value)), "message")
    if value is None or value == "":
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        fields = [f"{key} {_in_words(key, each)}" for key, each in value.items()]
        return ", ".join(fields) or "none"
    return json.dumps(value, ensure_ascii=False)


def _messages(conversation: Any) -> list[Any]:
    found = conversation.get("messages") if isinstance(conversation, Mapping) else None
    return found if isinstance(found, list) else []


def _content(message: Mapping[str, Any]) -> str:
    """A message's text on one line, its end cut off."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return json.dumps(
        textwrap.shorten(text, _MOST_CHARACTERS, placeholder=" ..."), ensure_ascii=False
    )
