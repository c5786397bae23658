"""A server of the shipped language model."""

from __future__ import annotations

import pytest

from server import running as servers


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
