"""Threads and processes that use one store, and how long they wait for its lock."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_store import CHUNK, Author, C, size, text
from store_children import Nursery

from kvpager import PagerConfig, _core, open_snapshot
from kvpager.errors import InvalidArgumentError, StorageError
from kvpager.stores import DirectoryStore, FileStore
from kvpager.stores.lock import exclusive

BUDGET = 50 * CHUNK  # a few snapshots of at most 12 chunks each; everybody meets its end


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("journals")) as nursery:
        yield nursery


def run(nursery: Nursery, folder: Path, seconds: float, threads: int, budget: int | None) -> None:
    store = DirectoryStore(folder / "store", byte_budget=budget)
    most = samples = 0
    children = [
        nursery.start(
            "work",
            folder=store.path,
            seed=seed,
            seconds=seconds,
            threads=threads,
            budget=budget is not None,
        )
        for seed in range(2)
    ]
    while any(child.alive() for child in children):
        # Between two steps: without the lock, a file could be counted that is gone before
        # another is there.
        with exclusive(f"{store.path}/lock", 120):
            most = max(most, size(store.path))
        samples += 1
        time.sleep(0.002)
    lines = [line for child in children for line in child.lines()]
    assert [line["error"] for line in lines if "error" in line] == []
    assert sum("finished" in line for line in lines) == 2
    counts = [line["counts"] for line in lines if "counts" in line]
    assert len(counts) == 2 * threads
    for what in ("saves", "reads", "prefixes"):
        assert all(each[what] for each in counts), counts
    assert samples > 5
    if budget is not None:
        assert budget / 2 < most <= budget
    author = Author()
    for entry in store.entries():
        assert entry.error is None
        reader = store.open(entry.name)
        author.check(reader, reader.tokens.tolist())
        del reader
    store.gc()
    stats = store.stats()
    assert stats["bytes_temporary"] == 0
    assert stats["bytes"] == size(store.path)


def test_two_processes_share_a_small_store_and_lose_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    run(nursery, tmp_path, seconds=2.5, threads=1, budget=BUDGET)


def test_two_processes_with_threads_share_a_store_without_bound(
    nursery: Nursery, tmp_path: Path
) -> None:
    run(nursery, tmp_path, seconds=2.0, threads=2, budget=None)


@pytest.mark.deep
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("budget", [None, BUDGET, 4 * BUDGET])
def test_two_processes_share_a_store_for_minutes(
    nursery: Nursery, tmp_path: Path, threads: int, budget: int | None
) -> None:
    run(nursery, tmp_path, seconds=60.0, threads=threads, budget=budget)


HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def holder_of(path: Path) -> subprocess.Popen[str]:
    """A process that has the lock; it ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, os.fspath(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_who_waits_for_a_stopped_holder_is_told_who_it_is(author: Author, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", lock_timeout=0.3)
    report = author.save(store, "before", text(2 * C))
    holder = holder_of(tmp_path / "store" / "lock")
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        calls = (
            lambda: author.save(store, "during", text(3 * C)),
            lambda: store.entries(),
            lambda: store.open("before"),
            lambda: store.gc(),
            lambda: store.delete("before"),
        )
        for call in calls:
            started = time.monotonic()
            with pytest.raises(StorageError, match=rf"process {holder.pid} \(.*stopped\)") as info:
                call()
            assert 0.3 <= time.monotonic() - started < 10
            assert "lock_timeout" in str(info.value)
    finally:
        os.kill(holder.pid, signal.SIGCONT)
        holder.communicate()
    assert [entry.name for entry in store.entries()] == ["before"]
    assert store.open("before").logical_digest == report.logical_digest
    author.save(store, "during", text(3 * C))


@pytest.mark.parametrize("options", [{}, {"byte_budget": "1GiB"}, {"ttl": 60}, {"mode": 0o640}])
@pytest.mark.parametrize("made", [False, True], ids=["a new store", "an old store"])
def test_opening_a_store_waits_no_longer_than_it_was_told(
    tmp_path: Path, options: dict[str, Any], made: bool
) -> None:
    if made:
        DirectoryStore(tmp_path)
    before = sorted(tmp_path.iterdir())
    holder = holder_of(tmp_path / "lock")
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        started = time.monotonic()
        if made and not options:  # nothing to change, and so nothing to wait for
            DirectoryStore(tmp_path, lock_timeout=0.2)
            assert time.monotonic() - started < 10
        else:
            with pytest.raises(StorageError, match=rf"process {holder.pid} \(.*stopped\)"):
                DirectoryStore(tmp_path, lock_timeout=0.2, **options)
            assert 0.2 <= time.monotonic() - started < 10
    finally:
        os.kill(holder.pid, signal.SIGCONT)
        holder.communicate()
    assert sorted(tmp_path.iterdir()) == sorted({*before, tmp_path / "lock"})
    assert DirectoryStore(tmp_path, lock_timeout=0.2, **options).entries() == []


def test_who_waits_goes_on_as_soon_as_the_holder_lets_go(tmp_path: Path) -> None:
    holder = holder_of(tmp_path / "lock")
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    with exclusive(os.fspath(tmp_path / "lock"), 60):
        pass
    timer.join()
    holder.communicate()


def test_who_waits_for_a_file_that_is_closed_meanwhile_has_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    flags = os.O_RDWR | os.O_CREAT
    waiting = _core.OwnedFile(str(path), flags)
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(waiting.lock(fcntl.LOCK_EX))
        except InvalidArgumentError as error:
            found.append(error)

    with _core.OwnedFile(str(path), flags) as holder:
        holder.lock(fcntl.LOCK_EX)
        thread = threading.Thread(target=wait)
        thread.start()
        number = waiting.fileno()
        time.sleep(0.1)  # it waits in flock()
        waiting.close()
        other = os.open(tmp_path / "other", flags)  # not the number that is waited at
        assert other != number
        os.close(other)
    thread.join(10)
    assert isinstance(found[0], InvalidArgumentError), found
    with _core.OwnedFile(str(path), flags) as free:
        assert free.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), None, "2", True])
def test_a_time_out_that_is_no_time_is_refused_before_a_store_is_made(
    tmp_path: Path, seconds: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"lock_timeout is .*; expected a number"):
        DirectoryStore(tmp_path / "store", lock_timeout=seconds)
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_of_a_dead_writer_is_swept_by_the_next_save_beside_it(
    author: Author, tmp_path: Path
) -> None:
    store = FileStore(tmp_path)
    dead = tmp_path / ".kvsnap-0123456789abcdef.tmp"
    dead.write_bytes(b"half of a snapshot")
    author.save(store, "a.kvsnap", text(2 * C))
    assert [file.name for file in tmp_path.iterdir()] == ["a.kvsnap"]


def test_what_is_being_written_or_is_no_file_of_ours_is_not_swept(
    author: Author, tmp_path: Path
) -> None:
    living = tmp_path / ".kvsnap-00000000000000aa.tmp"
    living.write_bytes(b"still growing")
    pipe = tmp_path / ".kvsnap-00000000000000bb.tmp"
    os.mkfifo(pipe)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody's")
    link = tmp_path / ".kvsnap-00000000000000cc.tmp"
    link.symlink_to(elsewhere)
    notes = tmp_path / ".kvsnap-notes.tmp"
    notes.write_bytes(b"not of the form")
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        author.save(FileStore(tmp_path), "a.kvsnap", text(2 * C))
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"a.kvsnap", living.name, pipe.name, "elsewhere", link.name, notes.name}


@pytest.mark.parametrize("path", ["a\udcff.kvsnap", "a\0b.kvsnap", "x" * 300, "", "folder"])
def test_a_path_that_cannot_be_is_a_typed_error_that_says_it(
    author: Author, tmp_path: Path, path: str
) -> None:
    (tmp_path / "folder").mkdir()
    store = FileStore(tmp_path)
    tokens = text(2 * C)
    with pytest.raises((StorageError, InvalidArgumentError)) as info:
        author.save(store, path, tokens)
    assert info.value.args
    with pytest.raises((StorageError, InvalidArgumentError)):
        store.open(path)
    with pytest.raises((StorageError, InvalidArgumentError)):
        store.delete(path)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
    with pytest.raises((StorageError, InvalidArgumentError)):
        author.save(DirectoryStore(tmp_path / "store"), path + "/", tokens)


@pytest.mark.parametrize("path", ["a\udcff", "a\0b"])
def test_every_door_refuses_a_path_that_cannot_be(tmp_path: Path, path: str) -> None:
    at = f"{tmp_path}/{path}"
    for door in (
        lambda: DirectoryStore(at),
        lambda: FileStore(at).entries(),
        lambda: open_snapshot(at),
        lambda: PagerConfig(64, disk_path=at, disk_bytes=1 << 20),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(repr(at))):
            door()
    assert list(tmp_path.iterdir()) == []
