"""Reads and compares JSON strictly, and reads plain text as the value that a schema describes."""

from __future__ import annotations

import json
import marshal
import math
from collections.abc import Iterator, Mapping
from typing import Any

_DEEPEST = 20  # references that are followed
_CONSTANTS = {"True": True, "False": False, "None": None}  # as templates in Python write them


def loads(text: str) -> Any:
    """The value. Raises ValueError for anything that is not JSON, NaN and 1e999 among it."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("too deep") from error


def exact(value: Any) -> bytes:
    """Bytes that are equal for equal values of equal types, with names in the same order.

    Raises ValueError for types that JSON does not have.
    """
    return marshal.dumps(value, 2)  # a version without references to equal objects


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that plain text stands for, in a format that writes texts without quotes.

    What can be a text by its schema is one unless it is another value that the schema names; what
    has no schema is the JSON value, if it is one.

    Args:
        text: as the model wrote it.
        schema: of the value; anything that is no schema is none.
        root: the schema that references are of.
    """
    kinds, texts = set[str](), set[str]()
    for one in _schemas(schema, root, _DEEPEST):
        kinds |= _kinds(one)
        texts |= {value for value in one.get("enum", ()) if isinstance(value, str)}
    if text in texts or kinds == {"string"}:
        return text
    try:
        value = loads(text)
    except ValueError:
        known = text in _CONSTANTS and _kind(_CONSTANTS[text]) in kinds
        return _CONSTANTS[text] if known else text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds - {"number"}:
        value = int(value)
    kind = _kind(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if fits or (not kinds and kind != "string"):
        return value
    return text if "string" in kinds or kind == "string" or not kinds else value


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether plain text is written for a value: it can be a text."""
    kinds = {kind for one in _schemas(schema, root, _DEEPEST) for kind in _kinds(one)}
    return not kinds or "string" in kinds


def _schemas(schema: Any, root: Mapping[str, Any], deepest: int) -> Iterator[Mapping[str, Any]]:
    """The schema and those that it is made of."""
    if not isinstance(schema, Mapping) or deepest == 0:
        return
    yield schema
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _listed(schema.get(key))]
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(_target(reference, root))
    for part in parts:
        yield from _schemas(part, root, deepest - 1)


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    kinds = {one for one in _listed(kind) if isinstance(one, str)}
    if isinstance(kind, str):
        kinds.add(kind)
    values = _listed(schema.get("enum")) + ([schema["const"]] if "const" in schema else [])
    if not kinds:
        kinds = {_kind(value) for value in values}
    if not kinds and "properties" in schema:
        kinds = {"object"}
    if not kinds and "items" in schema:
        kinds = {"array"}
    return kinds


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
