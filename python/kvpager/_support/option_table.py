"""How options are defined: once, in the field that holds each.

A field says its type, its default, what it accepts and what it means. Checking, error messages,
help texts, command lines and environment variables all read that definition.
"""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvpager._support.arguments import (
    as_flag,
    check_names,
    integer_of,
    is_finite,
    is_integer,
    is_one_of,
    refusal,
    usable_path,
)

if TYPE_CHECKING:
    from typing_extensions import Self

AUTO: Final = "auto"

OptionParser: TypeAlias = Callable[[str, Any], Any]

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_MOST_BYTES = 1 << 63
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Option:
    """One configuration option, for reference pages and command-line help."""

    name: str
    type: str
    default: object  # dataclasses.MISSING: it has to be given
    accepts: str
    help: str


def parse_bytes(field: str, value: object) -> int:
    """A number of bytes from an int or from text such as "4GiB", "1.5 GB" or "4096".

    Raises:
        InvalidArgumentError: naming `field`, for anything else.
    """
    size = -1
    if is_integer(value):
        size = int(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in _UNITS:
        size = int(Decimal(match[1]) * _UNITS[match[2]])
    if 0 <= size < _MOST_BYTES:
        return size
    raise refusal(field, value, 'a number of bytes (0 or more) or a size such as "4GiB" or "512MB"')


class Validated:
    """Passes every field through its parser once, when the object is made."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Raises InvalidArgumentError for a name that is no option."""
        check_names(cls.__name__, given, [one.name for one in dataclasses.fields(cls)])  # type: ignore[arg-type]
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            label = f"{type(self).__name__}.{field.name}"
            value = field.metadata["parse"](label, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def options(cls) -> list[Option]:
        """The definition of every option, in order."""
        return [
            Option(
                name=field.name,
                type=str(field.type),
                default=field.default,
                accepts=field.metadata["accepts"],
                help=field.metadata["help"],
            )
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        ]


def option(
    parser: tuple[str, OptionParser], meaning: str, default: Any = dataclasses.MISSING
) -> Any:  # a field, whatever type its annotation says
    """A dataclass field that is an option.

    parser: what is accepted, in words, and the function that checks it. meaning: for help texts.
    """
    accepts, parse = parser
    metadata = {"accepts": accepts, "help": meaning, "parse": parse}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def integer(
    low: int, high: int, *, none: str | None = None, auto: str | None = None
) -> tuple[str, OptionParser]:
    """An integer; `none` and `auto` say what None and "auto" mean, where they are accepted."""
    accepts = f"an integer from {low} to {high}" + (f", or None: {none}" if none else "")
    accepts += f', or "{AUTO}": {auto}' if auto else ""

    def parse(field: str, value: Any) -> Any:
        if (value is None and none) or (auto and isinstance(value, str) and value == AUTO):
            return value
        given = integer_of(value)
        if given is None or not low <= given <= high:
            raise refusal(field, value, accepts)
        return given

    return accepts, parse


def choice(values: Iterable[Any]) -> tuple[str, OptionParser]:
    """One of these values."""
    known = tuple(values)
    accepts = "one of " + ", ".join(map(repr, known))

    def parse(field: str, value: Any) -> Any:
        if isinstance(value, bool) or not is_one_of(value, known):
            raise refusal(field, value, accepts)
        return value

    return accepts, parse


def size(*, auto: str | None = None) -> tuple[str, OptionParser]:
    """A number of bytes, or a size in words; `auto` says what "auto" means, if it is accepted."""
    accepts = 'bytes, or a size such as "4GiB"' + (f', or "auto": {auto}' if auto else "")

    def parse(field: str, value: Any) -> Any:
        return value if auto and is_one_of(value, (AUTO,)) else parse_bytes(field, value)

    return accepts, parse


def number(low: float, high: float) -> tuple[str, OptionParser]:
    """A finite number."""
    accepts = f"a number from {low} to {high}"

    def parse(field: str, value: Any) -> float:
        if not is_finite(value) or not low <= value <= high:
            raise refusal(field, value, accepts)
        return float(value)

    return accepts, parse


def flag() -> tuple[str, OptionParser]:
    """True or False."""
    return "True or False", lambda field, value: as_flag(value, field)


def name(*, none: str | None = None) -> tuple[str, OptionParser]:
    """Text that is not empty; `none` says what None means, where it is accepted."""
    accepts = "a name" + (f", or None: {none}" if none else "")

    def parse(field: str, value: Any) -> Any:
        if value is None and none:
            return None
        if not isinstance(value, str) or not value:
            raise refusal(field, value, accepts)
        return value

    return accepts, parse


def folder(field: str, value: Any) -> str | None:
    """Parses the path of an existing folder, or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise refusal(field, value, "the path of an existing folder, or None")
    path = usable_path(value, field)
    if not Path(path).is_dir():
        raise refusal(field, path, "the path of an existing folder, or None")
    return path


def explain(options: type[Validated]) -> None:
    """Adds what each option means to the docstring, for `help()`."""
    if not options.__doc__ or not dataclasses.fields(options):  # type: ignore[arg-type]
        return  # python -OO leaves docstrings out
    lines = []
    for one in options.options():
        known = one.default is not dataclasses.MISSING
        default = f" (default: {one.default!r})" if known else ""
        text = f"{one.name}: {one.help}; {one.accepts}{default}"
        lines += textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    options.__doc__ = "\n".join([options.__doc__.rstrip(), "", "    Options:", *lines, "    "])
