"""A store whose users are killed, and whose system calls fail, at every step there is."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_store import CHUNK, Author, files, size, text
from store_children import (
    PAIR_STEPS,
    STEPS,
    Child,
    Nursery,
    Trap,
    after_step,
    before_step,
    copies,
    kill_at_steps,
    prepare,
    prepare_pairs,
    tokens_of,
)

from kvpager import _core
from kvpager.errors import CapacityError, StorageError
from kvpager.stores import DirectoryStore

POINTS = [
    "snapshot.create",
    "snapshot.lock",
    "snapshot.look",
    "snapshot.reserve",
    "snapshot.write",
    "snapshot.truncate",
    "snapshot.fsync",
    "snapshot.rename",
    "snapshot.read",
    "snapshot.share",
]
CHANGING = ("grow", "save", "delete", "pin", "gc", *PAIR_STEPS)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("journals")) as nursery:
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
def author() -> Author:
    return Author()


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two stores, by whether snapshots have companions."""
    folder = tmp_path_factory.mktemp("templates")
    prepare(os.fspath(folder / "alone"))
    prepare_pairs(os.fspath(folder / "pairs"))
    return {False: folder / "alone", True: folder / "pairs"}


@pytest.fixture
def template(templates: dict[bool, Path], step: str) -> Path:
    return templates[step in PAIR_STEPS]


def held(author: Author, store: DirectoryStore) -> dict[str, list[int]]:
    """The tokens of every visible snapshot, which is whole and has companions of the same save."""
    found, draft = {}, Author(fingerprint="draft")
    for entry in store.entries():
        assert entry.error is None
        reader = store.open(entry.name)
        found[entry.name] = reader.tokens.tolist()
        author.check(reader, found[entry.name])
        for companion in entry.companions:
            draft.check(store.open(companion), found[entry.name][:-1])
    return found


def check_after_accident(
    author: Author, folder: Path, allowed: list[dict[str, list[int]]]
) -> dict[str, list[int]]:
    """What is visible is whole and one of `allowed`; gc leaves nothing else; saving goes on."""
    store = DirectoryStore(folder, create=False)
    found = held(author, store)
    assert found in allowed
    store.gc()
    assert held(author, store) == found
    assert store.gc().orphans == ()
    assert store.stats()["bytes_temporary"] == 0
    listed = [entry.name for entry in store.entries(companions=True)]
    there = {f"snapshots/{name}.kvsnap" for name in listed}
    there |= {f"packs/{pack}.kvsnap" for name in listed for pack, _ in store.open(name).packs}
    notes = {f"snapshots/{name}.json" for name in found}
    assert there <= files(folder).keys() <= there | notes
    author.save(store, "afterwards", text(40, seed=99))
    assert held(author, store) == {**found, "afterwards": text(40, seed=99)}
    return found


# Killed at every step.


def kills_at_steps(
    nursery: Nursery, author: Author, template: Path, room: Path, step: str, stride: int
) -> int:
    def check(folder: Path) -> None:
        check_after_accident(author, folder, [before_step(step), after_step(step)])

    return kill_at_steps(nursery, template, room, step, stride, POINTS, check)


@pytest.mark.parametrize("step", CHANGING)
def test_killed_at_a_step_of_the_store_everything_visible_is_whole(
    nursery: Nursery, author: Author, template: Path, room: Path, step: str
) -> None:
    assert kills_at_steps(nursery, author, template, room, step, stride=9) > 2


@pytest.mark.deep
@pytest.mark.parametrize("step", CHANGING)
def test_killed_at_any_step_of_the_store_everything_visible_is_whole(
    nursery: Nursery, author: Author, template: Path, room: Path, step: str
) -> None:
    assert kills_at_steps(nursery, author, template, room, step, stride=1) > 20


# Failing at every step.


def attempt(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except (StorageError, CapacityError) as error:
        return error
    return None


@pytest.mark.parametrize("step", STEPS)
def test_a_system_call_that_fails_anywhere_leaves_the_store_as_it_was(
    author: Author, template: Path, room: Path, step: str
) -> None:
    def spring() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failures = 0
    for after, folder in enumerate(copies(template, room / "store")):
        store = DirectoryStore(folder)
        with Trap(after, spring) as trap:
            error = attempt(lambda store=store: STEPS[step](author, store))  # type: ignore[misc]
        if not trap.sprung:
            assert error is None
            break
        if error is None:  # one that only tidies up, or marks a use
            allowed = [after_step(step)]
        else:
            failures += 1
            assert os.strerror(errno.EIO) in str(error)
            if step in ("grow", "save"):
                assert files(folder).keys() <= files(template).keys()  # nothing of it is left
            # A name is gone or not; the rest of a deletion is done by the next.
            allowed = [before_step(step), *[after_step(step)] * ("delete" in step)]
        assert held(author, store) in allowed  # the same object goes on too
        check_after_accident(author, folder, allowed)
    assert failures >= 2


@pytest.mark.parametrize("step", [step for step in STEPS if step not in PAIR_STEPS] + ["next pair"])
def test_a_fault_of_the_core_leaves_the_store_as_it_was(
    author: Author, template: Path, room: Path, step: str
) -> None:
    failures = 0
    for point in POINTS:
        met: list[bool] = []
        for after, folder in enumerate(copies(template, room / "store")):
            store = DirectoryStore(folder)
            _core.arm_fault(point, after, errno.EIO)
            error = attempt(lambda store=store: STEPS[step](author, store))  # type: ignore[misc]
            _core.disarm_faults()
            failures += error is not None
            if error is not None and step in ("grow", "save"):
                assert files(folder).keys() <= files(template).keys()  # nothing of it is left
            allowed = [after_step(step) if error is None else before_step(step)]
            assert held(author, store) in allowed
            check_after_accident(author, folder, allowed)
            # The seam does not say whether a fault was met, and a file that cannot be read while
            # the store is listed is got over.
            met.append(error is not None)
            patience = {"snapshot.read": 30, "snapshot.share": 6}.get(point, 2)
            if not any(met[-patience:]) and len(met) >= patience:
                break
    assert failures or step in ("delete", "pin")


# Killed at any time.


def expected(lines: list[dict[str, Any]], known: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Of each name, what may be there: token lists, or None for nothing."""
    for line in lines:
        name = line.get("name")
        tokens = tokens_of(line["seed"], line["length"]) if "seed" in line else None
        if "begin" in line:
            known[name] = [*known.get(name, [None]), tokens]
        elif line.get("done") in ("save", "delete"):
            known[name] = [tokens]
        elif "refused" in line:
            known[name].pop()
    return known


def kill_again_and_again(
    nursery: Nursery, author: Author, folder: Path, kills: int, budget: int | None
) -> int:
    """A store whose only user is killed over and over; returns how many saves were reported."""
    dice = random.Random(kills)
    store = DirectoryStore(folder, byte_budget=budget)
    known: dict[str, list[Any]] = {}
    saves = 0
    for kill in range(kills):
        child: Child = nursery.start(
            "save_until_killed", folder=store.path, seed=kill, pins=budget is not None
        )
        child.wait_until_ready()
        time.sleep(dice.uniform(0, 0.25))
        child.kill()
        lines = child.lines()
        assert not any("error" in line for line in lines), lines
        saves += sum(line.get("done") == "save" for line in lines)
        known = expected(lines, known)
        assert budget is None or size(folder) <= budget
        found = held(author, store)
        for name, tokens in found.items():
            assert tokens in known[name]
        for name, possible in known.items():
            kept = budget is None or (name == "pinned" and {"done": "pin", "name": name} in lines)
            assert name in found or None in possible or not kept, f"{name} is lost"
        store.gc()
        assert store.stats()["bytes_temporary"] == 0
        assert held(author, store) == found
        known = {name: [found.get(name)] for name in known}
    return saves


def test_what_was_reported_saved_survives_kills_at_random_instants(
    nursery: Nursery, author: Author, room: Path
) -> None:
    assert kill_again_and_again(nursery, author, room / "store", 20, None) >= 5


def test_the_budget_holds_whenever_a_writer_is_killed(
    nursery: Nursery, author: Author, room: Path
) -> None:
    budget = 40 * CHUNK
    assert kill_again_and_again(nursery, author, room / "store", 8, budget) >= 2


@pytest.mark.deep
@pytest.mark.parametrize("budget", [None, 40 * CHUNK, 100 * CHUNK])
def test_what_was_reported_saved_survives_hundreds_of_kills(
    nursery: Nursery, author: Author, room: Path, budget: int | None
) -> None:
    assert kill_again_and_again(nursery, author, room / "store", 300, budget) >= 100
