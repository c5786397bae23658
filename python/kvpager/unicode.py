"""Text that can be written: Python's may hold halves of surrogate pairs, which no encoding has."""

from __future__ import annotations

from kvpager.errors import InvalidArgumentError


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
