"""What every Python test runs under: few threads, a fixed width, no network."""

from __future__ import annotations

import os

# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What is printed does not depend on the terminal, nor on readline, which pytest imports and which
# tells the children of a process, pytest-xdist's workers among them, that there are 80 columns.
os.environ["COLUMNS"] = "100"
os.environ["LINES"] = "24"

import torch

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
CORES = len(os.sched_getaffinity(0))
THREADS = int(os.environ.get("KVPAGER_TEST_THREADS", "0")) or (
    2 if WORKERS == 1 else max(1, min(2, CORES // WORKERS))
)
torch.set_num_threads(THREADS)
