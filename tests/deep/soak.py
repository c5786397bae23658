"""Sessions, forks, saves, restores, trims, stores and closes in random order, for a long time.

    python -m deep.soak [--seconds N] [--seed N] --json FILE

What is restored is compared to the bit. Resident memory and descriptors must not grow: the slope of
memory over steps, from the first fifth on, stays below a limit that no leak per step would.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from small_store import LAYOUT, Author, C, rows, text

from deep.interposer import workplace
from deep.record import write
from kvpager import _core
from kvpager.errors import CapacityError, PagerError, StorageError
from kvpager.pager import Sequence, SnapshotInfo
from kvpager.stores import DirectoryStore, FileStore

NAMES = 6
MOST_SEQUENCES = 5
MOST_TOKENS = 10 * C
SAMPLE_STEPS = 200
RSS_LIMIT = 64 << 10  # bytes per 1,000 steps: a leak of 66 bytes per step is seen
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Soaked:
    """What a soak did and how it ended; memory in bytes, slope and limit per 1,000 steps."""

    seconds: int = 0
    rss_first: int = 0
    rss_last: int = 0
    rss_slope: float = 0.0
    rss_limit: int = RSS_LIMIT
    descriptors_first: int = 0
    descriptors_last: int = 0
    done: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Life:
    """A pager with all tiers, a store with a budget, files, and what they should hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        chunk = LAYOUT.chunk_bytes
        self.author = Author(
            pool_tokens=16 * C,
            host_bytes=24 * chunk,
            disk_bytes=64 * chunk,
            disk_path=folder,
            summary_bytes=2**20,
        )
        self.store = DirectoryStore(folder / "store", byte_budget=120 * chunk)
        self.files = FileStore(folder)
        self.sequences: list[Sequence] = []
        self.saved: dict[str, list[int]] = {}  # single files
        self.steps: dict[str, Callable[[], object]] = {
            "begin": self.begin,
            "append": self.append,
            "fork": self.fork,
            "trim": self.trim,
            "close": self.close,
            "pin": self.pin,
            "evict": self.author.pager.evict_all,
            "read": self.read,
            "save to a file": self.save_file,
            "restore from a file": self.restore_file,
            "save to the store": self.save_store,
            "restore from the store": self.restore_store,
            "delete": self.delete,
            "gc": self.store.gc,
            "list": self.store.entries,
            "refuse": self.refuse,
        }

    def _any(self) -> Sequence:
        if not self.sequences:
            self.begin()
        return self.dice.choice(self.sequences)

    def _text(self, start: list[int], most: int) -> list[int]:
        return text(self.dice.randint(1, most), seed=self.dice.randrange(40), start=start)

    def _add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        if len(self.sequences) > MOST_SEQUENCES:
            self.sequences.pop(self.dice.randrange(MOST_SEQUENCES)).close()

    def _grow(self, sequence: Sequence, tokens: list[int]) -> None:
        start = sequence.length
        k, v = rows(tokens)
        sequence.append(tokens[start:], k[:, start:], v[:, start:], provenance="exact")

    def check(self, sequence: Sequence) -> None:
        """Every bit of one layer."""
        tokens = sequence.tokens.tolist()
        if tokens:
            layer = self.dice.randrange(LAYOUT.layers)
            for got, one in zip(sequence.read_kv(layer, 0, len(tokens)), rows(tokens)):
                assert got.numpy().tobytes() == one[layer].tobytes()

    def begin(self) -> None:
        sequence = self.author.pager.sequence()
        self._add(sequence)
        tokens = self._text([], MOST_TOKENS // 2)
        sequence.adopt_prefix(tokens)
        self._grow(sequence, tokens)

    def append(self) -> None:
        sequence = self._any()
        if sequence.length < MOST_TOKENS:
            held = sequence.tokens.tolist()
            more = text(self.dice.randint(1, 2 * C), seed=self.dice.randrange(40))
            self._grow(sequence, [*held, *more])

    def fork(self) -> None:
        self._add(self._any().fork())

    def trim(self) -> None:
        sequence = self._any()
        sequence.trim(self.dice.randint(0, sequence.length))

    def close(self) -> None:
        if self.sequences:
            self.sequences.pop(self.dice.randrange(len(self.sequences))).close()

    def pin(self) -> None:
        sequence = self._any()
        if sequence.length:
            with sequence.pin(0, min(C, sequence.length)):
                self.check(sequence)

    def read(self) -> None:
        self.check(self._any())

    def save_file(self) -> None:
        sequence = self._any()
        if sequence.length:
            name = f"file{self.dice.randrange(NAMES)}.kvsnap"
            sequence.save(self.folder / name)
            self.saved[name] = sequence.tokens.tolist()

    def _restored(self, reader: _core.SnapshotReader, tokens: list[int]) -> None:
        sequence = self.author.pager.restore(SnapshotInfo.of(reader))
        self._add(sequence)
        assert sequence.tokens.tolist() == tokens
        self.check(sequence)

    def restore_file(self) -> None:
        if self.saved:
            name = self.dice.choice(sorted(self.saved))
            self._restored(self.files.open(name), self.saved[name])

    def save_store(self) -> None:
        sequence = self._any()
        if sequence.length:
            self.store.save(
                f"s{self.dice.randrange(NAMES)}",
                sequence.freeze(),
                fingerprint=self.author.pager.fingerprint_json,
                session=sequence.session_text(None),
            )

    def restore_store(self) -> None:
        names = [entry.name for entry in self.store.entries()]
        if names:
            reader = self.store.open(self.dice.choice(names))
            self._restored(reader, reader.tokens.tolist())

    def delete(self) -> None:
        names = [entry.name for entry in self.store.entries()]
        if names:
            self.store.delete(self.dice.choice(names))
        if self.saved:
            name = self.dice.choice(sorted(self.saved))
            self.files.delete(name)
            del self.saved[name]

    def refuse(self) -> None:
        """Asks for what cannot be had, in a few ways."""
        for wrong in (
            lambda: self.store.open("missing"),
            lambda: self.files.open("missing.kvsnap"),
            lambda: self._any().read_kv(0, 0, 10**6),
            lambda: self._any().reserve(2**40),
        ):
            try:
                wrong()
            except PagerError:
                continue
            raise AssertionError("what cannot be was not refused")

    def step(self) -> str:
        name = self.dice.choice(list(self.steps))
        try:
            self.steps[name]()
        except CapacityError:
            return f"{name}, no room"
        except StorageError as error:
            if "there is no snapshot" not in str(error):  # evicted meanwhile
                raise
        return name


def slope(samples: list[tuple[int, int]]) -> float:
    """Bytes per 1,000 steps, by least squares."""
    steps, memory = np.array(samples, dtype=float).T
    return float(np.polyfit(steps, memory, 1)[0] * 1000)


def soak(seconds: float, seed: int, folder: Path) -> Soaked:
    """Lives for so long."""
    result, life = Soaked(seconds=round(seconds)), Life(folder, seed)
    end = time.monotonic() + seconds
    samples: list[tuple[int, int]] = []
    opened: list[int] = []
    told = steps = 0
    while time.monotonic() < end:
        name = life.step()
        result.done[name] = result.done.get(name, 0) + 1
        steps += 1
        if steps % SAMPLE_STEPS == 0:
            life.author.pager.check_invariants()
            _quieten(life)
            samples.append((steps, resident()))
            opened.append(descriptors())
            if time.monotonic() - told > 30:
                told = time.monotonic()  # type: ignore[assignment]
                print(f"{steps:8} steps {resident() >> 20:5} MiB {opened[-1]} fds", flush=True)
    settled = samples[len(samples) // 5 :]
    result.rss_first, result.rss_last = settled[0][1], settled[-1][1]
    result.descriptors_first, result.descriptors_last = opened[len(opened) // 5], opened[-1]
    result.rss_slope = slope(settled)
    if result.rss_slope > RSS_LIMIT:
        result.wrong.append(f"memory grows by {result.rss_slope:.0f} bytes per 1,000 steps")
    if result.descriptors_last > result.descriptors_first:
        result.wrong.append("descriptors are left open")
    if spare := [path.name for path in folder.rglob("*.tmp")]:
        result.wrong.append(f"temporary files are left: {spare}")
    return result


def _quieten(life: Life) -> None:
    """Lets go of all that may be held, so that what is measured is what cannot be let go of."""
    while life.sequences:
        life.sequences.pop().close()
    gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with workplace() as folder:
        result = soak(options.seconds, options.seed, folder)
        shutil.rmtree(folder / "store", ignore_errors=True)
    write(options.json, "soak", {"soak": result}, seed=options.seed)
    print(result)
    return int(bool(result.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
