"""The threads of an engine's own kernels: torch's, where they wait for more to do by spinning."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kvpager import _core
from kvpager.errors import InvalidArgumentError

_NAMES = ("libgomp", "libomp", "libiomp5")


def new_workers(threads: int) -> _core.Workers:
    """Workers of an engine; they are torch's threads if their number is `threads` and they can be.

    OpenMP's threads spin for milliseconds after each operation of torch, unless OMP_WAIT_POLICY is
    "passive": other threads would have to share their processors with them.
    """
    runtime = openmp_runtime() if threads == torch.get_num_threads() else ""
    try:
        return _core.Workers(threads, runtime)
    except InvalidArgumentError:
        if not runtime:
            raise
        return _core.Workers(threads)  # a runtime without GOMP_parallel


def openmp_runtime() -> str:
    """Path of the OpenMP runtime that torch has loaded; empty if it is not known, or passive."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return ""
    home = str(Path(torch.__file__).parent)
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    paths = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if path.rpartition("/")[2].startswith(_NAMES))
    own = [path for path in found if path.startswith(home)]  # torch's, or torch.libs'
    return (own or found)[0] if len(own) == 1 or len(found) == 1 else ""
