"""Commands that are interrupted, and commands whose reader goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from cli_snapshots import files_below, save_file, save_in, told

from kvpager.stores import DirectoryStore

# The command itself, in a process of its own, that stops where progress is first told: the signal
# then comes in the middle of the work, and not before or after it.
SLOW = """
import signal, sys, time
from contextlib import contextmanager
from kvpager.cli import main
from kvpager.cli.snapshot import move, verify

@contextmanager
def wait(args, label):
    def stop(done, total):
        print("in the middle", file=sys.stderr, flush=True)
        time.sleep(60)
    yield stop

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
move.work_progress = verify.work_progress = wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize(
    "line",
    [
        "export store/turn1 old.kvsnap --force",
        "import turn2.kvsnap store",
        "verify turn2.kvsnap --format json --output old.kvsnap",
    ],
)
def test_an_interrupted_command_says_so_and_leaves_everything_as_it_was(
    capsys, tmp_path, number, code, words, line
):
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "turn1", 90)
    save_file(tmp_path / "turn2.kvsnap", 300)
    (tmp_path / "old.kvsnap").write_bytes(b"old")
    before = files_below(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "snapshot", *line.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr.readline() == "in the middle\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (code, "", f"kvpager: {words}\n")
    assert files_below(tmp_path) == before
    assert (tmp_path / "old.kvsnap").read_bytes() == b"old"
    told(capsys, "snapshot", "verify", store.path)
    told(capsys, "snapshot", "import", tmp_path / "turn2.kvsnap", store.path)  # nobody has a lock


def test_a_reader_of_stdout_that_goes_away_is_no_error_to_tell(tmp_path):
    file = save_file(tmp_path / "turn1.kvsnap", 50)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvpager.cli", "snapshot", "diff", str(file), str(file)],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 141  # neither equal (0) nor different (1)
