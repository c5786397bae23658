"""Checks of arguments: errors name the argument, its value and what was expected."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, TypeVar

from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import TypeIs


Integer: TypeAlias = SupportsIndex

_Value = TypeVar("_Value")

_MOST_SHOWN = 300  # characters of a value in a message


def refusal(field: str, value: object, expected: str) -> InvalidArgumentError:
    """The error about an argument's value, of which the message has the beginning if it is long."""
    text = repr(value)
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"
    return InvalidArgumentError(f"{field} is {text}; expected {expected}")


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidArgumentError for the first name that is not known, with the closest one.

    what: has the options, for the message.
    """
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
            raise InvalidArgumentError(f"{what} has no option {name!r}; {hint}")


def integer_of(value: object) -> int | None:
    """The int that an integer of Python, numpy or torch is; None for all else, bools too."""
    if isinstance(value, bool):
        return None
    if getattr(value, "shape", ()) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # torch raises either
        return None


def is_integer(value: object) -> TypeIs[SupportsIndex]:
    """Whether `value` is an integer of Python, numpy or torch; a bool is none."""
    return integer_of(value) is not None


def as_integer(
    value: Integer, name: str, low: int, high: int | None = None, *, what: str = ""
) -> int:
    """An int, from an int or from numpy's or torch's integers.

    Raises:
        InvalidArgumentError: no integer, a bool, or outside [low, high]; `what` says what is
            counted.
    """
    number = integer_of(value)
    if number is None or number < low or (high is not None and number > high):
        expected = f"an integer, {low} or more" if high is None else f"{low} to {high}"
        raise refusal(name, value, f"{expected}{f', {what}' if what else ''}")
    return number


def as_int64(value: object, name: str) -> int:
    """An int, which 64 bits hold. Raises InvalidArgumentError; the core checks tighter ranges."""
    number = integer_of(value)
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise refusal(name, value, "an integer of 64 bits")
    return number


def is_number(value: object) -> TypeIs[float]:
    """Whether `value` is a Python number, which may be infinite or NaN; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> TypeIs[float]:
    """Whether `value` is a finite Python number that a float has room for; a bool is none."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def as_flag(value: object, name: str) -> bool:
    """The bool. Raises InvalidArgumentError for anything else."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False")
    return value


def is_one_of(value: object, known: Container[object]) -> bool:
    """Whether `value` is text, a number, a bool or None, and among `known`."""
    return (value is None or isinstance(value, (str, int, float))) and value in known


def takes(call: object, count: int) -> bool:
    """Whether `call` can be called with `count` arguments, as far as that can be told."""
    if not callable(call):
        return False
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # some builtins have none
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def listed(values: Iterable[_Value], name: str, what: str) -> list[_Value]:
    """The values. Raises InvalidArgumentError, which names them, if they cannot be gone through."""
    if isinstance(values, (str, bytes)):
        raise refusal(name, values, what)
    try:
        each = iter(values)
    except (TypeError, RuntimeError) as error:  # torch raises either
        raise refusal(name, values, what) from error
    return list(each)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 has the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_unicode(text: str, name: str) -> str:
    """The text. Raises InvalidArgumentError, which names what it is, if UTF-8 has it not."""
    if not is_unicode(text):
        raise InvalidArgumentError(
            f"{name} has half of a surrogate pair; expected Unicode text (bytes that are no UTF-8 "
            "become such halves)"
        )
    return text


def usable_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], field: str) -> str:
    """`path` as text that the native module and the system take.

    Raises:
        InvalidArgumentError: it is no path, is empty, has a NUL in it, or is not UTF-8; names
            `field`.
    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise refusal(field, path, "the path of a file or folder") from error
    if not text:
        raise InvalidArgumentError(f"{field} is empty; expected the path of a file or folder")
    if "\0" in text:
        raise InvalidArgumentError(f"{field} is {text!r}; expected a path without a NUL byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{field} is {text!r}; expected a path that is UTF-8") from None
    return text
