"""Clients that others wrote, each in an environment of its own, with one server.

`make clients` installs them; what is not installed is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpager.cli.needles import shipped_model_path
from server.clients.environments import CLIENTS
from server.running import CODER, started

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "http_server.md"


@pytest.fixture(scope="module")
def hermes(coder, tmp_path_factory):
    """A server that takes the model's calls for Hermes's."""
    with started(coder, tmp_path_factory.mktemp("clients"), tool_calls="hermes") as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_gets_what_it_asks_for(hermes, client):
    if client.python is None:
        pytest.skip(f"{client.title} is not installed: make clients")
    done = client.run(hermes.url, shipped_model_path(CODER))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("passed try_")]
    assert len(passed) == len(client.tried)


def test_the_page_says_what_was_tried_with_each_client():
    page = PAGE.read_text(encoding="utf-8")
    for client in CLIENTS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {client.title} ")]
        assert row.rstrip(" |").endswith("; ".join(client.tried))
