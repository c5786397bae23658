"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}.

The openai client waits and tries again for 408, 409, 429 and 5xx, unless `x-should-retry` says
otherwise; so whatever cannot become better by itself says "false".
"""

from __future__ import annotations

import errno
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from kvpager.errors import (
    CapacityError,
    ContextLengthError,
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    ModelChangedError,
    NonFiniteError,
    PagerError,
    QueueFullError,
    UnsupportedVersionError,
)

_log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0  # where nothing is known about when a place will be free
_MOST_MESSAGE = 2000  # characters
TIMEOUT = "timeout"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOLDERS = re.compile(r"(?<![\w.:/])(?:/[^\s/'\":,;()]+)+/(?=[^\s/])")
_NEVER = {"x-should-retry": "false"}
_CLAUSES = re.compile(r"(; |\. (?=[A-Z])|, or (?=(?:use|give|let|set|configure) ))")
_PYTHON = re.compile(
    r"\b(?:Engine|PagerConfig|GenerationConfig|Grammar)\b|\b\w+\.\w+\(|\btokenizer\.\w|\w=|_bytes\b"
    r"|\b(?:prefill|generate|restore)\b and |^use prefill"
)
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]]*(?= (?:is|has|cannot)\b|:)")


class ApiError(Exception):
    """An error that a client is told.

    Attributes:
        status: of HTTP.
        message: what went wrong, and what was expected.
        kind: OpenAI's `type`.
        param: the field it concerns.
        code: a word for programs.
        headers: of the answer.
        anthropic: the message under /v1/messages, where Anthropic's API has words of its own.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        if len(message) > _MOST_MESSAGE:  # as a client may have sent it
            message = message[:_MOST_MESSAGE] + "..."
        super().__init__(message)
        self.anthropic = anthropic or message
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400, about one field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, hint: str = "") -> ApiError:
    """400 for a field that the API has and this server does not implement."""
    text = f"{param} is not supported by this server" + (f"; {hint}" if hint else "")
    return ApiError(400, text, param=param, code="unsupported_parameter")


def not_found(what: str, name: str, param: str, code: str = "not_found") -> ApiError:
    """404, of a name."""
    return ApiError(404, f"{param} is {name!r}; there is no such {what}", param=param, code=code)


def context_exceeded(tokens: int, limit: int, what: str = "messages") -> ApiError:
    """400 in the words by which agents know that they have to shorten a conversation."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your {what} resulted in "
        f"{tokens} tokens. Please reduce the length of the {what}.",
        param=what,
        code="context_length_exceeded",
        anthropic=f"prompt is too long: {tokens} tokens > {limit} maximum",
    )


def context_exceeded_in_characters(count: int, most: int, what: str) -> ApiError:
    """`context_exceeded`, of a text that is too long to be made tokens."""
    return ApiError(
        400,
        f"{what} has {count} characters; expected at most {most}, which is max_prompt_chars: the "
        f"model's maximum context length is exceeded. Please reduce the length of the {what}.",
        param=what,
        code="context_length_exceeded",
        anthropic=f"prompt is too long: {count} characters > {most} maximum",
    )


def retry_after(seconds: float) -> dict[str, str]:
    """Headers that ask a client to wait: OpenAI's in milliseconds, HTTP's in whole seconds."""
    return {
        "retry-after-ms": str(math.ceil(seconds * 1000)),
        "retry-after": str(math.ceil(seconds)),
    }


def queue_full(message: str) -> ApiError:
    """429: the client should come again."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        headers=retry_after(RETRY_AFTER_SECONDS),
    )


def no_space() -> ApiError:
    """507: the server's disk is full."""
    return ApiError(
        507,
        "the server's disk is full; delete sessions, or ask its operator for room",
        kind="server_error",
        code="insufficient_storage",
        headers=_NEVER,
    )


def timed_out() -> ApiError:
    """408: a request took longer than it may."""
    return ApiError(
        408,
        "the request took longer than request_timeout allows",
        kind="timeout_error",
        code=TIMEOUT,
        headers=_NEVER,
    )


def stopping() -> ApiError:
    """503: the server ends, or the request was cancelled by another one."""
    return ApiError(503, "the request was cancelled", kind="server_error", code="cancelled")


def of(error: BaseException) -> ApiError:
    """What a client is told of an error of the engine; an unknown one is 500 and no more."""
    if isinstance(error, ApiError):
        return error
    if getattr(error, "errno", None) in _FULL:
        return no_space()
    text = for_clients(str(error))
    if not isinstance(error, InvalidArgumentError):
        text = without_folders(text)
    for kind, make in _KNOWN:
        if isinstance(error, kind):
            known: ApiError = make(text, error)
            return known
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error", kind="server_error", code="internal_error")


def without_folders(text: str) -> str:
    """A message without the server's folders: of each absolute path its last part alone."""
    return _FOLDERS.sub("", text)


def for_clients(text: str) -> str:
    """An error's text without the clauses that tell a caller in Python what to do."""
    first, *others = _CLAUSES.split(text)
    clauses = zip(others[::2], others[1::2], strict=True)
    return first + "".join(end + one for end, one in clauses if not _PYTHON.search(one))


def of_accepted(error: BaseException) -> ApiError:
    """`of`, for a request that was accepted: its arguments were checked, so they are not wrong."""
    if isinstance(error, InvalidArgumentError):
        return _server(without_folders(for_clients(str(error))), error)
    return of(error)


def _mismatch(text: str, error: Any) -> ApiError:
    return ApiError(
        409,
        text,
        kind="conflict_error",
        param=error.field or None,
        code="fingerprint_mismatch",
        headers=_NEVER,
    )


def _damaged(text: str, error: Any) -> ApiError:
    if "on_corrupt" in str(error) and "on_corrupt" not in text:
        text += '; send on_corrupt: "recompute" to have it computed again'
    return ApiError(500, text, kind="server_error", code="snapshot_damaged", headers=_NEVER)


def _capacity(text: str, error: Any) -> ApiError:
    _log.warning("a request found no room: %s", text)  # with settings that would make some
    return ApiError(
        503,
        "other requests and pinned sessions hold the memory that this one's K/V need",
        kind="server_error",
        code="out_of_memory",
        headers=retry_after(RETRY_AFTER_SECONDS),
    )


def _context(text: str, error: Any) -> ApiError:
    return context_exceeded(error.prompt_tokens, error.limit)


def _invalid(text: str, error: Any) -> ApiError:
    found = _FIELD.match(text)
    return ApiError(400, text, param=found.group() if found else None)


def _server(text: str, error: Any) -> ApiError:
    return ApiError(500, text, kind="server_error", code=type(error).__name__, headers=_NEVER)


def _queue_full(text: str, error: Any) -> ApiError:
    return queue_full(text)


_KNOWN: tuple[tuple[type[BaseException], Any], ...] = (
    (FingerprintMismatchError, _mismatch),
    (CorruptSnapshotError, _damaged),
    (UnsupportedVersionError, _damaged),
    (QueueFullError, _queue_full),
    (CapacityError, _capacity),
    (ModelChangedError, _server),
    (NonFiniteError, _server),
    (ContextLengthError, _context),
    (InvalidArgumentError, _invalid),
    (PagerError, _server),
)
