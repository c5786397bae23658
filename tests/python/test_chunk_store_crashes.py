"""A chunk store whose users are killed, interrupted, or fail at every step there is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chunk_children
import pytest
from chunk_children import BUDGET, CALLS, IDENTITY, MANY, STEPS, after_step, prepare
from small_blocks import BLOCK, blocks, bytes_on_disk, name, remove_index, there
from store_children import Child, Nursery, Trap, copies, kill_at_steps

from interrupts import at_every_instant, open_files
from kvpager.errors import CapacityError, StorageError
from kvpager.stores import ChunkStore

ALL = list(range(200))
POINTS = ["file.open", "file.lock", "block.read"]
# Kills at every third call that a step makes, and as many failing calls of all of them.
FEWEST = dict.fromkeys(STEPS, 6) | {"read": 1, "read of a damaged block": 1}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("journals"), chunk_children.__file__) as nursery:
        yield nursery


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: killing a process needs no disk, and this is fast."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvpager-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "store"
    prepare(os.fspath(folder))
    return folder


def held(folder: Path) -> list[int]:
    """What the store holds. All of it is whole but number 8, which the template has damaged."""
    with ChunkStore(folder, IDENTITY, create=False) as store:
        found = [n for n, has in zip(ALL, store.has([name(n) for n in ALL])) if has]
        assert there(store, [n for n in found if n != 8]) == [n for n in found if n != 8]
        return found


def check_after_accident(folder: Path, step: str) -> None:
    """What is there is whole and allowed; the index says so; nothing is left; puts go on."""
    assert bytes_on_disk(folder) <= BUDGET
    found = held(folder)
    if step == "put that evicts":
        assert set(found) <= {*range(20), *range(100, 116)}
        assert len(found) >= 13  # no more was evicted than the put needed
    else:
        assert found in after_step(step)
    remove_index(folder)
    assert held(folder) == found
    with ChunkStore(folder, IDENTITY, create=False) as store:
        store.gc()
        assert store.stats()["bytes"] == bytes_on_disk(folder) <= BUDGET
        assert [path for path in Path(folder, "packs").iterdir() if path.suffix == ".tmp"] == []
        store.put(blocks([150]))
        assert there(store, [150]) == [150]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_of_the_store_everything_visible_is_whole(
    nursery: Nursery, template: Path, room: Path, step: str
) -> None:
    def check(folder: Path) -> None:
        check_after_accident(folder, step)

    assert kill_at_steps(nursery, template, room, step, 3, POINTS, check) >= FEWEST[step]


@pytest.mark.deep
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_of_the_store_everything_visible_is_whole(
    nursery: Nursery, template: Path, room: Path, step: str
) -> None:
    def check(folder: Path) -> None:
        check_after_accident(folder, step)

    assert kill_at_steps(nursery, template, room, step, 1, POINTS, check) >= 2 * FEWEST[step]


def attempt(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except (StorageError, CapacityError) as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "read"])  # which is native
def test_a_call_that_fails_anywhere_leaves_the_store_whole(
    template: Path, room: Path, step: str, code: int
) -> None:
    def spring() -> None:
        raise OSError(code, os.strerror(code))

    for after, folder in enumerate(copies(template, room / "store")):
        with ChunkStore(folder, IDENTITY) as store:
            with Trap(after, spring, CALLS) as trap:
                error = attempt(lambda store=store: STEPS[step](store))  # type: ignore[misc]
            assert error is None or os.strerror(code) in str(error)
            there(store, [n for n in ALL if n != 8])
        if not trap.sprung:
            break
        check_after_accident(folder, step)
    assert after >= FEWEST[step]


def test_the_budget_holds_at_every_step(template: Path, room: Path) -> None:
    folder = shutil.copytree(template, room / "store")
    seen = []
    with ChunkStore(folder, IDENTITY) as store:
        for after in range(1000):
            with Trap(after, lambda: seen.append(bytes_on_disk(folder)), CALLS) as trap:
                store.put(blocks(list(range(1000 + 16 * after, 1016 + 16 * after))))
            if not trap.sprung:
                break
    assert len(seen) > 20
    assert BUDGET - 16 * BLOCK < max(seen) <= BUDGET


# Killed at any time.


def kill_again_and_again(nursery: Nursery, folder: Path, kills: int, budget: int | None) -> int:
    """A store whose only user is killed over and over; returns how many puts were reported."""
    dice = random.Random(kills)
    ChunkStore(folder, IDENTITY, byte_budget=budget).close()
    sure: set[int] = set()
    puts = 0
    for kill in range(kills):
        child: Child = nursery.start("put_until_killed", folder=os.fspath(folder), seed=kill)
        child.wait_until_ready()
        time.sleep(dice.uniform(0, 0.1))
        child.kill()
        for line in child.lines():
            assert "error" not in line, line
            sure |= set(line.get("stored", ()))
            sure -= set(line.get("deleting", ()))
            puts += "stored" in line
        assert budget is None or bytes_on_disk(folder) <= budget
        with ChunkStore(folder, IDENTITY) as store:
            found = there(store, list(range(MANY)))
            assert budget is not None or sure <= set(found)
            assert store.verify() == []
            if kill % 5 == 0:
                remove_index(folder)
                assert there(store, list(range(MANY))) == found
            store.gc()
            assert store.stats()["bytes"] == bytes_on_disk(folder)
    return puts


def test_what_was_reported_stored_survives_kills_at_random_instants(
    nursery: Nursery, room: Path
) -> None:
    assert kill_again_and_again(nursery, room / "store", 30, None) >= 30


def test_the_budget_holds_whenever_a_writer_is_killed(nursery: Nursery, room: Path) -> None:
    assert kill_again_and_again(nursery, room / "store", 30, BUDGET) >= 30


@pytest.mark.deep
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_what_was_reported_stored_survives_hundreds_of_kills(
    nursery: Nursery, room: Path, budget: int | None
) -> None:
    assert kill_again_and_again(nursery, room / "store", 500, budget) >= 500


# Together.


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_processes_and_threads_share_a_folder(
    nursery: Nursery, room: Path, budget: int | None
) -> None:
    folder = room / "store"
    ChunkStore(folder, IDENTITY, byte_budget=budget).close()
    children = [
        nursery.start("work", folder=os.fspath(folder), seed=seed, seconds=2.0, threads=2)
        for seed in range(3)
    ]
    for child in children:
        child.wait()
        assert [line for line in child.lines() if "error" in line] == []
        assert {"refused": 0} in child.lines()
        assert {"finished": True} in child.lines()
    with ChunkStore(folder, IDENTITY) as store:
        assert store.verify() == []
        there(store, list(range(MANY)))
        store.gc()
        assert store.stats()["bytes"] == bytes_on_disk(folder)
        assert budget is None or bytes_on_disk(folder) <= budget


def _read_in_child(store: ChunkStore, answers: multiprocessing.SimpleQueue[object]) -> None:
    try:
        first = there(store, [1, 2])
        store.put(blocks([3]))
        answers.put((first, there(store, [1, 2, 3])))
    except BaseException as error:
        answers.put(repr(error))


def test_a_forked_child_goes_on_with_the_store(room: Path) -> None:
    context = multiprocessing.get_context("fork")
    with ChunkStore(room / "store", IDENTITY) as store:
        store.put(blocks([1, 2]))
        there(store, [1])
        answers = context.SimpleQueue()
        child = context.Process(target=_read_in_child, args=(store, answers))
        child.start()
        assert answers.get() == ([1, 2], [1, 2, 3])
        child.join()
        assert there(store, [1, 2, 3]) == [1, 2, 3]


# Interrupted.


@pytest.mark.parametrize("step", ["put that evicts", "read", "delete", "gc"])
def test_ctrl_c_at_any_instant_loses_nothing(template: Path, room: Path, step: str) -> None:
    numbers = iter(range(10**6))

    def prepared() -> ChunkStore:
        folder = room / f"store-{next(numbers)}"
        store = ChunkStore(shutil.copytree(template, folder), IDENTITY)
        there(store, [1])
        return store

    def check(store: ChunkStore, interrupted: bool) -> None:
        assert bytes_on_disk(store.path) <= BUDGET
        there(store, [n for n in ALL if n != 8])

    def finish(store: ChunkStore) -> None:
        store.close()
        assert [file for file in open_files() if store.path in file] == []
        check_after_accident(Path(store.path), "put that evicts" if "put" in step else step)
        shutil.rmtree(store.path)

    tried = at_every_instant(prepared, STEPS[step], check, finish, most=60)
    assert tried.interrupted > 20
