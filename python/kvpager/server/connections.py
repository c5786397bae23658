"""Bounds on connections: how many there are, and how long one may take without a request."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST = 8
_RESERVED = 128  # descriptors for files, and a quarter of all if that is more
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


class Connections:
    """The connections of a server, the oldest first. Of the event loop.

    Attributes:
        head_seconds: in which a request's head has to come, from the last answer on.
        send_seconds: that a client may leave an answer unread.
    """

    def __init__(self, most: int, head_seconds: float, send_seconds: float) -> None:
        """most: how many there are at most; fewer if the process may have fewer descriptors."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = max(_LEAST, min(most, files - max(_RESERVED, files // 4)))
        self._most = most
        self._most_of_address = max(_LEAST, most // 2)
        self.head_seconds = head_seconds
        self.send_seconds = send_seconds
        self._open: dict[Connection, str] = {}
        self._of_address: Counter[str] = Counter()

    def add(self, connection: Connection, address: str) -> bool:
        """Takes a connection, for which the oldest without a request goes; False: all have one."""
        if self._of_address[address] >= self._most_of_address and not self._end_oldest(address):
            return False
        if len(self._open) >= self._most and not self._end_oldest(None):
            return False
        self._open[connection] = address
        self._of_address[address] += 1
        return True

    def discard(self, connection: Connection) -> None:
        """Forgets a connection. May be called twice."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def _end_oldest(self, address: str | None) -> bool:
        """Ends the oldest connection without a request; only of an address, if that is given."""
        for one, its in self._open.items():
            if address in (None, its) and not one.answering:
                self.discard(one)
                one.transport.abort()
                return True
        return False


class Connection(H11Protocol):
    """uvicorn's, with deadlines for the heads of requests and for the reading of answers."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._bounds = connections
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, or answers 503."""
        super().connection_made(transport)
        if self._bounds.add(self, self.client[0] if self.client else ""):
            self._await_head()
        else:
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of it."""
        self._bounds.discard(self)
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Ends the wait for a head that has come."""
        super().handle_events()
        if self.answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Waits for the next head, and no longer for what is left of the last body."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read what it asked for."""
        super().pause_writing()
        if self._unread is None:
            seconds = self._bounds.send_seconds
            self._unread = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
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
