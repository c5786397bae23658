"""HTTP requests to the audited server, and nothing else: no proxies, redirects or retries."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvpager.errors import InvalidArgumentError, PagerError

_LARGEST = 16 << 20  # bytes of one answer
_PART = 64 << 10
_SHOWN = 300  # characters of a server's error
_DATA = b"data:"


class HttpError(PagerError):
    """A request that got no answer.

    Attributes:
        status: of the HTTP response; 0 if there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """An OpenAI-compatible server. Each request has a connection of its own; any thread may send.

    Attributes:
        url: its API, such as "http://127.0.0.1:8000/v1".
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 120.0) -> None:
        """Sends nothing yet.

        Args:
            url: with or without the final /v1.
            key: sent as a bearer token.
            timeout: seconds that one request may take.

        Raises:
            InvalidArgumentError: `url` is not the address of an HTTP server, or no header may have
                `key`.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidArgumentError(f"URL {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InvalidArgumentError(
                f"URL {url!r} is not the address of a server; expected such as "
                "http://127.0.0.1:8000/v1"
            )
        if key is not None and not (key.isascii() and key.isprintable()):  # not to be shown
            raise InvalidArgumentError("the API key has characters that no HTTP header may have")
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._host, self._port = parts.hostname, port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout = timeout
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"

    def models(self) -> list[str]:
        """The names of its models. Raises HttpError."""
        answers = list(self._request("GET", "/models", None))
        try:
            return [str(model["id"]) for model in answers[0]["data"]]
        except (IndexError, KeyError, TypeError) as error:
            raise HttpError(f"{self.url}/models does not list models; is this the API?") from error

    def complete(self, body: Mapping[str, Any]) -> list[Any]:
        """The objects of one completion: one, or the events of a stream. Raises HttpError."""
        return list(self._request("POST", "/completions", body))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[Any]:
        where = f"{method} {self.url}{path}"
        connection = self._connection()
        try:
            connection.connect()
            with _within(self._timeout, connection.sock):
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, f"{self._path}{path}", data, self._headers)
                with connection.getresponse() as response:
                    yield from _answer(response, where)
        except TimeoutError as error:
            raise HttpError(f"{where}: no answer within {self._timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise HttpError(f"{where}: {error or type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise HttpError(f"{where}: the answer is not JSON ({error})") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout, context=self._tls
        )


def _answer(response: http.client.HTTPResponse, where: str) -> Iterator[Any]:
    parts = _body(response)
    if response.status != http.client.OK:
        text = b"".join(parts).decode(errors="replace")
        raise HttpError(f"{where}: {response.status} {_said(text)}", response.status)
    if response.headers.get_content_type() == "text/event-stream":
        yield from _events(_lines(parts))
    else:
        yield json.loads(b"".join(parts))


@contextlib.contextmanager
def _within(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Raises TimeoutError, and ends the connection, if the block has not ended in time.

    The timeout of a socket starts again with every byte.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _body(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Its parts. Raises ValueError if it is too large."""
    size = 0
    while part := response.read1(_PART):
        size += len(part)
        if size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        yield part


def _lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def _events(lines: Iterator[bytes]) -> Iterator[Any]:
    """The objects of server-sent events. Raises HttpError for an error or a cut stream."""
    for line in lines:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict) and event.get("error"):
            raise HttpError(f"the stream ended with an error: {_said(json.dumps(event))}")
        yield event
    raise HttpError("the stream ended without [DONE]")


def printable(text: str) -> str:
    """Text of a server in one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _said(text: str) -> str:
    """The message of an error's body, in one line."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    line = printable(text)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
