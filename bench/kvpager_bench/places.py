"""Folders of results in the checkout, and the environment in which modules are found.

Also scratch folders for measured files, which are removed with the process that made them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PACKAGE_DIR = Path(__file__).resolve().parent
RESULTS_VARIABLE = "KVPAGER_BENCH_RESULTS"
FOLDER_PREFIX = "kvpager-bench-"  # of folders that scratch_folder makes
_SETTLED_S = 60.0  # a folder younger than this may not have its lock yet
_ENDING = (signal.SIGINT, signal.SIGTERM)


CHECKOUT = PACKAGE_DIR.parents[1]
RESULTS_DIR = CHECKOUT / "bench" / "results"
DOCS_DIR = CHECKOUT / "docs" / "results"
SCRATCH_DIR = CHECKOUT / "build" / "bench"


def results_dir() -> Path:
    """RESULTS_DIR, unless $KVPAGER_BENCH_RESULTS names another folder; workers inherit it."""
    given = os.environ.get(RESULTS_VARIABLE)
    return Path(given) if given else RESULTS_DIR


def module_environment() -> dict[str, str]:
    """The environment of a process that runs `python -m kvpager_bench...`."""
    path = [str(PACKAGE_DIR.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole or not at all.

    It has the umask's permissions: figures contain no user's text and are meant to be published.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder below `parent`, or that of temporary files; removed when the block ends.

    Its process holds a lock on it. Folders of killed processes are removed first, because they can
    have gigabytes.
    """
    within = Path(parent or tempfile.gettempdir())
    sweep(within)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=within))
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        with _undisturbed():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(parent: Path) -> list[Path]:
    """Removes folders of `scratch_folder` whose processes have ended; returns them."""
    swept = []
    for folder in parent.glob(FOLDER_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, or removed by now
            if time.time() - folder.stat().st_mtime < _SETTLED_S:
                continue
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                swept.append(folder)
            finally:
                os.close(held)
    return swept


def end_cleanly_when_told() -> None:
    """Makes SIGTERM end the process as an interrupt does, so that it removes its files."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A block that no second signal to end interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
