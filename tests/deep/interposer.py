"""The preloaded library of interposer.cc: builds it, starts a process under it, speaks to it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("interposer.cc")
TESTS = SOURCE.parent.parent
ROOT_VARIABLE = "KVPAGER_DEEP_ROOT"


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; $CXX or g++ has to be there."""
    library = folder / "interposer.so"
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE, "-ldl"], check=True)
    return library


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder in memory where there is one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="kvpager-deep-") as folder:
        yield Path(folder)


def run(module: str, arguments: Sequence[str], under: Path | None = None) -> int:
    """Runs `python -m module` with the tests' folders on its path, and returns its exit status.

    under: a folder for the library, with which it sees what is below under/root; None: without it.
    """
    more = {}
    if under is not None:
        (under / "root").mkdir(exist_ok=True)
        preloaded = [os.environ.get("LD_PRELOAD", ""), os.fspath(build(under))]
        more = {ROOT_VARIABLE: os.fspath(under / "root"), "LD_PRELOAD": " ".join(preloaded).strip()}
    path = [TESTS, TESTS / "python", TESTS / "model", os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **more,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-m", module, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def root() -> Path:
    """The folder whose calls are seen."""
    return Path(os.environ[ROOT_VARIABLE])


@dataclass(frozen=True)
class Seen:
    """What became of an armed stretch.

    Attributes:
        calls: how many calls below the root there were.
        failed: name of the call that was made to fail, and the path; "" where there was none.
    """

    calls: int
    failed: str
    path: str


class Interposer:
    """The library as this process has it."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._arm = library.deep_arm
        self._arm.argtypes = [ctypes.c_long, ctypes.c_int]
        self._disarm = library.deep_disarm
        self._disarm.restype = ctypes.c_long
        self._call = library.deep_failed_call
        self._path = library.deep_failed_path
        self._call.restype = self._path.restype = ctypes.c_char_p
        self._record = library.deep_record
        self._mark = library.deep_mark
        self._mark.argtypes = [ctypes.c_char_p]

    def arm(self, after: int, error: int) -> None:
        """The call after `after` others fails with this errno; -1: none, they are only counted."""
        self._arm(after, error)

    def disarm(self) -> Seen:
        calls = self._disarm()
        return Seen(calls, self._call().decode(), self._path().decode())

    @contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        """Writes all changes below the root to a file outside it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        self._record(descriptor)
        try:
            yield
        finally:
            self._record(-1)
            os.close(descriptor)

    def mark(self, text: str) -> None:
        """A line in the record."""
        self._mark(text.encode())
