"""One command of a step, its limit, and how it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu_steps import judge
from gpu_steps.place import ROOT

GRACE_SECONDS = 10  # between the interrupt of a command, which may write what it has, and its end


class StepFailedError(Exception):
    """A step ended at a part that failed."""


@dataclass(frozen=True)
class Part:
    """name: what is tested or measured. limit: seconds. measured: a file of JSON that it writes."""

    name: str
    command: Sequence[str]
    limit: float
    judge: judge.Judge = judge.command
    environment: Mapping[str, str] | None = None
    measured: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a part. wrong: what is, or nothing."""

    name: str
    seconds: float
    limit: float
    wrong: str
    said: str = ""


def run(part: Part, limit: float, log: Path) -> Outcome:
    """Runs a part; what it prints is added to `log`.

    Interrupted, it stops what it has started and lets the interrupt go on.
    """
    start = time.monotonic()
    with log.open("a+", encoding="utf-8", errors="replace") as out:
        out.write(f"\n== {part.name}: {' '.join(part.command)}\n")
        out.flush()
        begin = out.tell()
        try:
            status = _status(part, limit, out.fileno())
        except OSError as error:
            return Outcome(part.name, 0.0, limit, f"{part.command[0]}: {error.strerror}")
        out.seek(begin)
        output = out.read()
    seconds = time.monotonic() - start
    if status is None:
        case = judge.last_case(output)
        after = f', after "{case}"' if case else ""
        return Outcome(part.name, seconds, limit, f"stopped after {limit:.0f} s{after}")
    judged = part.judge(status, output)
    return Outcome(part.name, seconds, limit, judged.wrong, judged.said)


def _status(part: Part, limit: float, out: int) -> int | None:
    """Exit status; None if the limit was passed."""
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=None if part.environment is None else dict(part.environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
