"""A command in a terminal of its own, with real key presses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

CTRL_C, CTRL_D, TAB, UP = "\x03", "\x04", "\t", "\x1b[A"
_SECONDS = 60  # more than any wait takes
# Ctrl-C goes to the processes of a terminal that controls them.
_BEGIN = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Terminal:
    """Runs a command; `text` is all that it has written so far, as it came.

    Args:
        command: its words; the first is a path.
        env: its whole environment.
        rows, columns: size of the terminal.
    """

    def __init__(
        self, command: Sequence[str], env: dict[str, str], *, rows: int = 24, columns: int = 100
    ) -> None:
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, *command],
            stdin=other,
            stdout=other,
            stderr=other,
            env=env,
            start_new_session=True,
        )
        os.close(other)
        self.text = ""
        self._seen = 0  # characters that `wait_for` has passed
        self._bytes = b""

    def type(self, keys: str) -> None:
        """Presses keys; "\\r" is Enter."""
        os.write(self._own, keys.encode())

    def interrupt_at_prompt(self) -> None:
        """Waits for a prompt, and presses Ctrl-C once the command waits for keys.

        A signal that comes just before, Python's readline notices at the next key alone.
        """
        self.wait_for("> ")
        stat = Path(f"/proc/{self.process.pid}/stat")
        idle = 0
        while idle < 5:
            time.sleep(0.02)
            sleeps = stat.read_text().rpartition(")")[2].split()[0] == "S"
            idle = idle + 1 if sleeps else 0
        self.type(CTRL_C)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the command writes what matches, behind what was waited for before."""
        end = time.monotonic() + _SECONDS
        while not (found := re.search(pattern, self.plain[self._seen :])):
            assert time.monotonic() < end, f"no {pattern!r} in ...{self.text[-2000:]!r}"
            assert self._read(), f"ended without {pattern!r}: ...{self.text[-2000:]!r}"
        self._seen += found.end()
        return found

    @property
    def plain(self) -> str:
        """All that it has written, without escape sequences."""
        return plain(self.text)

    def wait(self) -> int:
        """Waits until the command ends; returns its exit code."""
        while self._read():
            pass
        return self.process.wait(_SECONDS)

    def hang_up(self) -> None:
        """Closes the terminal, as its window does."""
        os.close(self._own)
        self._own = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self._own >= 0:
            os.close(self._own)

    def _read(self) -> bool:
        """Takes what was written; False at the end."""
        ready, _, _ = select.select([self._own], [], [], _SECONDS)
        assert ready, f"nothing came in {_SECONDS} s after ...{self.text[-2000:]!r}"
        try:
            self._bytes += os.read(self._own, 1 << 16)
        except OSError:  # the command has closed its side
            return False
        self.text = self._bytes.decode(errors="replace").replace("\r\n", "\n")
        return True


def plain(text: str) -> str:
    """The text without escape sequences."""
    return _ESCAPES.sub("", text)
