"""What a directory store and its server cost as it fills: processor time, which no other changes.

    kvpager bench store
    kvpager bench store -- --full

Conversations of a few chunks with a common beginning are saved until the store has as many as a
size says. Each figure is compared with that of the smallest size, which is the aim: a call costs
what it uses, not what there is.

"calls": each call of the store is made several times. "first open" is that of a new store object,
as in a new process.
"server": the shipped model's server over such a store: its start, lists of its sessions, metrics,
and a turn of a saved conversation that is not in memory, of one token.
"writers": turns saved by one process, and by two at once, which should take no longer for as many.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kvpager import PagerConfig
from kvpager.cli.needles import shipped_model_path
from kvpager.pager import Layout, Pager
from kvpager.server.tenants import ANONYMOUS
from kvpager.stores import DirectoryStore, SnapshotStore
from kvpager_bench import servers
from kvpager_bench.harness import Column, Report
from kvpager_bench.places import results_dir, scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

LAYERS, HEADS, DIM, CHUNK_TOKENS = 2, 1, 16, 16
COMMON, CHUNKS = 4, 6  # chunks of a conversation that all have, and of the whole
MODEL, NO_SESSION = '{"model": "bench"}', "{}"
WITHIN = 0.5  # aim: at any size at most twice the time of the smallest

PARTS = ("calls", "server", "writers")
CODER = "tiny-coder"
_PAGES = (("page of 10 sessions", "/v1/sessions?limit=10"), ("metrics", "/metrics"))
AT_ONCE = 1.0  # aim: two writers take no longer for as many turns than one

COLUMNS = (
    Column("call", text=True),
    Column("snapshots"),
    Column("processor_ms", "ms"),
    Column("wall_ms", "ms"),
)
WRITERS = (
    Column("writers"),
    Column("snapshots"),
    Column("turns"),
    Column("wall_ms", "ms of a turn"),
    Column("processor_ms", "ms of a turn"),
)


class Author:
    """Makes conversations to be saved."""

    def __init__(self) -> None:
        config = PagerConfig(  # little room, so that its own cost stays as it is
            pool_tokens=16 * CHUNK_TOKENS, chunk_tokens=CHUNK_TOKENS, host_bytes="1MiB"
        )
        self._layout = Layout(LAYERS, HEADS, DIM, DIM, CHUNK_TOKENS)
        self._pager = Pager(
            self._layout, config, rows=CHUNK_TOKENS, fingerprint={"model": "bench"}, threads=1
        )

    def tokens(self, seed: int, chunks: int = CHUNKS) -> list[int]:
        common = np.random.default_rng(0).integers(0, 1000, COMMON * CHUNK_TOKENS)
        own = np.random.default_rng(seed).integers(0, 1000, (chunks - COMMON) * CHUNK_TOKENS)
        return [*common.tolist(), *own.tolist()]

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return self._pager.core.chain_hashes(np.asarray(tokens, dtype=np.int32), "")

    def save(self, store: SnapshotStore, name: str, tokens: Sequence[int]) -> None:
        ids = np.asarray(tokens, dtype=np.float32)[None, :, None, None]
        rows = np.broadcast_to(ids, (LAYERS, len(tokens), HEADS, DIM)).copy()
        sequence = self._pager.sequence()
        sequence.append(tokens, rows, rows, provenance="exact")
        content = self._pager.core.freeze(sequence.uid, -1)
        sequence.close()
        store.save(name, content, fingerprint=MODEL, session=NO_SESSION)


def name_of(number: int) -> str:
    return f"conversation-{number:07}"


def calls(
    author: Author, folder: Path, count: int, runs: int, fresh: Callable[[], int]
) -> dict[str, Any]:
    """The calls by name. fresh: a number that no conversation has."""
    store = DirectoryStore(folder)
    near = author.hashes(author.tokens(count // 2))
    far = author.hashes(author.tokens(fresh()))
    spare = [f"spare-{each}" for each in range(1 + runs)]
    for name in spare:
        author.save(store, name, author.tokens(fresh()))

    def evict() -> None:
        author.save(store, name_of(fresh()), author.tokens(fresh()))

    def first() -> None:
        DirectoryStore(folder).open(name_of(count // 2))

    return {
        "first open": first,
        "open": lambda: store.open(name_of(count // 3)),
        "save of a turn": lambda: author.save(store, "turn", author.tokens(fresh(), CHUNKS + 2)),
        "find_prefix of a whole text": lambda: store.find_prefix(near),
        "find_prefix of what all share": lambda: store.find_prefix(far),
        "entries of 10": lambda: store.entries(limit=10),
        "stats": store.stats,
        "gc of nothing": store.gc,
        "delete": lambda: store.delete(spare.pop()),
        "save that evicts": evict,
    }


class Filling:
    """A folder's store, which gets ever more conversations."""

    def __init__(self, folder: Path, author: Author) -> None:
        self._folder, self._author = folder, author
        self._saved = 0

    def until(self, size: int) -> DirectoryStore:
        """The store, with at least so many."""
        store = DirectoryStore(self._folder, byte_budget="unlimited")
        while self._saved < size:
            self._author.save(store, name_of(self._saved), self._author.tokens(1 + self._saved))
            self._saved += 1
        return store


class Figures:
    """Adds rows to a report, each beside that of the smallest size."""

    def __init__(self, report: Report, smallest: int) -> None:
        self._report, self._size = report, smallest
        self._smallest: dict[str, float] = {}

    def add(self, what: str, size: int, times: Sequence[tuple[float, float]]) -> None:
        """times: seconds of processor and of wall time, of each run."""
        cpu, wall = (1e3 * statistics.median(kind) for kind in zip(*times, strict=True))
        self._report.add(call=what, snapshots=size, processor_ms=cpu, wall_ms=wall)
        peer, theirs = f"the same with {self._size:,}", self._smallest.setdefault(what, cpu)
        if size != self._size:
            figure = f"{what}, {size:,} snapshots"
            self._report.compare(figure, cpu, theirs, peer, "ms", WITHIN, lower_is_better=True)


def measure_calls(asked: Asked, report: Report) -> None:
    author, number = Author(), itertools.count(1 << 24)
    figures = Figures(report, asked.options.sizes[0])
    with scratch_folder() as folder:
        filling = Filling(folder, author)
        for size in asked.options.sizes:
            store = filling.until(size)
            for what, call in calls(
                author, folder, size, asked.options.runs, lambda: next(number)
            ).items():
                if what == "save that evicts":
                    DirectoryStore(folder, byte_budget=int(store.stats()["bytes"] or 0) + 8192)
                times = []
                for run in range(1 + asked.options.runs):
                    processor, wall = time.process_time(), time.perf_counter()
                    call()
                    if run:
                        spent = time.process_time() - processor, time.perf_counter() - wall
                        times.append(spent)
                figures.add(what, size, times)


class Chats:
    """Conversations of the server's own, which it saves."""

    def __init__(self, count: int) -> None:
        self._messages: list[list[dict[str, str]]] = [[] for _ in range(count)]

    def turn(self, client: httpx.Client, number: int) -> None:
        """One more turn of a conversation."""
        messages = self._messages[number]
        messages.append({"role": "user", "content": f"def f{number}():"})
        body = {
            "model": CODER,
            "messages": messages,
            "session_id": f"chat-{number}",
            "max_tokens": 1,
            "temperature": 0,
        }
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})


@contextmanager
def served(asked: Asked, folder: Path) -> Iterator[tuple[servers.Server, httpx.Client]]:
    """A server over a folder of stores, which is asked to end."""
    log = results_dir() / "logs" / "store-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    options = ["--store", str(folder), "--store-budget", "1TiB", "--store-ttl", "never"]
    model = shipped_model_path(CODER)
    with servers.running(servers.KVPAGER, model, asked.threads, log, options) as server:
        with httpx.Client(base_url=server.url, timeout=600) as client:
            yield server, client
        server.end()


def spent(server: servers.Server, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the server's processor and of wall time that a call takes."""
    processor, wall = sum(server.processor_seconds().values()), time.perf_counter()
    call()
    waited = time.perf_counter() - wall
    time.sleep(0.05)  # what follows an answer
    return sum(server.processor_seconds().values()) - processor, waited


def measure_server(asked: Asked, report: Report) -> None:
    runs = asked.options.runs
    figures = Figures(report, asked.options.sizes[0])
    chats = Chats(1 + runs)
    with scratch_folder() as folder:
        filling = Filling(folder / ANONYMOUS, Author())
        with served(asked, folder) as (_, client):
            for number in range(1 + runs):
                chats.turn(client, number)
        for size in asked.options.sizes:
            filling.until(size)
            begun = time.perf_counter()
            with served(asked, folder) as (server, client):
                begun = time.perf_counter() - begun
                started = sum(server.processor_seconds().values()), begun
                figures.add("server's start", size, [started])
                for what, path in _PAGES:
                    read = partial(client.get, path)
                    read().raise_for_status()
                    figures.add(what, size, [spent(server, read) for _ in range(runs)])
                chats.turn(client, 0)
                turns = [
                    spent(server, partial(chats.turn, client, number))
                    for number in range(1, 1 + runs)
                ]
                figures.add("turn of a saved conversation", size, turns)


def save_turns(task: dict[str, Any]) -> dict[str, Any]:
    """Saves turns once all writers are ready."""
    author, folder = Author(), Path(task["folder"])
    store = DirectoryStore(folder / "store")
    turns = [author.tokens((1 << 25) * (1 + task["writer"]) + n) for n in range(task["turns"])]
    author.save(store, f"turn-{task['writer']}", turns[0])
    (folder / f"ready-{task['writers']}-{task['writer']}").touch()
    deadline = time.monotonic() + 120
    while len(list(folder.glob(f"ready-{task['writers']}-*"))) < task["writers"]:
        if time.monotonic() > deadline:
            raise TimeoutError("the other writer does not begin")
        time.sleep(0.001)
    begun, processor = time.perf_counter(), time.process_time()
    for tokens in turns:
        author.save(store, f"turn-{task['writer']}", tokens)
    return {"wall": time.perf_counter() - begun, "processor": time.process_time() - processor}


def measure_writers(asked: Asked, report: Report) -> None:
    o = asked.options
    times: dict[int, float] = {}
    with scratch_folder() as folder:
        Filling(folder / "store", Author()).until(o.writers_size)
        for writers in (1, 2):
            turns = o.turns // writers

            def work(writer: int, writers: int = writers, turns: int = turns) -> dict[str, Any]:
                task = {"folder": str(folder), "writer": writer, "writers": writers}
                return asked.work("save_turns", turns=turns, **task)

            with ThreadPoolExecutor(writers) as pool:
                found = list(pool.map(work, range(writers)))
            times[writers] = 1e3 * max(one["wall"] for one in found) / o.turns
            report.add(
                writers=writers,
                snapshots=o.writers_size,
                turns=o.turns,
                wall_ms=times[writers],
                processor_ms=1e3 * sum(one["processor"] for one in found) / o.turns,
            )
    figure = f"a turn saved by two processes at once, {o.writers_size:,} snapshots"
    report.compare(
        figure, times[2], times[1], "by one process", "ms", AT_ONCE, lower_is_better=True
    )


def measure(asked: Asked) -> None:
    parts = asked.options.parts
    if "calls" in parts:
        measure_calls(asked, asked.report("store"))
    if "server" in parts:
        measure_server(asked, asked.report("store_server"))
    if "writers" in parts:
        measure_writers(asked, asked.report("store_writers"))


STUDY = Study(
    measure,
    (
        Table("store", "Processor time of a directory store's calls as it fills", COLUMNS),
        Table("store_server", "Processor time of a server as its store fills", COLUMNS),
        Table("store_writers", "Turns saved by one process, and by two at once", WRITERS),
    ),
    (
        Option("parts", PARTS, among=PARTS),
        Option("sizes", [10, 1000, 10_000], quick=[10, 100], full=[10, 1000, 100_000]),
        Option("runs", 15, 3, help="of each call; the median counts"),
        Option("writers-size", 5000, 50, help="snapshots, by part writers"),
        Option("turns", 400, 20, help="that the writers save together"),
    ),
    {"chunks": CHUNKS, "common_chunks": COMMON},
    {"save_turns": save_turns},
)

if __name__ == "__main__":
    STUDY.main()
