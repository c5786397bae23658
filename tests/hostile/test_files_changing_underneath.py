"""A snapshot that is truncated, overwritten, replaced or removed while a session reads from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from specimens import LAYERS

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, StorageError

CHUNKS = 5
ALL = {f"{c},{layer}" for c in range(CHUNKS) for layer in range(LAYERS)}
# Slices that fail afterwards, by what happened; all others are read as they were saved.
GONE = {
    "shrink": {f"{c},{layer}" for c in (2, 3, 4) for layer in range(LAYERS)},
    "empty": ALL,
    "overwrite": {f"1,{layer}" for layer in range(LAYERS)} | {f"3,{LAYERS - 1}"},
    "replace": set(),
    "unlink": set(),
    "rewrite": set(),
    "grow": set(),
}


def run(level, folder):
    script = Path(__file__).with_name("shifting_ground.py")
    ran = subprocess.run(
        [sys.executable, script, level, folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, f"status {ran.returncode} (a signal if negative): {ran.stderr}"
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def with_pager(tmp_path_factory):
    return run("pager", tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory):
    return run("engine", tmp_path_factory.mktemp("ground"))


# attacks 68, 69, 70
@pytest.mark.parametrize("change", GONE)
def test_a_changed_file_is_an_error_for_what_changed_and_the_saved_bits_for_the_rest(
    with_pager, change
):
    result = with_pager[change]
    assert set(result["first"].values()) == {"same"}
    failed = {at for at, what in result["after"].items() if what == "CorruptSnapshotError"}
    assert set(result["after"]) == ALL
    assert failed == GONE[change]
    assert {w for at, w in result["after"].items() if at not in failed} <= {"same"}
    assert result["bystander"]
    summaries_gone = change in ("shrink", "empty")
    assert result["selected"] == ("CorruptSnapshotError" if summaries_gone else "yes")


# attacks 68, 69, 70, 72
@pytest.mark.parametrize("change", GONE)
def test_a_conversation_whose_file_changes_is_told_so_or_goes_on_with_the_same_tokens(
    with_engine, change
):
    result = with_engine[change]
    assert result["outcome"] == ("CorruptSnapshotError" if GONE[change] else "same")
    assert result["tokens"]
    assert result["fresh"], "the engine must go on with the same bits"


# attack 71
@pytest.mark.parametrize("change", ["shrink", "overwrite", "unlink", "replace"])
def test_a_pack_that_changes_under_an_open_manifest_is_damage_of_its_chunks(
    specimens, tmp_path, change
):
    files = specimens.copy(tmp_path)
    sound = _core.SnapshotReader.open(str(specimens.manifest))
    expected = [bytes(sound.read_chunk(c)) for c in range(sound.chunks)]
    reader = _core.SnapshotReader.open(str(files.manifest))
    if change == "shrink":
        os.truncate(files.pack(), 4096)
    elif change == "overwrite":
        files.pack().write_bytes(b"\0" * files.pack().stat().st_size)
    elif change == "unlink":
        files.pack().unlink()
    else:
        files.pack().unlink()
        shutil.copy(specimens.pack(1), files.pack())
    damaged = {0, 2} if change in ("shrink", "overwrite") else set()
    for c, saved in enumerate(expected):
        if c in damaged:
            with pytest.raises(CorruptSnapshotError, match=f"chunk {c}"):
                reader.read_chunk(c)
        else:
            assert bytes(reader.read_chunk(c)) == saved


# attacks 68, 69
def test_readers_in_threads_survive_a_file_that_shrinks_and_grows_all_the_time(specimens, tmp_path):
    files = specimens.copy(tmp_path)
    raw = files.single.read_bytes()
    reader = _core.SnapshotReader.open(str(files.single))
    expected = [bytes(reader.read_chunk(c)) for c in range(reader.chunks)]
    stop, wrong, outcomes = threading.Event(), [], {"read": 0, "damaged": 0}

    def read_one(c):
        try:
            got = bytes(reader.read_chunk(c))
        except (CorruptSnapshotError, StorageError):
            outcomes["damaged"] += 1
            return
        outcomes["read"] += 1
        if got != expected[c]:
            wrong.append(c)

    def read():
        while not stop.is_set():
            for c in range(len(expected)):
                read_one(c)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(30_000):  # on a busy machine the readers come late
        if n >= 300 and outcomes["damaged"] and outcomes["read"]:
            break
        os.truncate(files.single, 4096 + n * 13 % 9000)
        with files.single.open("r+b") as file:
            file.write(raw)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert outcomes["read"] > 0
    assert outcomes["damaged"] > 0
    assert not reader.verify(1)
