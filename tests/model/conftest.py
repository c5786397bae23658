"""Reference models run under few threads, without a network."""

from __future__ import annotations

import os

# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(int(os.environ.get("KVPAGER_TEST_THREADS", "2")))


@pytest.fixture
def closing():
    """Takes engines and sessions; closes them, last first, when the test is over."""
    opened = []

    def keep(thing):
        opened.append(thing)
        return thing

    yield keep
    for thing in reversed(opened):
        thing.close()
