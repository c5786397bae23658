"""Runs the application with uvicorn until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from kvpager.errors import InvalidArgumentError
from kvpager.server.app import make_app
from kvpager.server.connections import Connection, Connections, ListeningSocket
from kvpager.server.service import Service
from kvpager.server.settings import ServerSettings

_BACKLOG = 2048
# A forward takes the interpreter's lock after each operation: with Python's own 5 ms, each time
# against threads that read bodies, a token takes seconds.
_SWITCH_SECONDS = 0.0002
_GRACE_SECONDS = 10  # to save what was ended
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(service: Service, ready: Callable[[str], object]) -> None:
    """Serves until SIGTERM or SIGINT, which let running requests end.

    A second one ends them, and saves those that have a name; a third SIGINT leaves at once.
    SIGHUP reads the keys again.

    ready: called with the server's address once it accepts connections.

    Raises:
        InvalidArgumentError: the server cannot listen at the address.
    """
    server = Server(service, ready)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    interval = sys.getswitchinterval()
    try:
        for number in kept:  # uvicorn raises the first two once more when it has ended
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: server.reload_keys())
        # Objects of torch and transformers stay; a collection that visits them stops all threads
        # for half a second.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_SECONDS)
        server.run()
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        for number, handler in kept.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    return host in _LOOPBACK


@contextlib.contextmanager
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


class Server(uvicorn.Server):
    """Listens once it is made, and answers once it runs."""

    def __init__(self, service: Service, ready: Callable[[str], object]) -> None:
        """Arguments and errors: as for `serve`."""
        # Streams end with their requests.
        AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
        settings = service.settings
        self._service = service
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = _listen(settings)
        self.url = _url(settings, self._socket)
        self.connections = Connections(
            settings.max_connections, settings.header_timeout, settings.send_timeout
        )
        if settings.ssl_certfile is not None:
            self._socket = ListeningSocket(fileno=self._socket.detach())
            self._socket.connections = self.connections
        config = uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.drain_seconds) + _GRACE_SECONDS,
            backlog=_BACKLOG,
            loop="asyncio",  # it calls the socket's own `accept`
            ws="none",
            http=functools.partial(Connection, self.connections),  # type: ignore[arg-type]
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is stopped."""
        path = self._service.settings.uds
        try:
            super().run(sockets or [self._socket])
        finally:
            self._socket.close()
            if path is not None:
                Path(path).unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends `run`, as SIGTERM does. Any thread may call it."""
        self.should_exit = True

    def reload_keys(self) -> None:
        """Reads the keys again. Any thread may call it, and a signal's handler."""
        if self._loop is not None and not self._loop.is_closed():
            service = self._service
            self._loop.call_soon_threadsafe(lambda: service.background(service.reload_keys()))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to answer, and says so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.should_exit:
            self._ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections while the service ends its requests."""
        stopping = self._service.background(self._service.stop())
        await super().shutdown(sockets)
        await stopping

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stops at the first signal. The second one ends the waiting, and the third leaves at once.

        uvicorn leaves at the second one without the application's end, which saves unfinished work.
        """
        if self.should_exit and not self._service.hurried:
            self._service.hurried = True
        else:
            super().handle_exit(sig, frame)


def check_places(settings: ServerSettings) -> None:
    """Raises InvalidArgumentError if nothing can listen there, or the certificate is invalid."""
    _listen(settings).close()
    if settings.uds is not None:
        Path(settings.uds).unlink()
    if settings.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # A key with a password would prompt at the terminal.
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: "")
        except OSError as error:
            raise InvalidArgumentError(
                f"ssl_certfile and ssl_keyfile are {settings.ssl_certfile!r} and "
                f"{settings.ssl_keyfile!r}; expected a certificate and its key: {error}"
            ) from error


def _url(settings: ServerSettings, listening: socket.socket) -> str:
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        return f"{scheme}+unix://{settings.uds}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _listen(settings: ServerSettings) -> socket.socket:
    if settings.uds is not None:
        return _listen_at_path(settings.uds)
    host, port = settings.host, settings.port
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


def _listen_at_path(path: str) -> socket.socket:
    """Listens at a Unix socket, and replaces one that a server left behind."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left(path):
            Path(path).unlink()
        mask = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(mask)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidArgumentError(
            f"uds is {path!r}; nothing can listen there: {error.strerror or error}"
        ) from error
    return listening


def _is_left(path: str) -> bool:
    """Returns whether there is a socket without a listener."""
    try:
        if not Path(path).is_socket():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
