"""One part of the demo in a process of its own: how it is started, and how it answers.

The parent writes one line of JSON to the child's stdin and keeps the pipe open: when it closes, the
parent has gone and the child ends. The child answers with a file. It is in a session of its own, so
that Ctrl-C reaches the parent alone, which then ends the child and cleans up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError
from kvpager.errors import PagerError
from kvpager.stores.permissions import open_private

COMMAND = "_turn"
_ORPHANED = 1


def run_child(name: str, job: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """Runs `job` in a fresh process and returns what it reports.

    Args:
        name: of the part, for messages and for its answer's file.
        job: {"role": "turn" | "reference", ...}, JSON-able; see `turn.py` and `reference.py`.
        workdir: where parts leave their files.

    Raises:
        CliError: the child failed; the message is its own.
    """
    answer = workdir / f"{name}.json"
    line = {**job, "workdir": str(workdir), "answer": str(answer), "started_at": time.time()}
    child = subprocess.Popen(
        [sys.executable, "-m", "kvpager.cli", COMMAND],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(line).encode() + b"\n")
        child.stdin.flush()
        code = child.wait()
    except BrokenPipeError:
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
    return _answered(name, answer, code)


def serve() -> int:
    """The child's side: one job from stdin, one answer to a file; returns the exit code."""
    job = json.loads(_job_line() or b"{}")
    if "answer" not in job:
        print("kvpager: this command is part of `kvpager demo`", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result: dict[str, Any] = {"result": _ROLES[job["role"]](job)}
    except (CliError, PagerError, OSError) as error:
        if os.environ.get("KVPAGER_DEBUG", "") not in ("", "0"):
            raise
        result = {"error": str(error)}
    with open_private(job["answer"]) as file:
        file.write(json.dumps(result).encode())
    return 1 if "error" in result else 0


def _turn(job: dict[str, Any]) -> dict[str, Any]:
    from kvpager.cli.demo.turn import run_turn

    return run_turn(job)


def _reference(job: dict[str, Any]) -> dict[str, Any]:
    from kvpager.cli.demo.reference import run_reference

    return run_reference(job)


_ROLES = {"turn": _turn, "reference": _reference}


def _job_line() -> bytes:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent has closed its end
    os._exit(_ORPHANED)


def _answered(name: str, answer: Path, code: int) -> dict[str, Any]:
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    try:
        told = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"{name}: its process {ended} and left no answer") from error
    if "error" in told:
        raise CliError(f"{name}: {told['error']}")
    if code:
        raise CliError(f"{name}: its process {ended} after its answer")
    result: dict[str, Any] = told["result"]
    return result


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
