"""Limits on the size of JSON: of a body, and of the schemas and grammars in it.

Parsing a body holds Python's lock; compiling a schema takes time that grows faster than the schema,
and so do the masks of a generation, which every other request waits for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpager._support.arguments import is_unicode
from kvpager.server.errors import ApiError, bad_request

MOST_DEPTH = 64  # of nested lists and objects
MOST_NAMES = 100_000  # of fields of objects
MOST_TEXTS = 262_144  # names, texts, lists and objects together
LEAST_VALUES = 262_144  # numbers included; as many as a prompt of token ids may need, if more
_PIECE = 1 << 18
_LONG = 1 << 22  # bytes, which are counted in a way that lets other threads run
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},:'))
_BRACKETS = bytes.maketrans(b"[]", b"{}")
SHOWN = 100  # characters of a value in an error
_MOST = {  # of the schemas of one field together, or for the last ones of each
    "schemas": 4000,  # subschemas included
    "properties": 1000,
    "values of enums": 10_000,
    "characters of names, values and patterns": 200_000,
    "characters of JSON text": 200_000,
    "levels of schemas": 32,
    "properties beside minProperties": 100,  # a grammar grows with their square
    "characters of a name, value or pattern": 4096,
    "repetitions in a pattern": 4096,
}
_MOST_OF_GBNF = {"characters": 16_384, "rules": 400}
_PROSE = ("description", "title", "$comment", "examples", "default")  # no grammar reads them
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("enum", "const")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, or both
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")


@dataclass
class JsonStructure:
    """Counts of a JSON text without parsing it; text that is not JSON has arbitrary ones.

    Attributes:
        values: a lower bound of their number.
        names: fields of objects.
        texts: names, texts, lists and objects.
        depth: of lists and objects in each other.
    """

    values: int = 0
    names: int = 0
    texts: int = 0
    depth: int = 0
    # For each field of the outermost object: offset of its colon, and the counts before it.
    _fields: list[tuple[int, int, int, int]] = field(default_factory=list)
    _deepest: int = 0  # first offset of the greatest depth

    @classmethod
    def of(cls, body: bytes) -> JsonStructure:
        """Counts in pieces; numpy lets other threads run meanwhile."""
        found = cls()
        inside, escaped, depth, quoted = False, False, 0, 0
        for start in range(0, len(body), _PIECE):
            piece = np.frombuffer(body, np.uint8, min(_PIECE, len(body) - start), start)
            quotes, escaped = _unescaped_quotes(piece, escaped=escaped)
            outside = (np.cumsum(quotes, dtype=np.int32) + inside) % 2 == 0
            inside = bool((int(quotes.sum()) + inside) % 2)
            opening = outside & ((piece == ord("[")) | (piece == ord("{")))
            closing = outside & ((piece == ord("]")) | (piece == ord("}")))
            levels = depth + np.cumsum(opening.astype(np.int32) - closing)
            depth = int(levels[-1])
            if levels.max() > found.depth:
                found.depth = int(levels.max())
                found._deepest = start + int(levels.argmax())
            colons = outside & (piece == ord(":"))
            values = found.values + np.cumsum(opening | (outside & (piece == ord(","))))
            names = found.names + np.cumsum(colons)
            texts = (2 * found.texts + quoted) // 2 + np.cumsum(opening) + np.cumsum(quotes) // 2
            places = np.flatnonzero(colons & (levels == 1))
            found._fields += zip(
                (start + places).tolist(),
                values[places].tolist(),
                names[places].tolist(),
                texts[places].tolist(),
            )
            found.values, found.names = int(values[-1]), int(names[-1])
            found.texts += int(opening.sum())
            quoted += int(quotes.sum())
        found.texts += quoted // 2
        return found

    def check(self, body: bytes, most_values: int) -> None:
        """Raises ApiError for a count beyond its limit, about the field with most of it."""
        if self.depth > MOST_DEPTH:
            before = [place for place, *_ in self._fields if place < self._deepest]
            where = _name_before(body, before[-1]) if before else None
            raise _too_complex(where, self.depth, MOST_DEPTH, "levels of lists and objects")
        for kind, (count, most, what) in enumerate(
            (
                (self.values, most_values, "values"),
                (self.names, MOST_NAMES, "names of fields"),
                (self.texts, MOST_TEXTS, "names, texts, lists and objects"),
            ),
            1,
        ):
            if count > most:
                ends = [*(one[kind] for one in self._fields[1:]), count]
                sizes = [end - one[kind] for one, end in zip(self._fields, ends)]
                largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
                where = None
                if largest is not None and sizes[largest] > most // 2:
                    where, count = _name_before(body, self._fields[largest][0]), sizes[largest]
                raise _too_complex(where, count, most, what)


def check_structure(body: bytes, most_values: int) -> None:
    """Raises ApiError for a body that is too complex to be parsed; see `JsonStructure.check`."""
    if not _is_simple(body, most_values):
        JsonStructure.of(body).check(body, most_values)


def _is_simple(body: bytes, most_values: int) -> bool:
    """Whether a JSON text is within the limits; a False is to be looked at closely.

    It counts as `JsonStructure` does, in a tenth of the time, but stops other threads meanwhile.
    """
    if len(body) > _LONG:
        return False
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
    quotes = unescaped.count(b'"')
    if quotes > 2 * MOST_TEXTS + 1:
        return False
    outside = b"".join(unescaped.split(b'"')[::2]).translate(_BRACKETS)
    opening, commas, colons = map(outside.count, (b"{", b",", b":"))
    if opening + commas > most_values or colons > MOST_NAMES or opening + quotes // 2 > MOST_TEXTS:
        return False
    nested, depth = outside.translate(None, b",:"), 0
    while depth <= MOST_DEPTH and b"{}" in nested:  # takes the innermost ones away
        nested, depth = nested.replace(b"{}", b""), depth + 1
    return depth + nested.count(b"{") <= MOST_DEPTH


def _name_before(body: bytes, colon: int) -> str | None:
    """Returns the name of the field whose colon is at this offset; None if it is not a word."""
    start = max(0, colon - SHOWN)
    found = re.search(rb'"(\w+)"\s*$', body[start:colon])
    return found[1].decode() if found else None


def _too_complex(name: str | None, count: int, most: int, what: str) -> ApiError:
    return bad_request(
        f"{name or 'the body'} has {count} {what}; expected at most {most} in all",
        name,
        "body_too_complex",
    )


def _unescaped_quotes(piece: Any, *, escaped: bool) -> tuple[Any, bool]:
    """Returns a mask of the quotes that delimit texts, and whether the next byte is escaped.

    escaped: whether the piece's first byte is.
    """
    quotes = piece == ord('"')
    slashes = piece == ord("\\")
    if not escaped and not slashes.any():
        return quotes, False
    places = np.arange(len(piece))
    # The last byte before each one that is not a backslash; a run of odd length escapes.
    last = np.maximum.accumulate(np.where(slashes, -1, places))
    run = places - last
    run[last == -1] += escaped
    before = np.concatenate(([int(escaped)], run[:-1] * slashes[:-1]))
    return quotes & (before % 2 == 0), bool(slashes[-1] and run[-1] % 2)


def loaded(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError and RecursionError as `json.loads`, and ApiError for a value that this reads
    beyond the standard.
    """
    odd = _SURROGATE.search(text) is not None

    def noted(number: str) -> float:
        nonlocal odd
        value = float(number)
        odd = odd or not math.isfinite(value)
        return value

    value = json.loads(text, parse_float=noted, parse_constant=noted)
    if odd:
        _check_values(value)
    return value


def _check_values(body: Any) -> None:
    """Raises ApiError for a number or a text that JSON does not have."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        _check_each_value(body)


def _check_each_value(body: Any) -> None:
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            text = f"{where or 'the body'} is {value}; expected a number that JSON has"
            raise bad_request(text, where or None)
        if isinstance(value, str) and not is_unicode(value):
            text = f"{where or 'a name in the body'} has half of a surrogate pair; expected Unicode"
            raise bad_request(text, where or None)
        if isinstance(value, dict):
            waiting += [("", name) for name in value]
            waiting += [(f"{where}.{name}" if where else name, one) for name, one in value.items()]
        elif isinstance(value, list) and not all(type(one) is int for one in value):
            waiting += [(f"{where}[{place}]", one) for place, one in enumerate(value)]


def check_schemas(schemas: Iterable[Any], name: str) -> None:
    """Raises ApiError for JSON schemas that are too large together; names what they have of it.

    Args:
        schemas: JSON values or JSON texts.
        name: the request's field.
    """
    count = _Count(name)
    for schema in schemas:
        count.add(count.parsed(schema) if isinstance(schema, str) else schema, 1)


def check_gbnf(text: str, name: str) -> None:
    """Raises ApiError for a grammar in GBNF that is too large."""
    for what, count in (("characters", len(text)), ("rules", text.count("::="))):
        if count > _MOST_OF_GBNF[what]:
            raise _too_large(name, count, what, _MOST_OF_GBNF[what], "grammar")


def texts_in(value: Any) -> Iterator[str]:
    """Yields all texts in a JSON value, names of fields included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one


class _Count:
    """Counts of schemas, up to their limits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: dict[str, int] = {}

    def parsed(self, text: str) -> Any:
        """Returns the value of a JSON text; None for invalid JSON, which the grammar refuses."""
        self._note("characters of JSON text", len(text))
        given = text.encode(errors="replace")
        JsonStructure.of(given).check(given, LEAST_VALUES)
        try:
            return json.loads(text)
        except ValueError:
            return None

    def add(self, schema: Any, depth: int) -> None:
        """Counts a schema and its subschemas."""
        self._note("levels of schemas", depth)
        self._more("schemas", 1)
        if isinstance(schema, list):  # of anyOf, prefixItems and their like
            for one in schema:
                self.add(one, depth)
        if not isinstance(schema, Mapping):
            return
        for keyword, value in schema.items():
            if keyword in _PROSE:
                continue
            if keyword in _OF_NAMES and isinstance(value, Mapping):
                self._more("properties", len(value))
                if "minProperties" in schema:
                    self._note("properties beside minProperties", len(value))
                for key, one in value.items():
                    self._text(key)
                    self.add(one, depth + 1)
            elif keyword in _OF_VALUES:
                values = value if isinstance(value, list) else [value]
                self._more("values of enums", len(values))
                for text in texts_in(values):
                    self._text(text)
            elif isinstance(value, (Mapping, list)):
                self.add(value, depth + 1)
            elif isinstance(value, str):
                self._text(value)
                if keyword == "pattern":
                    self._repeats(value)

    def _text(self, text: str) -> None:
        self._note("characters of a name, value or pattern", len(text))
        self._more("characters of names, values and patterns", len(text))

    def _repeats(self, pattern: str) -> None:
        for counts in _REPEATS.findall(pattern):
            for count in filter(None, counts):
                most = min(len(count), 9)
                self._note("repetitions in a pattern", int(count[:most]))

    def _more(self, what: str, count: int) -> None:
        self._counts[what] = self._counts.get(what, 0) + count
        self._note(what, self._counts[what])

    def _note(self, what: str, count: int) -> None:
        if count > _MOST[what]:
            raise _too_large(self._name, count, what, _MOST[what])


def _too_large(name: str, count: int, what: str, most: int, kind: str = "schema") -> ApiError:
    return bad_request(
        f"{name} has a {kind} with {count} {what}; expected at most {most}",
        name,
        "schema_too_large",
    )
