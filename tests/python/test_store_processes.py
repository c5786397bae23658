"""Several processes and threads in one store: nothing is lost, torn or over the budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_store import CHUNK, Author, size
from store_children import Nursery

from kvpager.stores import DirectoryStore
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
