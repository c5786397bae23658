"""Failures that are not the client's are said to be the server's."""

from __future__ import annotations

import pytest
import torch

from server.running import said, started


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_setting_that_somebody_changed_is_the_servers_error(coder, threads):
    body = {"messages": said("Hi"), "max_tokens": 2}
    with started(coder, None) as server:
        torch.set_num_threads(threads + 1)
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-should-retry"] == "false"
