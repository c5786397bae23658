"""Which devices tests run on: the shim, which is the GPU's code on the processor, and a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from kvpager.pager.device import missing

DEVICES = ["shim", pytest.param("cuda", marks=pytest.mark.cuda)]
# Those that have to be there, such as "cuda": without one, tests fail rather than skip. The shim
# is part of every build that tests run on.
REQUIRED = os.environ.get("KVPAGER_TEST_DEVICES", "shim").replace(" ", "").split(",")


def require(device):
    """Skips the test, saying why, where there is no such device."""
    if why_not := missing(device):
        assert device not in REQUIRED, f"{device} has to be there, but {why_not}"
        pytest.skip(f"{device}: {why_not}")
    return device


def tensors_of(device):
    """Where torch keeps the tensors that a pager of the device works on."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
