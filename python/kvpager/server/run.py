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
from kvpager.server.connections import Connection, Connections
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
    SIGHUP has the keys read again.

    ready: called with the server's address once connections are taken.

    Raises:
        InvalidArgumentError: the address cannot be listened at.
    """
    server = Server(service, ready)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    interval = sys.getswitchinterval()
    try:
        for number in kept:  # uvicorn raises the first two once more when it has ended
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: server.reload_keys())
        # What there is now stays: collections that requests cause need not look at it, which takes
        # half a second of all threads with the modules of torch and transformers.
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
    """Whether an address is of this machine alone."""
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


class Server:
    """Listens from the time it is made, and answers once it runs."""

    def __init__(self, service: Service, ready: Callable[[str], object]) -> None:
        """Arguments and errors: as for `serve`."""
        # Streams end with their requests.
        AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
        settings = service.settings
        self._socket = _listen(settings)
        self._path = settings.uds
        self.url = _url(settings, self._socket)
        connections = Connections(
            settings.max_connections, settings.header_timeout, settings.send_timeout
        )
        config = uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.drain_seconds) + _GRACE_SECONDS,
            backlog=_BACKLOG,
            ws="none",
            http=functools.partial(Connection, connections),  # type: ignore[arg-type]
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        self._server = _Uvicorn(config, service, lambda: ready(self.url))

    def run(self) -> None:
        """Serves until it is stopped."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            if self._path is not None:
                Path(self._path).unlink(missing_ok=True)

    def reload_keys(self) -> None:
        """Has the keys read again, as SIGHUP does. Any thread may call it."""
        self._server.reload_keys()

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
        self._loop: asyncio.AbstractEventLoop | None = None

    def reload_keys(self) -> None:
        """Has the keys read again. Any thread may call it, and a signal's handler."""
        if self._loop is not None and not self._loop.is_closed():
            service = self._service
            self._loop.call_soon_threadsafe(lambda: service.background(service.reload_keys()))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
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


def check_places(settings: ServerSettings) -> None:
    """Raises InvalidArgumentError if nothing can listen there, or the certificate is none."""
    _listen(settings).close()
    if settings.uds is not None:
        Path(settings.uds).unlink()
    if settings.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # A key that wants a password would wait for one at the terminal.
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
    """Listens at a Unix socket, in the place of one that a server left behind."""
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
    """Whether there is a socket at which nobody listens."""
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
