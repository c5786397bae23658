"""Paths that users name."""

from __future__ import annotations

import os

from kvpager.arguments import refusal
from kvpager.errors import InvalidArgumentError


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
