"""Processes that use a chunk store and can be killed at any instant; see `store_children`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_blocks import BLOCK, FRONT, block, blocks, name, packs, read, there
from store_children import Journal, Trap, main

from kvpager import _core
from kvpager.errors import CapacityError
from kvpager.stores import ChunkStore, ReadResult
from kvpager.stores.chunks import contents
from kvpager.stores.index import Index

IDENTITY = {"model": "a"}
BUDGET = 3 * FRONT + 30 * BLOCK
MANY = 64  # blocks that workers know
CALLS: list[tuple[Any, str]] = [
    *((os, call) for call in ("open", "pwritev", "posix_fallocate", "fsync", "utime", "listdir")),
    *((os, call) for call in ("truncate", "preadv")),
    *((Path, call) for call in ("rename", "unlink")),
    *((Index, call) for call in ("execute", "executemany", "commit")),
    (contents, "punch"),
    (fcntl, "flock"),
]

# A store on which every kind of step has much to do: see `prepare`.
BEFORE = list(range(20))
NEW = list(range(100, 108))
STEPS: dict[str, Callable[[ChunkStore], object]] = {
    "put": lambda store: store.put(blocks([*NEW, 3, 5])),
    "put that evicts": lambda store: store.put(blocks(list(range(100, 116)))),
    "delete": lambda store: store.delete([name(n) for n in (2, 3, 18, 19)]),
    "delete a pack": lambda store: store.delete([name(n) for n in range(8)]),
    "gc": lambda store: store.gc(),
    "read of a damaged block": lambda store: read(store, name(8)),
    "read": lambda store: read(store, name(3)),
}


def after_step(step: str) -> list[list[int]]:
    """What the store may hold once the step was done, or was not."""
    lost = [n for n in BEFORE if n != 8]  # the damaged one, once it was read
    if step == "put":
        return [BEFORE, lost, [*BEFORE, *NEW], [*lost, *NEW]]
    if step == "delete":
        left = [n for n in BEFORE if n not in (2, 3, 18, 19)]
        return [BEFORE, lost, left, [n for n in left if n != 8]]
    if step == "delete a pack":
        return [BEFORE, lost, BEFORE[8:], BEFORE[9:]]
    return [BEFORE, lost]


def prepare(folder: str) -> None:
    """Makes a store with BEFORE in it, of which 8 is damaged, and a dead writer's file."""
    with ChunkStore(folder, IDENTITY, byte_budget=BUDGET) as store:
        store.put(blocks(BEFORE[:8]))
        old = set(packs(folder))
        store.put(blocks(BEFORE[8:]))
        (pack,) = set(packs(folder)) - old
    with pack.open("r+b") as file:
        file.seek(FRONT + 100)
        file.write(bytes([block(8)[100] ^ 1]))
    Path(folder, "packs", ".kvsnap-00ff.tmp").write_bytes(b"x" * 1000)


def die_during(journal: Journal, folder: str, step: str, point: str, after: int) -> None:
    """Does one step and dies, as by SIGKILL, at the `after`-th visit of a point."""
    with ChunkStore(folder, IDENTITY) as store, contextlib.ExitStack() as stack:
        if point == "python":
            spring = Trap(after, lambda: os.kill(os.getpid(), signal.SIGKILL), CALLS)
            stack.enter_context(spring)
        else:
            _core.arm_fault(point, after, -1)
        STEPS[step](store)
        _core.disarm_faults()
        stack.close()
    journal.write(survived=True)


def put_until_killed(journal: Journal, folder: str, seed: int) -> None:
    """Puts, deletes and collects in a loop."""
    dice = random.Random(seed)
    with ChunkStore(folder, IDENTITY) as store:
        journal.write(ready=True)
        while True:
            numbers = [dice.randrange(MANY) for _ in range(dice.randint(1, 6))]
            what = dice.random()
            if what < 0.7:
                store.put(blocks(numbers))
                journal.write(stored=numbers)
            elif what < 0.8:
                journal.write(deleting=numbers)
                store.delete([name(n) for n in numbers])
                journal.write(deleted=numbers)
            elif what < 0.95:
                there(store, numbers)
            else:
                store.gc()


def work(journal: Journal, folder: str, seed: int, seconds: float, threads: int) -> None:
    """Does everything a store can for a while, and checks every byte it gets to see."""
    with ChunkStore(folder, IDENTITY) as store:
        workers = [
            threading.Thread(target=_work, args=(journal, store, seed * 100 + n, seconds))
            for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        journal.write(refused=sum(store.stats()["refused"].values()))
    journal.write(finished=True)


def _work(journal: Journal, store: ChunkStore, seed: int, seconds: float) -> None:
    try:
        counts = _work_until(store, random.Random(seed), time.monotonic() + seconds)
        journal.write(counts=counts)
    except BaseException:
        journal.write(error=traceback.format_exc())


def _work_until(store: ChunkStore, dice: random.Random, stop: float) -> dict[str, int]:
    counts = {"puts": 0, "hits": 0, "misses": 0}
    while time.monotonic() < stop or not (counts["puts"] and counts["hits"]):
        numbers = [dice.randrange(MANY) for _ in range(dice.randint(1, 6))]
        what = dice.random()
        if what < 0.4:
            try:
                store.put(blocks(numbers))
                counts["puts"] += 1
            except CapacityError as error:  # others are writing
                assert "files being written" in str(error)  # noqa: PT017
        elif what < 0.85:
            for number in numbers:
                found = read(store, name(number))
                assert found in (block(number), ReadResult.MISS)
                counts["misses" if found is ReadResult.MISS else "hits"] += 1
        elif what < 0.95:
            store.delete([name(n) for n in numbers[:1]])
        else:
            store.gc()
    return counts


JOBS = {"die_during": die_during, "put_until_killed": put_until_killed, "work": work}

if __name__ == "__main__":
    main(JOBS)
