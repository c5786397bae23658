"""Every call on a GPU names the stream that is current when it is made."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpager.config import PagerConfig
from kvpager.pager import Forward, Layout, Pager
from kvpager.pager.device import PoolDevice

LAYOUT = Layout(1, 1, 16, 16, chunk_tokens=16)
GPU = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    """(call, stream it was given) of each call of the native pager."""
    heard: list[tuple[str, int]] = []

    def listen(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def heard_call(*arguments: Any, **named: Any) -> Any:
            heard.append((name, named.get("stream", arguments[-1])))
            return call(*arguments, **named)

        return heard_call

    monkeypatch.setattr("kvpager.pager.pager.Forward", listen("begin", Forward))
    monkeypatch.setattr(Forward, "attend_rows", listen("attend", Forward.attend_rows))
    monkeypatch.setattr(Forward, "write_rows", listen("write", Forward.write_rows))
    monkeypatch.setattr(Forward, "mark_replayed", listen("mark_replayed", lambda *_: None))
    return heard


def a_pager(place: PoolDevice) -> Pager:
    """A pager on the CPU that takes itself to be elsewhere."""
    pager = Pager(LAYOUT, PagerConfig(4 * 16, chunk_tokens=16), rows=1, threads=1)
    pager.place = place
    return pager


@pytest.fixture
def current(monkeypatch):
    """The handle of torch's current stream, which a test sets."""
    stream = SimpleNamespace(cuda_stream=0)

    def current_stream(device):
        assert device == GPU
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return stream


def test_each_call_takes_the_stream_that_is_current(current, streams):
    pager = a_pager(PoolDevice("cuda:0", GPU))
    rows = np.zeros((1, 1, 16), dtype=np.float32)
    current.cuda_stream = 11
    forward = pager.begin([pager.sequence()], [0], [0], [0])
    current.cuda_stream = 22  # as inside torch.cuda.graph
    forward.attend(0, rows, rows, rows, scaling=1.0)
    current.cuda_stream = 33
    forward.write(0, rows, rows)
    current.cuda_stream = 44
    forward.replayed(7)
    assert streams == [("begin", 11), ("attend", 22), ("write", 33), ("mark_replayed", 44)]


def test_there_is_no_stream_on_the_cpu(current, streams):
    rows = np.zeros((1, 1, 16), dtype=np.float32)
    for place in (PoolDevice("cpu", torch.device("cpu")), PoolDevice("shim", torch.device("cpu"))):
        current.cuda_stream = 5
        pager = a_pager(place)
        with pager.begin([pager.sequence()], [0], [0], [0]) as forward:
            forward.attend(0, rows, rows, rows, scaling=1.0)
    assert streams == [("begin", 0), ("attend", 0)] * 2
