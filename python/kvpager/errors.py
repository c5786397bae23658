"""The error tree, the same names in C++ and Python.

Every message names the field, the value it had, what was expected and, where there is one, the
remedy. After any of them the pager is as it was before the call.
"""

from __future__ import annotations

from kvpager._core import (
    CapacityError,
    CorruptSnapshotError,
    InvalidArgumentError,
    InvariantError,
    NonFiniteError,
    PagerError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager._core import FingerprintMismatchError as _CoreFingerprintMismatchError

__all__ = [
    "CapacityError",
    "CorruptSnapshotError",
    "FingerprintMismatchError",
    "InvalidArgumentError",
    "InvariantError",
    "NonFiniteError",
    "PagerError",
    "PrefixMismatchError",
    "RestoreNotConsumedError",
    "StorageError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
]


class FingerprintMismatchError(_CoreFingerprintMismatchError):
    """The file is sound, but belongs to another model, layout, numerics or salt.

    Attributes:
        field: what differs.
        expected: its value here.
        found: its value in the file.
    """

    def __init__(
        self, message: str, *, field: str = "", expected: object = None, found: object = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected
        self.found = found


class UnsupportedModelError(InvalidArgumentError):
    """The model, as configured, cannot keep the promise; the message says why and what to do."""


class PrefixMismatchError(InvalidArgumentError):
    """A prompt that does not continue what the session holds.

    Attributes:
        position: the first token that differs, or where the shorter of the two ends.
    """

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class RestoreNotConsumedError(PrefixMismatchError):
    """A restored session was given a prompt that its K/V cannot serve; nothing was prefilled."""
