"""The power fails after each change that saves, stores, gc and compaction make.

    python -m deep.power_loss [--only PART ...] [--seed N] [--torn N] [--whole N] --json FILE

Runs under the interposer; `python -m deep power` starts it so. After each failure: what was
reported saved opens to the bit; what was not is absent, whole, or refused with a typed error; what
was to be replaced is there as it was, or replaced; gc takes nothing; saving goes on.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from small_blocks import block, blocks, read
from small_blocks import name as key
from small_store import Author, text
from store_children import tokens_of

from deep.disk_model import Disk, read_record, signature, write_tree
from deep.interposer import Interposer, root
from deep.operations import OPERATIONS
from deep.record import chosen, write
from deep.worlds import FILES, STORE, WORLDS, Held, Templates
from kvpager import _core
from kvpager.errors import PagerError
from kvpager.stores import ChunkStore, DirectoryStore, ReadResult

BLOCKS, BLOCK_BYTES = "blocks", 5000  # a folder of a world, and what its blocks have
AFTERWARDS = text(40, seed=99)


@dataclass(frozen=True)
class Step:
    """One thing done: `after` is what the world holds then."""

    run: Callable[[Author, Path], object]
    after: Held


@dataclass(frozen=True)
class History:
    """Steps in a world."""

    world: str
    steps: Sequence[Step]


@dataclass
class Replay:
    """What became of one history.

    Attributes:
        events: changes recorded.
        trees: states of the disk that may follow a power failure, each looked at once.
        repeated: those that were the same as one looked at before.
        seed: of what was chosen where not all could be tried.
        wrong: what was not as it has to be.
    """

    events: int = 0
    trees: int = 0
    repeated: int = 0
    seed: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def _of(*names: str) -> History:
    """A history of operations of one world; each changes what the one before has left."""
    operations = [OPERATIONS[name] for name in names]
    held, steps = operations[0].before, []
    for operation in operations:
        changes = {n: t for n, t in operation.done.items() if operation.before.get(n) != t}
        gone = operation.before.keys() - operation.done.keys()
        held = {n: t for n, t in {**held, **changes}.items() if n not in gone}
        steps.append(Step(operation.run, held))
    return History(operations[0].world, steps)


def _at_random(seed: int, steps: int) -> History:
    """Saves, deletions and collections in a store, as a seed says."""
    dice, held, made = random.Random(seed), dict(WORLDS["store"].holds), []
    for _ in range(steps):
        what, name = dice.random(), f"s{dice.randrange(4)}"
        if what < 0.6:
            tokens = tokens_of(dice.randrange(64), dice.randint(1, 120))
            held = {**held, name: tokens}
            made.append(Step(_saving(name, tokens), held))
        elif what < 0.8 and name in held:
            held = {n: t for n, t in held.items() if n != name}
            made.append(Step(_deleting(name), held))
        else:
            made.append(Step(_collecting, held))
    return History("store", made)


def _store(folder: Path) -> DirectoryStore:
    return DirectoryStore(folder / STORE)


def _saving(name: str, tokens: list[int]) -> Callable[[Author, Path], object]:
    return lambda author, folder: author.save(_store(folder), name, tokens)


def _deleting(name: str) -> Callable[[Author, Path], object]:
    return lambda _, folder: _store(folder).delete(name)


def _collecting(_: Author, folder: Path) -> None:
    _store(folder).gc()


def _blocks() -> History:
    """Puts into a new store of blocks. A deletion may be undone by a power failure."""
    held, steps = dict[str, list[int]](), []
    for numbers in ([1, 2, 3], [3, 4], [5]):
        held = {**held, **{f"block {n}": [n] for n in numbers}}
        steps.append(Step(_putting(numbers), held))
    return History("empty", steps)


def _putting(numbers: list[int]) -> Callable[[Author, Path], object]:
    def run(_: Author, folder: Path) -> None:
        with ChunkStore(folder / BLOCKS, {}) as store:
            store.put(blocks(numbers, BLOCK_BYTES))

    return run


HISTORIES: dict[str, Callable[[], History]] = {
    "a new store": lambda: _of("store: create and save"),
    "saves": lambda: _of("store: save", "store: save over"),
    "gc and compaction": lambda: _of("store: gc and compaction", "store: save over"),
    "deletion": lambda: _of("store: delete", "store: gc and compaction"),
    "notes": lambda: _of("store: settings", "store: pin", "store: time to live"),
    "pairs": lambda: _of("store: save a pair", "store: save over a pair"),
    "a pair replaced by one alone": lambda: _of("store: save over a pair alone"),
    "a pair deleted": lambda: _of("store: delete a pair"),
    "files": lambda: _of("file: save", "file: save over", "file: save over a pair"),
    "a file deleted": lambda: _of("file: delete"),
    "blocks": _blocks,
    "export": lambda: _of("command: snapshot export"),
    "import": lambda: _of("command: snapshot import"),
    **{f"at random, {n}": (lambda n=n: _at_random(n, 12)) for n in range(8)},
}


def look(author: Author, folder: Path) -> dict[str, list[int] | str]:
    """The tokens of each snapshot, every bit of which is right, or why it was refused."""
    found: dict[str, list[int] | str] = {}

    def note(name: str, opened: Callable[[], _core.SnapshotReader]) -> None:
        try:
            reader = opened()
            author.check(reader, reader.tokens.tolist())
            found[name] = reader.tokens.tolist()
        except PagerError as error:
            found[name] = f"{type(error).__name__}: {error}"

    if (folder / STORE / "store.json").exists():
        store = DirectoryStore(folder / STORE, create=False)
        for entry in store.entries():
            note(entry.name, lambda: store.open(entry.name))  # noqa: B023
    if (folder / BLOCKS / "store.json").exists():
        with ChunkStore(folder / BLOCKS, {}, create=False) as chunks:
            for n in range(10):
                data = read(chunks, key(n), BLOCK_BYTES)
                assert data in (block(n, BLOCK_BYTES), ReadResult.MISS)
                if data is not ReadResult.MISS:
                    found[f"block {n}"] = [n]
    for path in sorted((folder / FILES).glob("*.kvsnap")):
        note(path.name, lambda: _core.SnapshotReader.open(os.fspath(path)))  # noqa: B023
    return found


def check(author: Author, folder: Path, before: Held, done: Held) -> None:
    """Asserts that a disk is one that may be left between `before` and `done`."""
    found = look(author, folder)
    for name in before.keys() | done.keys() | found.keys():
        there, allowed = found.get(name), (before.get(name), done.get(name))
        if name not in before and name in done and isinstance(there, str):
            continue
        assert there in allowed, f"{name}: {_brief(there)}, expected one of {_briefs(allowed)}"
    sound = {name: tokens for name, tokens in found.items() if not isinstance(tokens, str)}
    if not (folder / STORE).exists():
        return
    store = _store(folder)
    store.gc()
    store.gc(remove_damaged=True)
    assert look(author, folder) == sound, f"gc took {sound.keys() - look(author, folder).keys()}"
    author.save(store, "afterwards", AFTERWARDS)
    assert look(author, folder) == {**sound, "afterwards": AFTERWARDS}


def _brief(there: list[int] | str | None) -> str:
    return there if isinstance(there, str) else _briefs((there,))


def _briefs(allowed: Sequence[list[int] | None]) -> str:
    return " or ".join("absent" if one is None else f"{len(one)} tokens" for one in allowed)


def replay(
    name: str,
    templates: Templates,
    library: Interposer,
    *,
    seed: int = 0,
    whole: int = 256,
    torn: int = 4,
) -> Replay:
    """Records a history and looks at what power failures leave of it; see `Disk.trees`."""
    started = time.monotonic()
    history, author, case = HISTORIES[name](), Author(), root() / "case"
    templates.copy(history.world, case)
    disk = Disk(case)
    record = root().parent / "record"
    with library.recording(record):
        for step in history.steps:
            step.run(author, case)
            library.mark("done")
    events = read_record(record)
    result = Replay(events=len(events), seed=seed)
    dice, known = random.Random(seed), set()
    states = [WORLDS[history.world].holds, *(step.after for step in history.steps)]
    done = 0
    for number, event in enumerate(events):
        done += event.kind == "mark"
        disk.apply(event)
        marked = event.kind == "mark"  # between two steps there is one state to be in
        before, after = states[done], states[done if marked else done + 1]
        for tree in disk.trees(dice, whole, torn):
            key = (signature(tree), done, marked)
            if key in known:
                result.repeated += 1
                continue
            known.add(key)
            result.trees += 1
            folder = root() / "replayed"
            shutil.rmtree(folder, ignore_errors=True)
            write_tree(tree, folder)
            try:
                check(author, folder, before, after)
            except Exception as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                result.wrong.append(f"after event {number}, {event.kind} {event.fields}: {what}")
    result.seconds = round(time.monotonic() - started, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""], metavar="PART")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", type=int, default=256)
    parser.add_argument("--torn", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    library, templates = Interposer(), Templates(root() / "templates")
    replays: dict[str, Replay] = {}
    for name in chosen(HISTORIES, options.only):
        gc.freeze()
        made = replay(
            name, templates, library, seed=options.seed, whole=options.whole, torn=options.torn
        )
        replays[name] = made
        print(
            f"{name:30} {made.events:5} events {made.trees:6} states {made.repeated:6} repeated "
            f"{len(made.wrong):4} wrong {made.seconds:7.1f} s",
            flush=True,
        )
        for line in made.wrong[:: max(1, len(made.wrong) // 4)]:
            print(f"    {line}", flush=True)
        more = {"seed": options.seed, "whole": options.whole, "torn": options.torn}
        write(options.json, "history", replays, **more)
    return int(any(made.wrong for made in replays.values()))


if __name__ == "__main__":
    raise SystemExit(main())
