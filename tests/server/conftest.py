"""A server of the shipped language model."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from server import running as servers

OPENSSL = shutil.which("openssl")


@pytest.fixture(scope="session")
def coder():
    return servers.coder()


@pytest.fixture(scope="module")  # tests of other files may change torch's threads
def engine(coder):
    with servers.coder_engine(*coder) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    """One server for tests that leave it as it was."""
    with servers.running(engine, tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key."""
    if OPENSSL is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")
    files = [str(folder / "cert.pem"), str(folder / "key.pem")]
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = [OPENSSL, "req", "-x509", *key, "-days", "2", *subject]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True)
    return files
