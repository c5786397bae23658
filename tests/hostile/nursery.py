"""Children that save in a loop until somebody kills them, and the parent that knows what must hold.

The nursery imports everything once and is single-threaded when it forks, so that a child costs
milliseconds. A saver writes one line to its pipe before and after each save:

    begin NAME WHICH
    saved NAME WHICH

A line is shorter than PIPE_BUF, hence whole or absent.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Positions of the sequences a saver chooses from: from one page to some writes of the file.
LENGTHS = (21, 160, 1600, 6000)
NAMES = ("a.kvsnap", "b.kvsnap", "c.kvsnap")


def _save_for_ever(folder, seed, sequences):
    dice = random.Random(seed)
    while True:
        name, which = dice.choice(NAMES), dice.choices(range(len(LENGTHS)), (4, 3, 2, 2))[0]
        os.write(1, f"begin {name} {which}\n".encode())
        sequences[which].save(Path(folder) / name)
        os.write(1, f"saved {name} {which}\n".encode())


def serve():
    """Reads "FOLDER SEED" lines; forks a saver for each, which tells its process id when ready."""
    from specimens import fill, make_pager

    os.write(1, b"ready\n")
    for line in sys.stdin:
        folder, seed = line.split()
        child = os.fork()
        if child == 0:
            pager = make_pager(pool_chunks=16, host_bytes="16MiB", summary_bytes=2**24)
            sequences = [fill(pager.sequence(), n, seed=n) for n in LENGTHS]
            os.write(1, f"forked {os.getpid()}\n".encode())
            _save_for_ever(folder, int(seed), sequences)
        os.waitpid(child, 0)
        os.write(1, b"ended\n")


@dataclass
class Lived:
    """What a saver said before it was killed."""

    saved: dict[str, int] = field(default_factory=dict)  # by name: the last one reported
    begun: tuple[str, int] | None = None  # the save it was killed in
    saves: int = 0


class Nursery:
    """Runs savers and kills them; each one has its own moment."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._expect("ready")

    def _line(self):
        line = self._process.stdout.readline()
        assert line, "the nursery died"
        return line.split()

    def _expect(self, *words):
        line = self._line()
        assert line[: len(words)] == list(words), line
        return line[len(words) :]

    def live_and_die(self, folder, seed, moment):
        """`moment(lines so far)` says when to kill; returns what the saver reported."""
        self._process.stdin.write(f"{folder} {seed}\n")
        self._process.stdin.flush()
        lived, child = Lived(), None
        killed = False
        while True:
            line = self._line()
            match line:
                case ["forked", pid]:
                    child = int(pid)
                    moment(child)
                    killed = True
                case ["begin", name, which]:
                    lived.begun = (name, int(which))
                case ["saved", name, which]:
                    lived.saved[name] = int(which)
                    lived.begun = None
                    lived.saves += 1
                case ["ended"]:
                    assert killed
                    return lived
                case _:
                    raise AssertionError(line)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0


if __name__ == "__main__":
    serve()
