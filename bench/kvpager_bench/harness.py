"""The method of every benchmark here.

Each subject is checked to be deterministic before it is timed. Calls are warmed up and run several
times; the result is the median, with the fastest and the slowest run. Compared subjects take turns.
A report (report.py) has the machine, the versions and the commit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Before torch loads its OpenMP runtime: on a busy machine spinning threads slow each other down.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
import xxhash

import kvpager
from kvpager import _core
from kvpager_bench.places import PACKAGE_DIR, end_cleanly_when_told, module_environment
from kvpager_bench.report import (
    ENVIRONMENT,
    NOT_APPLICABLE,
    Cell,
    Column,
    MissingNumberError,
    Report,
    tokens_name,
)

__all__ = ["NOT_APPLICABLE", "Cell", "Column", "MissingNumberError", "Report", "tokens_name"]

gc.freeze()  # what is imported stays, so that collections between runs need not look at it

DEFAULT_THREADS = 2


class NondeterministicSubjectError(Exception):
    """A subject gives other bits when it is run again."""


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of one call."""

    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs or any(not math.isfinite(run) or run <= 0 for run in self.runs):
            raise MissingNumberError(f"timings are {self.runs}; expected positive seconds")

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def fastest(self) -> float:
        return min(self.runs)

    @property
    def slowest(self) -> float:
        return max(self.runs)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (self.slowest - self.fastest) / self.median

    def per(self, count: float) -> Timing:
        """Of one of `count` things that each run did."""
        return Timing(tuple(run / count for run in self.runs))


def measure(
    call: Callable[[], object],
    *,
    runs: int = 5,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Times a synchronous call. `before` runs ahead of every call and is not timed."""
    seconds = []
    for run in range(warm_up + runs):
        if before is not None:
            before()
        gc.collect()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if run >= warm_up:
            seconds.append(elapsed)
    return Timing(tuple(seconds))


@dataclass(frozen=True)
class Subject:
    """A synchronous call to be timed, and an untimed preparation of each run."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


def interleave(
    subjects: Mapping[str, Subject], *, runs: int = 5, warm_up: int = 1
) -> dict[str, Timing]:
    """Times several subjects side by side, for ratios between them.

    Every round runs each of them once, and begins with another one than the round before: what
    slows the machine for a while slows all of them, and none always runs first.
    """
    names = list(subjects)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(warm_up + runs):
        gc.collect()
        first = run % len(names)
        for name in names[first:] + names[:first]:
            subjects[name].before()
            start = time.perf_counter()
            subjects[name].call()
            elapsed = time.perf_counter() - start
            if run >= warm_up:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(runs)) for name, runs in seconds.items()}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call that is not repeated."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def bytes_read() -> int:
    """Bytes this process has had from read calls, whether a disk or the page cache gave them."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar":
            return int(value)
    raise MissingNumberError("/proc/self/io has no rchar; bytes read cannot be counted here")


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process's memory grew at most while the call ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is held
    before = _memory("VmRSS")
    call()
    return max(0, _memory("VmHWM") - before)


def held_growth(call: Callable[[], object]) -> int:
    """Bytes that the process holds more after the call; not what malloc keeps of freed memory."""
    held = []
    for step in (lambda: None, call):
        step()
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
            trim(0)
        held.append(_memory("VmRSS"))
    return max(0, held[1] - held[0])


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise MissingNumberError(f"/proc/self/status has no {name}; memory cannot be measured here")


def digest(*tensors: torch.Tensor) -> str:
    """Of shapes, dtypes and raw bits."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        state.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        state.update(raw.data)
    return state.hexdigest()


def require_deterministic(subject: Callable[[], object], name: str, times: int = 2) -> None:
    """Runs `subject` several times; it returns a value that equals itself when bits are the same.

    Raises NondeterministicSubjectError, with the first result that differs.
    """
    first = subject()
    for attempt in range(1, times):
        again = subject()
        if again != first:
            raise NondeterministicSubjectError(
                f"{name}: run {attempt + 1} gave {again!r}, the first {first!r}; a time or a count "
                "of something that changes means nothing"
            )


def environment() -> dict[str, Any]:
    """The conditions of a figure beside the code: machine, versions, commit, date, load."""
    record = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "isa": _core.isa_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvpager": kvpager.__version__,
        "kernel_version": _core.KERNEL_VERSION,
        "commit": _git("rev-parse", "HEAD") or "no git checkout",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }
    assert tuple(record) == ENVIRONMENT
    return record


def cli(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Of three sizes, the one without an option is the standard one, that the suite runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small sizes: does it work?")
    size.add_argument("--full", action="store_true", help="every size: more than the suite runs")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="of torch and kvpager")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where reports are written")
    return parser


def start(threads: int) -> dict[str, Any]:
    """Prepares the process, and records the environment."""
    prepare(threads)
    return environment()


def prepare(threads: int) -> None:
    """What a process does first that measures or compares, a benchmark's own workers too."""
    end_cleanly_when_told()
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def report_name(name: str, *, quick: bool, full: bool) -> str:
    """A run of another size never overwrites the standard one's figures."""
    return name + ("-quick" if quick else "-full" if full else "")


def run_worker(module: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Runs `python -m module --worker TASK` in a new process; returns its last line's JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--worker", json.dumps(dict(task))],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise MissingNumberError(f"the worker for {dict(task)} failed (exit {done.returncode})")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _cpu_name() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PACKAGE_DIR, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
