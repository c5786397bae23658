"""Where the server listens: a Unix socket, TLS, and the signals that do not end it."""

from __future__ import annotations

import signal
import socket
import ssl
import stat
import time

import httpx
import pytest

from kvpager import InvalidArgumentError
from kvpager.server.run import check_places
from kvpager.server.settings import ServerSettings
from server.running import ServerProcess, running


def test_tls_needs_no_proxy(engine, certificate):
    cert, key = certificate
    with running(engine, None, ssl_certfile=cert, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{server.url}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_a_certificate_that_is_none_is_refused_before_a_model_is_loaded(certificate, tmp_path):
    cert, key = certificate
    check_places(ServerSettings(port=0, ssl_certfile=cert, ssl_keyfile=key))
    for wrong in ({"ssl_certfile": key}, {"ssl_certfile": cert}):
        with pytest.raises(InvalidArgumentError, match="ssl_certfile"):
            check_places(ServerSettings(port=0, **wrong))
    with pytest.raises(InvalidArgumentError, match="ssl_keyfile"):
        ServerSettings(ssl_keyfile=key)


def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server(engine, tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(str(path))
    with running(engine, None, uds=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/health").status_code == 200
            assert client.get("http://evil.example/health").status_code == 403
        with pytest.raises(InvalidArgumentError, match="uds is"):
            check_places(ServerSettings(uds=str(path)))
    assert not path.exists()


def test_a_file_is_no_place_for_a_unix_socket(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(InvalidArgumentError, match="uds is"):
        check_places(ServerSettings(uds=str(path)))
    assert path.read_text() == "mine"
    with pytest.raises(InvalidArgumentError, match="uds is"):
        check_places(ServerSettings(uds="/" + "x" * 200))


def test_sighup_has_the_keys_read_again_and_ends_nothing(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: old}\n")
    with ServerProcess(tmp_path / "store", "--api-keys", str(path)) as process:
        path.write_text("- {key: new}\n")
        process.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 30
        headers = {"authorization": "Bearer new"}
        while process.client.http.get("/v1/models", headers=headers).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)
        path.write_text("- {")
        process.process.send_signal(signal.SIGHUP)
        while not any("hold on" in line for line in process.said):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert process.client.http.get("/v1/models", headers=headers).status_code == 200
        assert process.terminate() == 0
