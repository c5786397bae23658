"""A real server of buckets (SeaweedFS), and a proxy in front of it that fails on purpose."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEY = "test"  # its only user's access key and secret


def weed() -> str | None:
    """The server's program; None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def options(port: int) -> dict[str, str]:
    """What `ObjectStore(options=...)` takes for a server at this port."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": KEY,
        "secret_access_key": KEY,
        "region": "us-east-1",
    }


def _free_ports(count: int) -> list[int]:
    """Free ports p whose p + 10000, which the server takes too, are free as well.

    None of them is one that the system gives to outgoing connections (32768 and up on Linux), for
    such a port can be taken between this look and the server's start.
    """
    found: list[int] = []
    for port in random.sample(range(10000, 22768), 12768):
        with contextlib.suppress(OSError):
            for one in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


@contextlib.contextmanager
def running() -> Iterator[int]:
    """Runs a server with the bucket `test`; returns its port."""
    program = weed()
    assert program is not None
    identity = {
        "name": KEY,
        "credentials": [{"accessKey": KEY, "secretKey": KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "s3.json").write_text(json.dumps({"identities": [identity]}))
        log = Path(folder, "log")
        for _ in range(5):  # another process may take a port first
            server, port = _start(program, folder, log)
            try:
                if _wait(port, server):
                    yield port
                    return
            finally:
                server.kill()
                server.wait()
            if b"address already in use" not in log.read_bytes():
                break
        raise AssertionError(log.read_text()[-2000:])


def _start(program: str, folder: str, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    master, volume, filer, port = _free_ports(4)
    with log.open("wb") as output:
        server = subprocess.Popen(
            [
                program,
                "server",
                f"-dir={folder}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-master.telemetry=false",
                f"-master.port={master}",
                "-master.volumeSizeLimitMB=64",
                f"-volume.port={volume}",
                "-volume.max=100",
                "-filer",
                f"-filer.port={filer}",
                "-s3",
                f"-s3.port={port}",
                f"-s3.config={Path(folder, 's3.json')}",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
            ],
            stdout=output,
            stderr=output,
        )
    return server, port


def _wait(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Whether the server has taken an object, which makes the bucket, within a minute."""
    import obstore
    from obstore.store import S3Store

    config: Any = options(port)
    store = S3Store(
        "test",
        config=config,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    until = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(Exception):
            obstore.put(store, "started", b"")
            return True
        time.sleep(0.1)
    return False


class FaultyProxy:
    """Passes requests on, but for what `fault` does to them.

    Attributes:
        port: to send requests to.
        fault: called with method and path before each request is passed on. It returns None, or
            what goes wrong: a status to answer instead; "lost": the request is passed on and its
            answer is not; "cut": half of the answer is sent; a number of seconds to wait first.
        requests: (method, path with query) of all requests.
    """

    def __init__(self, target: int) -> None:
        self.fault: Callable[[str, str], int | str | float | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                proxy.requests.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                if isinstance(fault, float):
                    time.sleep(fault)
                elif isinstance(fault, int):
                    self.send_response(fault)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                connection = http.client.HTTPConnection("127.0.0.1", target, timeout=30)
                headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                connection.close()
                if fault == "lost":
                    self.close_connection = True
                    return
                self.send_response_only(answer.status, answer.reason)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                if self.command == "HEAD":
                    self.send_header("content-length", answer.getheader("content-length") or "0")
                elif answer.status not in (204, 304):
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
                if fault == "cut":
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a client that hung up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
