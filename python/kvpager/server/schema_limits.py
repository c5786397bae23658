"""How large a JSON schema may be, so that its grammar is compiled and followed in a short time.

Compiling takes time that grows faster than the schema, and so do the masks of a generation, which
every other request waits for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvpager.server.bodies import LEAST_VALUES, Structure
from kvpager.server.errors import ApiError, bad_request

MOST_PROPERTIES = 1000  # of all objects
MOST_ENUM = 10_000  # values of all enums
MOST_SCHEMAS = 4000  # a schema within others is one
MOST_DEPTH = 32  # of schemas in each other
MOST_TEXT = 4096  # characters of a name, a value or a pattern
MOST_CHARACTERS = 200_000  # of all of them
MOST_REPEATS = 4096  # of a part of a pattern
_PROSE = ("description", "title", "$comment", "examples", "default")  # which no grammar reads
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("enum", "const")
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")


def check_schemas(schemas: Iterable[Any], name: str) -> None:
    """Raises ApiError for JSON schemas that are too large together; names what they have of it.

    Args:
        schemas: as JSON values, or as JSON texts; others are no schemas.
        name: of the request's field.
    """
    count = _Count(name)
    for schema in schemas:
        count.add(count.parsed(schema) if isinstance(schema, str) else schema, 1)


class _Count:
    """What schemas have, counted as far as they may have it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: dict[str, int] = {}

    def parsed(self, text: str) -> Any:
        """The value of a JSON text; None of what is none, which the grammar refuses."""
        self._note("characters of JSON text", len(text), MOST_CHARACTERS)
        given = text.encode(errors="replace")
        Structure.of(given).check(given, LEAST_VALUES)
        try:
            return json.loads(text)
        except ValueError:
            return None

    def add(self, schema: Any, depth: int) -> None:
        """Counts a schema and those in it."""
        self._note("levels of schemas", depth, MOST_DEPTH)
        self._more("schemas", 1, MOST_SCHEMAS)
        if isinstance(schema, list):  # of anyOf, prefixItems and their like
            for one in schema:
                self.add(one, depth)
        if not isinstance(schema, Mapping):
            return
        for keyword, value in schema.items():
            if keyword in _PROSE:
                continue
            if keyword in _OF_NAMES and isinstance(value, Mapping):
                self._more("properties", len(value), MOST_PROPERTIES)
                for key, one in value.items():
                    self._text(key)
                    self.add(one, depth + 1)
            elif keyword in _OF_VALUES:
                values = value if isinstance(value, list) else [value]
                self._more("values of enums", len(values), MOST_ENUM)
                self._texts(values)
            elif isinstance(value, (Mapping, list)):
                self.add(value, depth + 1)
            elif isinstance(value, str):
                self._text(value)
                if keyword == "pattern":
                    self._repeats(value)

    def _texts(self, values: Any) -> None:
        """Those of a JSON value."""
        waiting = [values]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self._text(value)
            elif isinstance(value, Mapping):
                waiting += [*value, *value.values()]
            elif isinstance(value, list):
                waiting += value

    def _text(self, text: str) -> None:
        self._note("characters of a name, value or pattern", len(text), MOST_TEXT)
        self._more("characters of names, values and patterns", len(text), MOST_CHARACTERS)

    def _repeats(self, pattern: str) -> None:
        for counts in _REPEATS.findall(pattern):
            for count in filter(None, counts):
                most = min(len(count), 9)
                self._note("repetitions in a pattern", int(count[:most]), MOST_REPEATS)

    def _more(self, what: str, count: int, most: int) -> None:
        self._counts[what] = self._counts.get(what, 0) + count
        self._note(what, self._counts[what], most)

    def _note(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise _too_large(self._name, count, what, most)


def _too_large(name: str, count: int, what: str, most: int) -> ApiError:
    return bad_request(
        f"{name} has a schema with {count} {what}; expected at most {most}",
        name,
        "schema_too_large",
    )
