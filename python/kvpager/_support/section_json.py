"""Strict parsing of a snapshot's JSON sections."""

from __future__ import annotations

import json
from typing import Any

from kvpager.errors import CorruptSnapshotError


def parse_section(text: str, path: str, section: str) -> dict[str, Any]:
    """The JSON object that a section holds.

    Args:
        text: of the section.
        path: of the file, for the message.
        section: "fingerprint" or "session", likewise.

    Raises:
        CorruptSnapshotError: it is no JSON object, or an ambiguous one: a name occurs twice, a
            number is not finite, or it is nested too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptSnapshotError(f"{path}: section {section} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptSnapshotError(
            f"{path}: section {section} holds a {type(value).__name__}, expected an object"
        )
    return value


def section_or_empty(text: str, path: str, section: str) -> dict[str, Any]:
    """`parse_section`, or an empty object for an invalid section, which `restore` reports."""
    try:
        return parse_section(text, path, section)
    except CorruptSnapshotError:
        return {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
