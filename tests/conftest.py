"""What every Python test runs under: few threads, a fixed width, no network."""

from __future__ import annotations

import os
import signal

# A shell that runs the tests in the background has them ignore interrupts, which many are about.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests break what proves row counts: nothing that was proven is kept for another test.
os.environ["KVPAGER_CACHE"] = "off"
# What is printed does not depend on the terminal, nor on readline, which pytest imports and which
# tells the children of a process, pytest-xdist's workers among them, that there are 80 columns.
os.environ["COLUMNS"] = "100"
os.environ["LINES"] = "24"

# Workers of pytest-xdist share the cores, and so do the processes that they start.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = 2 if _WORKERS == 1 else max(1, min(2, len(os.sched_getaffinity(0)) // _WORKERS))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))

import torch  # noqa: E402

from long_tests import (  # noqa: E402, F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)

torch.set_num_threads(int(os.environ.get("KVPAGER_TEST_THREADS", _THREADS)))
