"""Processes that use a directory store and can be killed at any instant.

They are forked from one process that has imported everything and started nothing, so that one costs
milliseconds. What they do they write down in a journal, a line before and a line after each step;
the journal survives SIGKILL, since the kernel has it once os.write returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from small_store import Author, C, text

from kvpager import _core
from kvpager.errors import CapacityError, StorageError
from kvpager.stores import DirectoryStore
from kvpager.stores.companions import CompanionSnapshot

PROMPT = text(6 * C, seed=1)
OTHER_PROMPT = text(3 * C, seed=2)
_PATIENCE_SECONDS = 60.0


def tokens_of(seed: int, length: int) -> list[int]:
    """The tokens of a save, which has these two numbers in the journal."""
    start = [[], PROMPT, OTHER_PROMPT][seed % 3]
    return text(length, seed=seed // 8 + 10, start=start)


class Journal:
    """Lines of JSON, each written at once."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, **values: Any) -> None:
        os.write(self._descriptor, json.dumps(values).encode() + b"\n")

    @staticmethod
    def read(path: str | Path) -> list[dict[str, Any]]:
        lines = Path(path).read_text().split("\n") if Path(path).exists() else []
        return [json.loads(line) for line in lines if line]


def save_until_killed(journal: Journal, folder: str, seed: int, pins: bool) -> None:
    """Saves, deletes and collects in a loop. With `pins`, some snapshots are kept for good."""
    dice = random.Random(seed)
    author, store = Author(), DirectoryStore(folder)
    journal.write(ready=True)
    while True:
        name = f"s{dice.randrange(6)}"
        what = dice.random()
        step = {"name": name, "seed": dice.randrange(64), "length": dice.randint(1, 12 * C)}
        if pins and name == "s0":
            name = step["name"] = "pinned"
        if what < 0.75:
            journal.write(begin="save", **step)
            try:
                author.save(store, name, tokens_of(step["seed"], step["length"]))
            except CapacityError:
                journal.write(refused="save", **step)
                continue
            journal.write(done="save", **step)
            if name == "pinned":
                store.pin(name)
                journal.write(done="pin", name=name)
        elif what < 0.85 and name != "pinned":
            journal.write(begin="delete", name=name)
            try:
                store.delete(name)
            except StorageError as error:
                assert "there is no snapshot" in str(error)  # noqa: PT017
            journal.write(done="delete", name=name)
        elif what < 0.95:
            store.gc()
        else:
            try:
                reader = store.open(name)
            except StorageError:
                continue
            author.check(reader, reader.tokens.tolist())


def work(
    journal: Journal, folder: str, seed: int, seconds: float, threads: int, budget: bool
) -> None:
    """Does everything a store can for a while, and checks every byte it gets to see."""
    store = DirectoryStore(folder)
    stop = time.monotonic() + seconds
    workers = [
        threading.Thread(target=_work, args=(journal, store, seed * 100 + n, stop, budget))
        for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    journal.write(finished=True)


def _work(journal: Journal, store: DirectoryStore, seed: int, stop: float, budget: bool) -> None:
    try:
        _work_until(journal, store, seed, stop, budget)
    except BaseException:
        journal.write(error=traceback.format_exc())


def _work_until(
    journal: Journal, store: DirectoryStore, seed: int, stop: float, budget: bool
) -> None:
    dice = random.Random(seed)
    author = Author()
    mine: dict[str, list[int]] = {}  # what this worker has saved last, under names of its own
    pinned: str | None = None
    counts = {"saves": 0, "reads": 0, "prefixes": 0, "refused": 0}

    def goes_on() -> bool:
        """Until the time is over, and on a busy machine until each thing was done once."""
        seen = counts["saves"] and counts["reads"] and counts["prefixes"]
        return time.monotonic() < (stop if seen else stop + _PATIENCE_SECONDS)

    while goes_on():
        what = dice.random()
        shared = dice.random() < 0.3
        name = f"shared-{dice.randrange(4)}" if shared else f"own-{seed}-{dice.randrange(4)}"
        if what < 0.4:
            tokens = tokens_of(dice.randrange(64), dice.randint(1, 12 * C))
            try:
                author.save(store, name, tokens)
            except CapacityError:
                counts["refused"] += 1
                continue
            counts["saves"] += 1
            if not shared:
                mine[name] = tokens
        elif what < 0.75:
            names = [entry.name for entry in store.entries() if entry.error is None]
            name = dice.choice([*names, name])
            try:
                reader = store.open(name)
            except StorageError as error:
                assert "there is no snapshot" in str(error)  # noqa: PT017
                # Within the budget nothing goes that was not deleted, pinned nothing at all.
                assert name not in mine or (budget and name != pinned), f"{name} is lost"
                continue
            tokens = mine.get(name, reader.tokens.tolist())
            author.check(reader, tokens)
            counts["reads"] += 1
        elif what < 0.85:
            tokens = dice.choice([PROMPT, OTHER_PROMPT])
            found = store.find_prefix(author.hashes(tokens))
            if found is not None:
                author.check_restored(found, tokens[: len(found.tokens)])
                counts["prefixes"] += 1
        elif what < 0.9 and mine:
            if pinned is not None:
                author.check(store.open(pinned), mine[pinned])
                store.unpin(pinned)
            pinned = dice.choice(sorted(mine))
            try:
                store.pin(pinned)
            except (StorageError, CapacityError):  # evicted before it was pinned, or no room for it
                assert budget
                pinned = None
        elif what < 0.95:
            store.gc()
        elif name != pinned:
            mine.pop(name, None)
            try:
                store.delete(name)
            except StorageError as error:
                assert "there is no snapshot" in str(error)  # noqa: PT017
    if not budget:
        for name, tokens in mine.items():
            author.check(store.open(name), tokens)
    elif pinned is not None:
        author.check(store.open(pinned), mine[pinned])
    journal.write(counts=counts)


def die_during(journal: Journal, folder: str, step: str, point: str, after: int) -> None:
    """Does one step and dies, as by SIGKILL, at the `after`-th visit of a point.

    The step is one of `STEPS`.
    The point is one of the core's, or "python" for the calls that the store itself makes.
    """
    author, store = Author(), DirectoryStore(folder)
    with contextlib.ExitStack() as stack:
        if point == "python":
            stack.enter_context(Trap(after, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        else:
            _core.arm_fault(point, after, -1)
        STEPS[step](author, store)
    journal.write(survived=True)


JOBS = {"save_until_killed": save_until_killed, "work": work, "die_during": die_during}


# A store on which every kind of step has much to do: see `prepare`.
BEFORE = {
    "a": text(6 * C + 3, seed=3, start=PROMPT[:C]),
    "b": text(3 * C + 5, seed=4, start=PROMPT[:C]),
    "c": text(4 * C, seed=5),
}
A_GROWN = text(9 * C + 1, seed=6, start=BEFORE["a"][: 6 * C])
NEW = text(5 * C + 2, seed=7)

# The same for snapshots with companions: see `prepare_pairs`.
PAIRS_BEFORE = {"a": text(5 * C + 3, seed=31), "b": text(3 * C, seed=32)}
PAIR_GROWN = text(8 * C + 1, seed=33, start=PAIRS_BEFORE["a"][: 5 * C])


def save_pair(author: Author, store: DirectoryStore, name: str, tokens: list[int]) -> Any:
    """A snapshot of these tokens, and a draft's of all but the last."""
    draft = Author(fingerprint="draft")
    companion = CompanionSnapshot(
        "draft", draft.content(tokens[:-1]), draft.pager.fingerprint_json, "{}"
    )
    return author.save(store, name, tokens, companions=[companion])


STEPS: dict[str, Callable[[Author, DirectoryStore], object]] = {
    "grow": lambda author, store: author.save(store, "a", A_GROWN),
    "save": lambda author, store: author.save(store, "new", NEW),
    "delete": lambda _, store: store.delete("c"),
    "pin": lambda _, store: store.pin("c"),
    "gc": lambda _, store: store.gc(),
    "open": lambda _, store: store.open("c"),
    "find": lambda author, store: store.find_prefix(author.hashes(PROMPT[:C])),
    "first pair": lambda author, store: save_pair(author, store, "new", NEW),
    "next pair": lambda author, store: save_pair(author, store, "a", PAIR_GROWN),
    "without": lambda author, store: author.save(store, "a", PAIR_GROWN),
    "delete pair": lambda _, store: store.delete("a"),
}
PAIR_STEPS = ("first pair", "next pair", "without", "delete pair")  # of a store of PAIRS_BEFORE


def before_step(step: str) -> dict[str, list[int]]:
    """What the store holds that the step is done on."""
    return PAIRS_BEFORE if step in PAIR_STEPS else BEFORE


def after_step(step: str) -> dict[str, list[int]]:
    """What the store holds once the step was done."""
    changed = dict(before_step(step))
    if step == "grow":
        changed["a"] = A_GROWN
    elif step in ("save", "first pair"):
        changed["new"] = NEW
    elif step in ("next pair", "without"):
        changed["a"] = PAIR_GROWN
    elif step in ("delete", "delete pair"):
        del changed["a" if step == "delete pair" else "c"]
    return changed


def prepare_pairs(folder: str) -> None:
    """Makes a store with PAIRS_BEFORE in it."""
    author, store = Author(), DirectoryStore(folder)
    for name, tokens in PAIRS_BEFORE.items():
        save_pair(author, store, name, tokens)


def prepare(folder: str) -> None:
    """Makes a store with BEFORE in it, a sparse pack, a pack nobody needs, dead writers' files."""
    author, store = Author(), DirectoryStore(folder)
    author.save(store, "long", PROMPT + text(4 * C, seed=8))
    author.save(store, "orphan", text(2 * C, seed=9))
    for name, tokens in BEFORE.items():
        author.save(store, name, tokens)
    store.delete("long")
    store.pin("b")
    Path(folder, "snapshots", "orphan.kvsnap").unlink()
    Path(folder, "packs", ".kvsnap-00ff.tmp").write_bytes(b"x" * 1000)
    Path(folder, "snapshots", ".kvsnap-00fe.tmp").write_bytes(b"x" * 500)


class Trap:
    """Counts the store's own calls to the system; the `after`-th springs. A context manager."""

    CALLS: ClassVar[list[tuple[Any, str]]] = [
        *((os, name) for name in ("open", "write", "fsync", "read", "utime", "scandir")),
        *((Path, name) for name in ("rename", "unlink")),
        (fcntl, "flock"),
    ]

    def __init__(
        self,
        after: int,
        spring: Callable[[], None],
        calls: Sequence[tuple[Any, str]] | None = None,
    ) -> None:
        self.left = after
        self.sprung = False
        self._spring = spring
        self._real = [(owner, name, getattr(owner, name)) for owner, name in calls or self.CALLS]

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if self.left == 0 and not self.sprung:
                self.sprung = True
                self._spring()
            self.left -= 1
            return real(*args, **more)

        return call

    def __enter__(self) -> Trap:
        for owner, name, real in self._real:
            setattr(owner, name, self._guarded(real))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, real in self._real:
            setattr(owner, name, real)


class Child:
    """A process that runs a job."""

    def __init__(self, pid: int, journal: Path) -> None:
        self.pid = pid
        self.journal = journal

    def lines(self) -> list[dict[str, Any]]:
        return Journal.read(self.journal)

    def wait_until_ready(self) -> None:
        while not self.lines():
            assert self.alive(), "a child has died before it began"
            time.sleep(0.001)

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> None:
        while self.alive():
            time.sleep(0.001)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


class Nursery:
    """Starts children. A context manager, which leaves none."""

    def __init__(self, folder: Path, script: str = __file__) -> None:
        """`script`: calls `main` with the jobs that it has."""
        self._folder = folder
        self._children: list[Child] = []
        site = ["-S"] if sys.flags.no_site else []  # the package this process imports, no other
        self._process = subprocess.Popen(
            [sys.executable, *site, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, job: str, **arguments: Any) -> Child:
        journal = self._folder / f"journal-{len(self._children)}"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([job, os.fspath(journal), arguments]) + "\n")
        stdin.flush()
        child = Child(int(stdout.readline()), journal)
        self._children.append(child)
        return child

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.alive():
                child.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def copies(template: Path, folder: Path) -> Iterator[Path]:
    """A fresh copy of the store each time, one after the other, times kept."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        yield folder


def kill_at_steps(
    nursery: Nursery,
    template: Path,
    room: Path,
    step: str,
    stride: int,
    points: list[str],
    check: Callable[[Path], object],
) -> int:
    """Kills a process at every `stride`-th visit of every point on its way; returns how many.

    check: called with the store's folder after each.
    """
    kills = 0
    for number, point in enumerate(["python", *points]):
        for visit, folder in enumerate(copies(template, room / "store")):
            after = number % stride + visit * stride
            child = nursery.start(
                "die_during", folder=os.fspath(folder), step=step, point=point, after=after
            )
            child.wait()
            assert not any("error" in line for line in child.lines()), child.lines()
            if any("survived" in line for line in child.lines()):
                break
            kills += 1
            check(folder)
    return kills


def main(jobs: Mapping[str, Callable[..., None]]) -> None:
    """Starts a child for each job that is asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        job, journal, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                log = Journal(journal)
                try:
                    jobs[job](log, **arguments)
                    status = 0
                except BaseException:
                    log.write(error=traceback.format_exc())
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main(JOBS)
