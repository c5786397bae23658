"""The clock of a conversation that a fresh process holds; the same for every system."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def since_start() -> float:
    """Seconds since this process started. Linux."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def prompt_of(task: dict[str, Any]) -> list[int]:
    """The token ids in the file that a task names."""
    ids: list[int] = json.loads(Path(task["prompt"]).read_text(encoding="ascii"))
    return ids


def seconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_bytes() -> int:
    """The most memory that this process has held. Linux: `ru_maxrss` would be its parent's, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def held(
    task: dict[str, Any],
    prefill: Callable[[], object],
    decode: Callable[[], object],
    save: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Seconds of a prompt, which is then saved, and per token of turns behind it.

    task: steps (tokens of a turn), runs (turns behind the first).
    """
    ready = since_start()
    prompt = seconds(prefill)
    save()
    first, *later = [seconds(decode) / task["steps"] for _ in range(task["runs"] + 1)]
    return {
        "ready_s": ready,
        "prompt_s": prompt,
        "first_turn_s": first,
        "decode_s": later,
        "peak_bytes": peak_bytes(),
    }
