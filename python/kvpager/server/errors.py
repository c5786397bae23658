"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}.

The openai client retries 408, 409, 429 and 5xx unless `x-should-retry` is "false"; so errors that
a retry cannot help have that header.
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
    PagerError,
    QueueFullError,
    UnsupportedVersionError,
)
from kvpager.stores.bucket import UnreachableError

_log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0  # if the time of the next free place is unknown
_MOST_MESSAGE = 2000  # characters
TIMEOUT = "timeout"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FOLDERS = re.compile(r"(?<![\w.:/])(?:/[^\s/'\":,;()]+)+/(?=[^\s/])")
_NEVER = {"x-should-retry": "false"}
_KINDS = {
    401: "authentication_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_CLAUSES = re.compile(r"(; |\. (?=[A-Z])|, or (?=(?:use|give|let|set|configure) ))")
_PYTHON = re.compile(
    r"\b(?:Engine|PagerConfig|GenerationConfig|Grammar)\b|\b\w+\.\w+\(|\btokenizer\.\w|\w=|_bytes\b"
    r"|\b(?:prefill|generate|restore)\b and |^use prefill"
)
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]]*(?= (?:is|has|cannot)\b|:)")


class ApiError(Exception):
    """An error of a response.

    Attributes:
        status: HTTP's status.
        message: the error, and the expected value.
        kind: OpenAI's `type`, by default that of the status.
        param: the field.
        code: a word for programs.
        headers: of the response.
        anthropic: the message under /v1/messages, if Anthropic's API words it differently.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        if len(message) > _MOST_MESSAGE:  # it may quote the request
            message = message[:_MOST_MESSAGE] + "..."
        super().__init__(message)
        self.anthropic = anthropic or message
        self.status = status
        self.message = message
        others = "server_error" if status >= 500 else "invalid_request_error"
        self.kind = kind or _KINDS.get(status, others)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error as JSON values."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns a 400 about one field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, hint: str = "") -> ApiError:
    """Returns a 400 for a field of the API that this server does not implement."""
    text = f"{param} is not supported by this server" + (f"; {hint}" if hint else "")
    return ApiError(400, text, param=param, code="unsupported_parameter")


def not_found(what: str, name: str, param: str, code: str = "not_found") -> ApiError:
    """Returns a 404 for a name."""
    return ApiError(404, f"{param} is {name!r}; there is no such {what}", param=param, code=code)


def session_differs(name: str, param: str, difference: str) -> ApiError:
    """Returns a 409 for a request that would drop text of the session it names."""
    text = (
        f"session_id is {name!r}, and {difference}; expected {param} that begin with the session's "
        "text, one new user message alone, or session_replace: true to drop the session's text"
    )
    return ApiError(409, text, param=param, code="session_differs", headers=_NEVER)


def context_exceeded(tokens: int, limit: int, what: str = "messages") -> ApiError:
    """Returns a 400 in the words that make agents shorten a conversation."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your {what} resulted in "
        f"{tokens} tokens. Please reduce the length of the {what}.",
        param=what,
        code="context_length_exceeded",
        anthropic=f"prompt is too long: {tokens} tokens > {limit} maximum",
    )


def context_exceeded_in_characters(count: int, most: int, what: str) -> ApiError:
    """Returns `context_exceeded` for a text that is too long to tokenize."""
    return ApiError(
        400,
        f"{what} has {count} characters; expected at most {most}, which is max_prompt_chars: the "
        f"model's maximum context length is exceeded. Please reduce the length of the {what}.",
        param=what,
        code="context_length_exceeded",
        anthropic=f"prompt is too long: {count} characters > {most} maximum",
    )


def retry_after(seconds: float = RETRY_AFTER_SECONDS) -> dict[str, str]:
    """Returns headers that make a client wait: OpenAI's (milliseconds) and HTTP's (seconds)."""
    return {
        "retry-after-ms": str(math.ceil(seconds * 1000)),
        "retry-after": str(math.ceil(seconds)),
    }


def no_space() -> ApiError:
    """Returns a 507 for a full disk."""
    text = "the server's disk is full; delete sessions, or ask its operator for room"
    return ApiError(507, text, code="insufficient_storage", headers=_NEVER)


def timed_out(
    message: str = "the request took longer than request_timeout allows",
    headers: Mapping[str, str] = _NEVER,
) -> ApiError:
    """Returns a 408 for a request beyond a time limit."""
    return ApiError(408, message, code=TIMEOUT, headers=headers)


def stopping() -> ApiError:
    """Returns a 503: the server is stopping, or another request cancelled this one."""
    return ApiError(503, "the request was cancelled", code="cancelled")


def of(error: BaseException, *, accepted: bool = False) -> ApiError:
    """Returns the ApiError of an engine's error; an unknown one is a 500 without details.

    accepted: whether the request's arguments were found valid, so that it is no 400 about them.
    """
    if isinstance(error, ApiError):
        return error
    if getattr(error, "errno", None) in _FULL:
        return no_space()
    text = for_clients(str(error))
    if accepted or not isinstance(error, InvalidArgumentError):
        text = without_folders(text)
    match error:
        case FingerprintMismatchError():
            code, field = "fingerprint_mismatch", error.field or None
            return ApiError(409, text, param=field, code=code, headers=_NEVER)
        case CorruptSnapshotError() | UnsupportedVersionError():
            if "on_corrupt" in str(error) and "on_corrupt" not in text:
                text += '; send on_corrupt: "recompute" to have it computed again'
            return ApiError(500, text, code="snapshot_damaged", headers=_NEVER)
        case UnreachableError():
            return ApiError(503, text, code="store_unavailable", headers=retry_after())
        case QueueFullError():
            return ApiError(429, text, code="queue_full", headers=retry_after())
        case CapacityError():
            _log.warning("a request found no room: %s", text)  # with settings that would make some
            text = "other requests and pinned sessions hold the memory that this one's K/V need"
            return ApiError(503, text, code="out_of_memory", headers=retry_after())
        case ContextLengthError() if not accepted:
            return context_exceeded(error.prompt_tokens, error.limit)
        case InvalidArgumentError() if not (accepted or isinstance(error, ModelChangedError)):
            found = _FIELD.match(text)
            return bad_request(text, found.group() if found else None)
        case PagerError():
            return ApiError(500, text, code=type(error).__name__, headers=_NEVER)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


def without_folders(text: str) -> str:
    """Removes the server's folders from a message: absolute paths keep their last part."""
    return _FOLDERS.sub("", text)


def for_clients(text: str) -> str:
    """An error's text without the clauses that tell a caller in Python what to do."""
    first, *others = _CLAUSES.split(text)
    clauses = zip(others[::2], others[1::2], strict=True)
    return first + "".join(end + one for end, one in clauses if not _PYTHON.search(one))
