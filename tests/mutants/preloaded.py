"""Runs Python in forks of one process that has imported what is slow to import.

    python preloaded.py

A line of JSON per run, {"arguments": [...], "seconds": 60.0}, is answered with one,
{"returncode": 0, "output": "..."}, the code null where it ran out of time. The arguments are those
of python: "-c CODE" or "-m pytest ...". A fork shares torch and transformers with its parent and
imports the package under test itself, so that each sees the package as it is then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

SLOW = (
    "numpy", "torch", "pytest", "safetensors.torch", "transformers.modeling_utils",
    "transformers.generation", "transformers.models.llama.modeling_llama",
)  # fmt: skip


class Preloaded:
    """The process, from outside; `cwd` and `env` are those of every run."""

    def __init__(self, cwd: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout_s: float | None = None) -> tuple[int, str]:
        """One run's exit code and what it printed; subprocess.TimeoutExpired if it took longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "seconds": timeout_s}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["returncode"] is None:
            raise subprocess.TimeoutExpired(arguments, timeout_s or 0.0, answer["output"])
        return answer["returncode"], answer["output"]

    def close(self) -> None:
        """Ends the process; runs have ended before."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answers one request after the other until there are no more."""
    for request in requests:
        wanted = json.loads(request)
        with tempfile.TemporaryFile() as output:
            code = _forked(wanted["arguments"], output.fileno(), wanted["seconds"])
            output.seek(0)
            printed = output.read().decode(errors="replace")
        answers.write(json.dumps({"returncode": code, "output": printed}) + "\n")
        answers.flush()


def _forked(arguments: list[str], output: int, seconds: float | None) -> int | None:
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _become(arguments)
    ended = threading.Event()
    late = threading.Event()

    def watch() -> None:
        if not ended.wait(seconds):
            late.set()
            os.killpg(child, signal.SIGKILL)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status = os.waitpid(child, 0)
    ended.set()
    watcher.join()
    return None if late.is_set() else os.waitstatus_to_exitcode(status)


def _become(arguments: list[str]) -> None:
    """Does what python with these arguments would, and ends."""
    code: Any = 1
    try:
        sys.path.insert(0, str(Path.cwd()))
        if arguments[0] == "-c":
            exec(arguments[1], {"__name__": "__main__"})
            code = 0
        else:
            import pytest

            assert arguments[:2] == ["-m", "pytest"], arguments
            loaded = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
            code = int(pytest.main(["-W", loaded, *arguments[2:]]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
    for name in SLOW:
        __import__(name)
    assert "kvpager" not in sys.modules
    serve(sys.stdin, sys.stdout)
