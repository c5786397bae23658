"""The error tree, the same names in C++ and Python.

Every message names the field, the value it had, what was expected and, where there is one, the
remedy. After any of them the pager is as it was before the call.
"""

from __future__ import annotations

from typing import Any

from kvpager._core import (
    CapacityError,
    CorruptSnapshotError,
    DeviceError,
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
    "ContextLengthError",
    "CorruptSnapshotError",
    "DeviceError",
    "FingerprintMismatchError",
    "InvalidArgumentError",
    "InvariantError",
    "ModelChangedError",
    "NonFiniteError",
    "PagerError",
    "PrefixMismatchError",
    "QueueFullError",
    "RestoreNotConsumedError",
    "StorageError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "VerificationError",
]


class _Pickled:
    """Lets errors be pickled whose constructors need more than a message."""

    def __reduce__(self) -> Any:
        return _unpickled, (type(self), self.args, self.__dict__)  # type: ignore[attr-defined]


def _unpickled(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


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


def damaged_chunk(error: CorruptSnapshotError) -> int | None:
    """The damaged chunk; None if the damage concerns the file as a whole."""
    chunk: int | None = getattr(error, "chunk", None)
    return chunk


def explain_damage(error: CorruptSnapshotError, why: str) -> CorruptSnapshotError:
    """A copy of the error with one more sentence in its message."""
    explained = CorruptSnapshotError(f"{error}; {why}")
    for name in ("chunk", "layer", "start", "stop"):
        setattr(explained, name, getattr(error, name, None))
    return explained


class UnsupportedModelError(InvalidArgumentError):
    """The model, as configured, cannot keep the promise; the message says why and what to do."""


class ContextLengthError(_Pickled, InvalidArgumentError):
    """A prompt leaves no room for an answer; see `Scheduler.chat`.

    Attributes:
        prompt_tokens: tokens of the prompt.
        limit: most tokens of prompt and answer.
    """

    def __init__(self, message: str, *, prompt_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class ModelChangedError(InvalidArgumentError):
    """The model is not the one the engine was made for any more; see `Engine.weights_changed`.

    Attributes:
        what: what was changed, such as "parameter lm_head.weight was replaced".
    """

    def __init__(self, message: str, *, what: str = "") -> None:
        super().__init__(message)
        self.what = what


class VerificationError(_Pickled, PagerError):
    """Two ways to the same tokens gave other bits, or could not be compared.

    Attributes:
        report: a `kvpager.verify.Report`: every relation, and the first number that differs.
    """

    def __init__(self, message: str, *, report: Any) -> None:
        super().__init__(message)
        self.report = report


class QueueFullError(PagerError):
    """As many requests wait as may wait; see `Engine.scheduler`. Nothing was submitted."""


class PrefixMismatchError(_Pickled, InvalidArgumentError):
    """A prompt that does not continue what the session holds.

    Attributes:
        position: the first token that differs, or where the shorter of the two ends.
    """

    def __init__(self, message: str, *, position: int) -> None:
        super().__init__(message)
        self.position = position


class RestoreNotConsumedError(PrefixMismatchError):
    """A restored session was given a prompt that its K/V cannot serve; nothing was prefilled."""


for _name in __all__:  # where users find those of the core too, in tracebacks and pickles
    globals()[_name].__module__ = __name__
