"""Restarts a server by a command, and waits until it answers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress

from kvpager.audit.asking import AuditError
from kvpager.audit.client import HttpError, Server

_PAUSE = 0.5  # seconds between questions whether the server answers
_SHOWN = 300  # characters of the command's output


def restart(server: Server, command: str, seconds: float) -> bool:
    """Runs the command in a shell, then waits until the server lists its models.

    The command has a session of its own, so that a server that it leaves behind survives a Ctrl-C.

    Args:
        server: what is waited for.
        command: ends when the old process is gone; the new one may still be starting.
        seconds: for the command, and again for the server.

    Returns:
        Whether the server was seen not to answer; if not, it may be the old one.

    Raises:
        AuditError: the command fails, or one of them takes longer.
    """
    gone = _run(server, command, seconds)
    deadline = time.monotonic() + seconds
    while problem := _problem(server):
        gone = True
        if time.monotonic() > deadline:
            raise AuditError(f"no answer within {seconds:g} s of the restart: {problem}")
        time.sleep(_PAUSE)
    return gone


def _run(server: Server, command: str, seconds: float) -> bool:
    """Whether the server did not answer at some time before the command ended."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            gone = _watch(server, process, seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            output.seek(0)
            said = " ".join(output.read().decode(errors="replace").split())[-_SHOWN:]
            raise AuditError(f"--restart-command ended with exit code {process.returncode}: {said}")
    return gone


def _watch(server: Server, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for the process. Returns whether the server did not answer at some time."""
    gone, deadline = False, time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise AuditError(f"--restart-command did not end within {seconds:g} s")
        gone = gone or _problem(server) is not None
        time.sleep(_PAUSE / 10)
    return gone


def _problem(server: Server) -> HttpError | None:
    try:
        server.models()
    except HttpError as error:
        return error
    return None
