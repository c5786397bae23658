"""Folders that benchmarks measure files in go with whoever made them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpager_bench import places

MAKER = """
import signal, sys, time
from kvpager_bench import places
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
places.end_cleanly_when_told()
with places.scratch_folder(sys.argv[1]) as folder:
    (folder / "state").write_bytes(bytes(1 << 20))
    (folder / "deeper").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a folder in tmp_path and sleeps."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=places.module_environment(),
    ) as process:
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip()).is_dir()
        yield process
        process.kill()


def aged(folder: Path) -> Path:
    """The folder, as if it had been made an hour ago."""
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_end_takes_its_folder_along(
    tmp_path: Path, maker: subprocess.Popen[str], number: signal.Signals
) -> None:
    maker.send_signal(number)
    assert maker.wait(30) != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_folder_that_is_made(
    tmp_path: Path, maker: subprocess.Popen[str]
) -> None:
    (left,) = tmp_path.iterdir()
    maker.kill()
    maker.wait(30)
    aged(left)
    with places.scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_maker_lives_stays_however_old_it_is(
    tmp_path: Path, maker: subprocess.Popen[str]
) -> None:
    (theirs,) = tmp_path.iterdir()
    aged(theirs)
    (new := tmp_path / "kvpager-bench-new").mkdir()  # may not have its lock yet
    assert places.sweep(tmp_path) == []
    assert (theirs / "state").exists()
    maker.kill()
    maker.wait(30)
    assert places.sweep(tmp_path) == [theirs]
    assert new.is_dir()


def test_an_exception_takes_the_folder_along_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), places.scratch_folder(tmp_path):
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == []
