"""What every Python test runs under: few threads, no network, no surprises from the environment."""

from __future__ import annotations

import os

# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(int(os.environ.get("KVPAGER_TEST_THREADS", "2")))

# No deadline: how long an example takes is the machine's affair. `make fuzz` asks for its profile.
settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")
