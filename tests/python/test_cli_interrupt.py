"""Commands that are interrupted, and commands whose reader goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
move.byte_progress = verify.byte_progress = wait
sys.exit(main(sys.argv[1:]))
"""


def interrupted(number, *arguments):
    """Sends a signal in the middle of a command; returns its exit code, stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
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
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupted_export_leaves_nothing_and_the_old_file(tmp_path, number, code, words):
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "turn1", 90)
    folder = tmp_path / "out"
    folder.mkdir()
    old = folder / "turn1.kvsnap"
    old.write_bytes(b"old")
    got = interrupted(number, "snapshot", "export", f"{store.path}/turn1", old, "--force")
    assert got == (code, "", f"kvpager: {words}\n")
    assert files_below(folder) == ["turn1.kvsnap"]
    assert old.read_bytes() == b"old"


def test_an_interrupted_import_leaves_the_store_as_it_was(capsys, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "turn1", 50)
    file = save_file(tmp_path / "turn2.kvsnap", 300)
    before = files_below(Path(store.path))
    got = interrupted(signal.SIGINT, "snapshot", "import", file, store.path)
    assert got == (130, "", "kvpager: interrupted\n")
    assert files_below(Path(store.path)) == before
    told(capsys, "snapshot", "verify", store.path)
    told(capsys, "snapshot", "import", file, store.path)  # nobody holds a lock


def test_an_interrupted_verify_gives_no_result(tmp_path):
    file = save_file(tmp_path / "turn1.kvsnap", 300)
    target = tmp_path / "result.json"
    arguments = ("snapshot", "verify", file, "--format", "json", "--output", target)
    assert interrupted(signal.SIGINT, *arguments) == (130, "", "kvpager: interrupted\n")
    assert files_below(tmp_path) == ["turn1.kvsnap"]


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
