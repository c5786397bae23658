"""A store with companions whose users are killed, and whose system calls fail, at every step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from small_store import Author, files
from store_children import (
    PAIR_STEPS,
    PAIRS_BEFORE,
    Nursery,
    Trap,
    after_pair_step,
    copies,
    kill_at_steps,
    prepare_pairs,
    save_pair,
)

from kvpager import _core
from kvpager.errors import CapacityError, StorageError
from kvpager.stores import DirectoryStore

POINTS = ["snapshot.create", "snapshot.write", "snapshot.fsync", "snapshot.rename"]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("journals")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "store"
    prepare_pairs(os.fspath(folder))
    return folder


@pytest.fixture
def draft():
    return Author(fingerprint="draft")


def held(author, draft, store):
    """The tokens of every visible snapshot, each of which is whole, and so is what belongs to it.

    A companion of a snapshot is of the same save.
    """
    found = {}
    for entry in store.entries():
        assert entry.error is None
        tokens = store.open(entry.name).tokens.tolist()
        author.check(store.open(entry.name), tokens)
        for companion in entry.companions:
            draft.check(store.open(companion), tokens[:-1])
        found[entry.name] = tokens
    return found


def check_after_accident(author, draft, folder, allowed):
    """What is visible is whole and one of `allowed`; gc leaves nothing else; saving goes on."""
    store = DirectoryStore(folder, create=False)
    found = held(author, draft, store)
    assert found in allowed
    store.gc()
    assert held(author, draft, store) == found
    assert store.gc().orphans == ()
    listed = [entry.name for entry in store.entries(companions=True)]
    needed = {pack for name in listed for pack, _ in store.open(name).packs}
    assert {name for name in files(folder) if name.startswith("packs/")} == {
        f"packs/{pack}.kvsnap" for pack in needed
    }
    assert {name for name in files(folder) if name.endswith(".kvsnap")} - {
        f"packs/{pack}.kvsnap" for pack in needed
    } == {f"snapshots/{name}.kvsnap" for name in listed}
    save_pair(author, store, "a", PAIRS_BEFORE["a"])
    assert "a.draft" in [entry.name for entry in store.entries(companions=True)]
    assert held(author, draft, store)["a"] == PAIRS_BEFORE["a"]


def kills_at_steps(nursery, author, draft, template, room, step, stride):
    def check(folder):
        check_after_accident(author, draft, folder, [PAIRS_BEFORE, after_pair_step(step)])

    return kill_at_steps(nursery, template, room, step, stride, POINTS, check)


@pytest.mark.parametrize("step", PAIR_STEPS)
def test_killed_at_a_step_of_the_store_every_pair_agrees(
    nursery, author, draft, template, tmp_path, step
):
    assert kills_at_steps(nursery, author, draft, template, tmp_path, step, stride=6) > 2


@pytest.mark.deep
@pytest.mark.parametrize("step", PAIR_STEPS)
def test_killed_at_any_step_of_the_store_every_pair_agrees(
    nursery, author, draft, template, tmp_path, step
):
    assert kills_at_steps(nursery, author, draft, template, tmp_path, step, stride=1) > 20


@pytest.mark.parametrize("step", PAIR_STEPS)
def test_a_system_call_that_fails_anywhere_costs_no_snapshot(
    author, draft, template, tmp_path, step
):
    def spring():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failures = 0
    for after, folder in enumerate(copies(template, tmp_path / "store")):
        store = DirectoryStore(folder)
        error = None
        with Trap(after, spring) as trap:
            try:
                PAIR_STEPS[step](author, store)
            except (StorageError, CapacityError) as caught:
                error = caught
        if not trap.sprung:
            assert error is None
            break
        failures += error is not None
        changed = after_pair_step(step)
        allowed = [changed] if error is None else [PAIRS_BEFORE]
        if step == "delete pair":
            allowed = [PAIRS_BEFORE, changed]
        assert held(author, draft, store) in allowed
        check_after_accident(author, draft, folder, allowed)
    assert failures >= 3


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_of_the_core_in_a_pair_costs_no_snapshot(author, draft, template, tmp_path, point):
    for after, folder in enumerate(copies(template, tmp_path / "store")):
        store = DirectoryStore(folder)
        error = report = None
        _core.arm_fault(point, after, errno.EIO)
        try:
            report = save_pair(author, store, "a", after_pair_step("next pair")["a"])
        except StorageError as caught:
            error = caught
        finally:
            _core.disarm_faults()
        allowed = [after_pair_step("next pair") if error is None else PAIRS_BEFORE]
        assert held(author, draft, store) in allowed
        check_after_accident(author, draft, folder, allowed)
        if error is None and report.companions:
            break
    assert after > 0
    assert Path(folder).is_dir()
