"""Runs jobs in fresh processes, which start together and never outlive this process.

A job is a JSON object in a file; its result is another file beside it. The parent keeps a pipe to
each child open; when it closes, the parent has ended, and the child ends too. Children are in
sessions of their own, so that Ctrl-C reaches only the parent, which then ends them.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Job: TypeAlias = Mapping[str, Any]

_ORPHANED, _USAGE = 1, 2


class ChildError(Exception):
    """A job in another process failed.

    Attributes:
        kind: class name of the error there; empty if the process itself failed.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def run_children(
    module: str,
    jobs: Sequence[tuple[Mapping[str, str], Job]],
    workdir: Path,
    *,
    shown: bool = False,
) -> list[Any]:
    """Runs `python -m module` for each job, side by side; the module's `main` is `serve`.

    Args:
        module: runs a job.
        jobs: for each process, variables to add to our environment, and its job (JSON values).
        workdir: folder for jobs, their files and results.
        shown: whether children write to our stderr; otherwise an error quotes their last line.

    Raises:
        ChildError: says what failed.
    """
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for environment, job in jobs:
            folder = Path(tempfile.mkdtemp(prefix="job", dir=workdir))
            path = folder / "job.json"
            path.write_text(json.dumps(job), encoding="utf-8")
            with (folder / "said").open("wb") as said:
                child = subprocess.Popen(
                    [sys.executable, "-m", module, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=None if shown else subprocess.STDOUT,
                    env={"OMP_WAIT_POLICY": "passive", **os.environ, **environment},
                    start_new_session=True,
                )
            started.append((child, folder))
        return [_result(child, folder) for child, folder in started]
    finally:
        for child, _ in started:
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()


def serve(argv: Sequence[str], work: Callable[[dict[str, Any], Path], Any]) -> int:
    """The child's side: one job; returns the exit code.

    work: takes the job and a folder for its files; returns JSON values. If it keeps job["doing"] up
    to date, an error message says what it was doing.
    """
    if len(argv) != 1:
        print("usage: python -m MODULE JOB.json; a part of another command", file=sys.stderr)
        return _USAGE
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    path = Path(argv[0])
    job = json.loads(path.read_text(encoding="utf-8"))
    try:
        said: dict[str, Any] = {"result": work(job, path.parent)}
    except Exception as error:  # reported to the parent
        if os.environ.get("KVPAGER_DEBUG", "") not in ("", "0"):
            raise
        doing = f"{job['doing']}: " if "doing" in job else ""
        said = {"error": f"{doing}{error}", "kind": type(error).__name__}
    (path.parent / "result.json").write_text(json.dumps(said), encoding="utf-8")
    return 1 if "error" in said else 0


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent has closed its end, or is gone
    os._exit(_ORPHANED)


def _result(child: subprocess.Popen[bytes], folder: Path) -> Any:
    code = child.wait()
    try:
        told: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = (folder / "said").read_text(encoding="utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        raise ChildError(f"a fresh process ended with {code} and no result: {last}") from error
    if "error" in told:
        raise ChildError(f"in a fresh process, {told['error']}", told["kind"])
    return told["result"]
