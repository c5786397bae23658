"""Parses repair policies from a command line."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.segments.policies import (
    Combined,
    Deviation,
    FullRepair,
    NoRepair,
    QueryGuided,
    RepairPolicy,
    SeamTail,
    SegmentHead,
)

_PLAIN: MappingProxyType[str, Callable[[], RepairPolicy]] = MappingProxyType(
    {"none": NoRepair, "full": FullRepair}
)
_WITH_NUMBER = MappingProxyType(
    {
        "head": (SegmentHead, int, "a number of tokens, such as head:16"),
        "tail": (SeamTail, int, "a number of tokens, such as tail:16"),
        "deviation": (Deviation, float, "a share of the tokens, such as deviation:0.15"),
        "query": (QueryGuided, float, "a share of the tokens, such as query:0.15"),
    }
)
_NAMES = ", ".join((*_PLAIN, *(f"{name}:N" for name in _WITH_NUMBER)))


def parse_policy(text: str) -> RepairPolicy:
    """The policy that a text such as "head:4+query:0.12" names.

    Args:
        text: `none`, `full`, `head:N` (`SegmentHead`), `tail:N` (`SeamTail`), `deviation:F`
            (`Deviation`), `query:F` (`QueryGuided`), or several of them with + between
            (`Combined`). N is tokens per segment, F a share of tokens from 0 to 1.

    Raises:
        InvalidArgumentError: it names no policy, or its number is out of range.
    """
    try:
        policies = [_parse_one(part.strip()) for part in text.split("+")]
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"repair is {text!r}: {error}") from error
    return policies[0] if len(policies) == 1 else Combined(*policies)


def _parse_one(text: str) -> RepairPolicy:
    name, colon, number = text.partition(":")
    if name in _PLAIN:
        if colon:
            raise InvalidArgumentError(f"{name} takes no number")
        return _PLAIN[name]()
    if name not in _WITH_NUMBER:
        raise InvalidArgumentError(
            f"there is no policy {name!r}; expected {_NAMES}, or several with + between them"
        )
    policy: Any
    policy, kind, expected = _WITH_NUMBER[name]
    try:
        value = kind(number)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} needs {expected}") from error
    made: RepairPolicy = policy(value)
    return made
