"""Runs the application with uvicorn until it is asked to stop."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from kvpager.errors import InvalidArgumentError
from kvpager.server.app import make_app
from kvpager.server.service import Service

_BACKLOG = 2048
_GRACE_SECONDS = 10  # to save what was ended
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(service: Service, ready: Callable[[str], object]) -> None:
    """Serves until SIGTERM or SIGINT, which let running requests end.

    A second one ends them, and saves those that have a name; a third SIGINT leaves at once.

    ready: called with the server's address once connections are taken.

    Raises:
        InvalidArgumentError: the address cannot be listened at.
    """
    server = Server(service, ready)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in kept:  # uvicorn raises them once more when it has ended
            signal.signal(number, lambda *_: None)
        server.run()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    return host in _LOOPBACK


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Sends kvpager's log to stderr while it is open. No record has the text of a prompt."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    levels = {"kvpager": level.upper(), "uvicorn": "WARNING"}
    loggers = [logging.getLogger(name) for name in levels]
    kept = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(levels[logger.name])
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level_before, propagate) in zip(loggers, kept, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level_before)
            logger.propagate = propagate


class Server:
    """Listens from the time it is made, and answers once it runs."""

    def __init__(self, service: Service, ready: Callable[[str], object]) -> None:
        """Arguments and errors: as for `serve`."""
        # Streams end with their requests.
        AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
        settings = service.settings
        self._socket = _listen(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.drain_seconds) + _GRACE_SECONDS,
            backlog=_BACKLOG,
        )
        self._server = _Uvicorn(config, service, lambda: ready(self.url))

    def run(self) -> None:
        """Serves until it is stopped."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Has `run` end, as SIGTERM does. Any thread may call it."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's, which tells when it listens, and the service when it is asked to stop."""

    def __init__(
        self, config: uvicorn.Config, service: Service, started: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = self._service.background(self._service.stop())
        await super().shutdown(sockets)
        await stopping

    def handle_exit(self, sig: int, frame: Any) -> None:
        # uvicorn leaves at a second SIGINT without the application's end, in which unfinished work
        # is saved: here the second one only ends the waiting, and the third is uvicorn's second.
        if self.should_exit and not self._service.hurried:
            self._service.hurry()
        else:
            super().handle_exit(sig, frame)


def check_address(host: str, port: int) -> None:
    """Raises InvalidArgumentError if nothing can listen at an address."""
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidArgumentError(
            f"host and port are {host!r} and {port}; nothing can listen there: {error.strerror}"
        ) from error
    # Connections take it over. asyncio sets it only where a socket names its protocol, which this
    # one does not; without it, an answer's body waits for the client's delayed ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
