"""Limits of connections: their number, and their time without a request."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import Counter, deque
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

_TURN = 0.002  # seconds of parsing before others have their turn
_PIECES = 256, 8192  # bytes parsed at once: few where every byte is a chunk of its body
_LEAST = 8
_RESERVED = 128  # descriptors for files, and a quarter of all if that is more
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


class Connections:
    """The connections of a server, the oldest first. Used by the event loop.

    Attributes:
        head_seconds: limit from the last answer to the end of the next request's head.
        send_seconds: limit of the time that an answer stays unread.
    """

    def __init__(self, most: int, head_seconds: float, send_seconds: float) -> None:
        """most: largest number; fewer if the process may have fewer descriptors."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = max(_LEAST, min(most, files - max(_RESERVED, files // 4)))
        self._most = most
        self._most_of_address = max(_LEAST, most // 2)
        self.head_seconds = head_seconds
        self.send_seconds = send_seconds
        self._open: dict[Connection | _Handshake, str] = {}
        self._handshakes: dict[int, _Handshake] = {}  # by descriptor
        self._of_address: Counter[str] = Counter()
        self._unparsed: deque[Connection] = deque()

    def accept(self, accepted: socket.socket, address: str) -> None:
        """Counts a connection from now on, when its TLS handshake begins.

        Raises ConnectionAbortedError, as `socket.accept` may, where there is no room for it.
        """
        self._shaken(accepted.fileno())  # one that has gone
        one = _Handshake(accepted)
        if not self.add(one, address):
            accepted.close()
            raise ConnectionAbortedError
        loop = asyncio.get_running_loop()
        one.deadline = loop.call_later(self.head_seconds, self._end_handshake, accepted.fileno())
        self._handshakes[accepted.fileno()] = one

    def _end_handshake(self, descriptor: int) -> None:
        one = self._handshakes[descriptor]
        self._shaken(descriptor)
        one.end()

    def _shaken(self, descriptor: int) -> None:
        one = self._handshakes.pop(descriptor, None)
        if one is not None and one.deadline is not None:
            one.deadline.cancel()
            self.discard(one)

    def take(self, connection: Connection, descriptor: int, address: str) -> bool:
        """Adds a connection whose handshake, if it had one, is done."""
        self._shaken(descriptor)
        return self.add(connection, address)

    def add(self, connection: Connection | _Handshake, address: str) -> bool:
        """Adds a connection, after closing the oldest idle one if needed; False if none is idle."""
        if self._of_address[address] >= self._most_of_address and not self._end_oldest(address):
            return False
        if len(self._open) >= self._most and not self._end_oldest(None):
            return False
        self._open[connection] = address
        self._of_address[address] += 1
        return True

    def discard(self, connection: Connection | _Handshake) -> None:
        """Forgets a connection. May be called twice."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def parse_soon(self, connection: Connection) -> None:
        """Parses what a connection has read, in turns with all that have more than a piece."""
        if not self._unparsed:
            connection.loop.call_soon(self._parse, connection.loop)
        self._unparsed.append(connection)

    def _parse(self, loop: asyncio.AbstractEventLoop) -> None:
        ends = loop.time() + _TURN
        while self._unparsed:
            connection = self._unparsed.popleft()
            if connection.parse():
                self._unparsed.append(connection)
            if loop.time() >= ends:
                break
        if self._unparsed:
            loop.call_soon(self._parse, loop)

    def _end_oldest(self, address: str | None) -> bool:
        """Closes the oldest connection without a request, of one address if that is given."""
        for one, its in self._open.items():
            if address in (None, its) and not one.answering:
                self.discard(one)
                one.end()
                return True
        return False


class ListeningSocket(socket.socket):
    """Counts connections as soon as they are accepted."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection, and counts it."""
        accepted, address = super().accept()
        self.connections.accept(accepted, address[0] if address else "")
        return accepted, address


class _Handshake:
    """A connection whose TLS handshake is not done."""

    answering = False
    deadline: asyncio.TimerHandle | None = None

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted

    def end(self) -> None:
        """Aborts the handshake, if it still runs."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class _Flow(FlowControl):
    """uvicorn's flow control, which reads no more while unparsed bytes are left."""

    is_held = False

    def resume_reading(self) -> None:
        if self.is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class Connection(H11Protocol):
    """uvicorn's protocol, with deadlines for heads of requests and for unread answers.

    Data is parsed a piece at a time, so that others have their turns.
    """

    flow: _Flow

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._bounds = connections
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._left = bytearray()  # of what was read
        self._piece = _PIECES[1]

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Adds the connection, or answers 503."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        if self._bounds.take(self, descriptor, self.client[0] if self.client else ""):
            self._await_head()
        else:
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        self._bounds.discard(self)
        self._stop_waiting()
        self._left.clear()
        self.resume_writing()
        super().connection_lost(exc)

    def end(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses the first piece now and the rest soon."""
        self._left += data
        if not self.flow.is_held and self.parse():
            self.transport.pause_reading()
            self._bounds.parse_soon(self)

    def parse(self) -> bool:
        """Parses a piece; whether there is more."""
        began = self.loop.time()
        piece = bytes(self._left[: self._piece])
        del self._left[: self._piece]
        was_held, self.flow.is_held = self.flow.is_held, bool(self._left)
        if not self.transport.is_closing():
            super().data_received(piece)
        is_slow = self.loop.time() - began > _TURN / 4
        least, most = _PIECES
        self._piece = max(least, self._piece // 2) if is_slow else min(most, self._piece * 2)
        if was_held and not self._left and not self.flow.read_paused:
            self.transport.resume_reading()
        return bool(self._left)

    def handle_events(self) -> None:
        """Stops the deadline of a head that has come."""
        super().handle_events()
        if self.answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Starts the deadline of the next head, and drops the rest of the last body."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the deadline of an answer that the client does not read."""
        super().pause_writing()
        if self._unread is None:
            seconds = self._bounds.send_seconds
            self._unread = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops that deadline."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head = self.loop.call_later(self._bounds.head_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
