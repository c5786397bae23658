"""Tasks in fresh processes: started together, ended with this one, never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Task: TypeAlias = Mapping[str, Any]

_MODULE = "kvpager.verify.child"
_COUNT = "job"


class ChildError(Exception):
    """A task in another process failed.

    Attributes:
        kind: class name of the error there; empty if the process itself failed.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def run_children(
    about: Mapping[str, Any],
    jobs: Sequence[tuple[Mapping[str, str], Sequence[Task]]],
    workdir: Path,
) -> list[Any]:
    """Runs each list of tasks in a process of its own, side by side.

    Args:
        about: what all have in common; see child.py.
        jobs: for each process its environment, beside ours, and its tasks.
        workdir: where jobs and results are kept.

    Returns:
        For each process one mapping per task: "summary", JSON-able, and "recording", a file, or
        None.

    Raises:
        ChildError: naming what failed.
    """
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for environment, tasks in jobs:
            folder = _folder(workdir)
            job = {**about, "tasks": [dict(task) for task in tasks], "folder": str(folder)}
            (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            with (folder / "said").open("wb") as said:
                child = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(folder / "job.json")],
                    stdin=subprocess.PIPE,  # which closes with us, and then the child ends
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={"OMP_WAIT_POLICY": "passive", **os.environ, **environment},
                    start_new_session=True,  # Ctrl-C reaches us alone
                )
            started.append((child, folder))
        return [_results(child, folder) for child, folder in started]
    finally:
        for child, _ in started:
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()


def _folder(workdir: Path) -> Path:
    for number in range(1_000_000):
        folder = workdir / f"{_COUNT}{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ChildError(f"{workdir} holds too many jobs")


def _results(child: subprocess.Popen[bytes], folder: Path) -> list[Mapping[str, Any]]:
    code = child.wait()
    try:
        told: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = (folder / "said").read_text(encoding="utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        raise ChildError(f"a fresh process ended with {code} and no result: {last}") from error
    if "error" in told:
        raise ChildError(f"in a fresh process, {told['task']}: {told['error']}", told["kind"])
    results: list[Mapping[str, Any]] = told["results"]
    return results
