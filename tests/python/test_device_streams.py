"""Every call on a GPU names the stream that is current when it is made."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvpager.device import Place
from kvpager.pager import Forward, Layout, Pager

LAYOUT = Layout(1, 1, 16, 16, chunk_tokens=16)
GPU = torch.device("cuda", 0)


class Core:
    """Notes the stream each call was given."""

    def __init__(self) -> None:
        self.streams: list[tuple[str, int]] = []

    def begin(self, *arguments: object) -> int:
        self.streams.append(("begin", arguments[-1]))
        return 1

    def attend(self, *arguments: object) -> None:
        self.streams.append(("attend", arguments[-1]))

    def write(self, *arguments: object) -> None:
        self.streams.append(("write", arguments[-1]))

    def mark_replayed(self, *arguments: object) -> None:
        self.streams.append(("mark_replayed", arguments[-1]))

    def abort(self, number: int) -> None:
        pass


@pytest.fixture
def current(monkeypatch):
    """The handle of torch's current stream, which a test sets."""
    stream = SimpleNamespace(cuda_stream=0)

    def current_stream(device):
        assert device == GPU
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return stream


def test_each_call_takes_the_stream_that_is_current(current):
    core, pager = Core(), object.__new__(Pager)
    pager._core, pager.place, pager.layout = core, Place("cuda:0", GPU), LAYOUT
    rows = np.zeros((1, 1, 16), dtype=np.float32)
    current.cuda_stream = 11
    forward = pager.begin([None], [0], [0], [2])
    current.cuda_stream = 22  # as inside torch.cuda.graph
    forward.attend(0, rows, rows, rows, scaling=1.0)
    current.cuda_stream = 33
    forward.write(0, rows, rows)
    current.cuda_stream = 44
    forward.replayed(7)
    assert core.streams == [("begin", 11), ("attend", 22), ("write", 33), ("mark_replayed", 44)]


def test_there_is_no_stream_on_the_cpu(current):
    core = Core()
    rows = np.zeros((1, 1, 16), dtype=np.float32)
    for place in (None, Place("cpu", torch.device("cpu")), Place("shim", torch.device("cpu"))):
        current.cuda_stream = 5
        Forward(core, 1, LAYOUT, place).attend(0, rows, rows, rows, scaling=1.0)
    assert core.streams == [("attend", 0)] * 3
