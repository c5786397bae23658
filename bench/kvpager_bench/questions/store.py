"""What a directory store saves by sharing chunks, and what its catalogue costs as it fills.

    kvpager bench store --
    kvpager bench store -- --snapshots 100,400

Turns: a conversation is saved, grows by 512 tokens and is saved again; another session shares the
first 90% of it. Beside each: the second turn as a file of its own, in the same round.

Catalogue: a store of hundreds of snapshots that begin with the same 8K tokens. Looking a prompt of
16K tokens up by its chain hashes, with a store just opened (which reads every table) and with one
that knows them; beside hashing the prompt, and beside listing the store's files and asking for
their sizes, which the look-up cannot do without. Then garbage collection, with nothing to do and
after every other snapshot was deleted.

K/V are random and injected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Pager, PagerConfig, _core
from kvpager.pager import Sequence
from kvpager.stores import DirectoryStore, FileStore
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report, Timing
from kvpager_bench.places import scratch_folder

TURN_TOKENS = 512
SHARED_PERCENT = 90
TAIL_TOKENS = 32
ROWS = 64
COMMON_TOKENS, OWN_TOKENS = 8192, 1024  # of each snapshot of the catalogue
PROMPT_TOKENS = 16384
FINGERPRINT, SESSION = '{"subject":"bench"}', "{}"

TURN_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("first_ms", "ms"),
    Column("first_mib", "MiB"),
    Column("second_turn_ms", "ms"),
    Column("second_turn_mib", "MiB"),
    Column("as_file_ms", "ms"),
    Column("as_file_mib", "MiB"),
    Column("bytes_of_file", "%", 2),
    Column("time_of_file", "%", 2),
    Column("bytes_over_new", "x the new K/V", 3),
    Column("shared_session_ms", "ms"),
    Column("shared_session_mib", "MiB"),
    Column("shared_bytes_of_own", "%", 2),
)
CATALOGUE_COLUMNS = (
    Column("snapshots"),
    Column("chunks"),
    Column("store_mib", "MiB"),
    Column("save_ms", "ms"),
    Column("hit_ms", "ms"),
    Column("miss_ms", "ms"),
    Column("cold_hit_ms", "ms"),
    Column("hash_prompt_ms", "ms"),
    Column("list_files_ms", "ms"),
    Column("entries_ms", "ms"),
    Column("open_ms", "ms"),
    Column("gc_idle_ms", "ms"),
    Column("gc_half_ms", "ms"),
    Column("gc_freed_mib", "MiB"),
)


class Source:
    """A pager of one layout, to freeze sequences of."""

    def __init__(self, layout: str, tokens: int, threads: int) -> None:
        self.layout = subjects.LAYOUTS[layout]
        chunks = -(-tokens // self.layout.chunk_tokens)
        config = PagerConfig(pool_tokens=4096, host_bytes=chunks * self.layout.chunk_bytes)
        self.pager = Pager(
            self.layout, config, rows=ROWS, fingerprint={"subject": "bench"}, threads=threads
        )

    def sequence(self, tokens: int, seed: int) -> Sequence:
        sequence = self.pager.sequence()
        self.grow(sequence, tokens, seed)
        return sequence

    def grow(self, sequence: Sequence, tokens: int, seed: int) -> None:
        subjects.inject(sequence, self.layout, tokens, seed=seed, provenance="exact")


def save(store: Any, name: str, content: _core.SnapshotContent) -> Any:
    return store.save(name, content, fingerprint=FINGERPRINT, session=SESSION)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call that cannot be repeated."""
    kept: list[Any] = []
    timing = harness.measure(lambda: kept.append(call()), runs=1, warm_up=0)
    return timing.median, kept[0]


# Turns of one conversation


def work_turns(task: dict[str, Any]) -> dict[str, Any]:
    context = task["context"]
    source = Source(task["layout"], 2 * context + 4096, task["threads"])
    talk = source.sequence(context - TAIL_TOKENS, seed=1)
    first = talk.freeze()
    shared = context * SHARED_PERCENT // 100 // ROWS * ROWS
    with_prefix = talk.fork()
    with_prefix.trim(shared)
    source.grow(with_prefix, context - TAIL_TOKENS - shared, seed=2)
    other = with_prefix.freeze()
    source.grow(talk, TURN_TOKENS, seed=3)
    second = talk.freeze()
    folder = Path(task["folder"])
    rounds: dict[str, list[float]] = {}
    sizes: dict[str, set[int]] = {}
    for number in range(1 + task["runs"]):
        store = DirectoryStore(folder / f"store-{number}")
        file = folder / "second.kvsnap"
        for name, call in (
            ("first", partial(save, store, "talk", first)),
            ("second_turn", partial(save, store, "talk", second)),
            ("as_file", partial(save, FileStore(), str(file), second)),
            ("shared_session", partial(save, store, "other", other)),
        ):
            seconds, report = timed(call)
            if number:  # the first round is the warm-up
                rounds.setdefault(name, []).append(seconds)
                sizes.setdefault(name, set()).add(report.bytes_written)
        shutil.rmtree(folder / f"store-{number}")
        file.unlink()
    varying = {name: found for name, found in sizes.items() if len(found) > 1}
    if varying:
        raise harness.NondeterministicSubjectError(f"bytes written vary: {varying}")
    return {
        "runs": rounds,
        "bytes": {name: found.pop() for name, found in sizes.items()},
        "turn_bytes": TURN_TOKENS * source.layout.token_bytes,
    }


def add_turns(report: Report, task: dict[str, Any], answer: dict[str, Any]) -> None:
    ms = {name: Timing(tuple(runs)).median * 1e3 for name, runs in answer["runs"].items()}
    mib = {name: size / 2**20 for name, size in answer["bytes"].items()}
    report.add(
        layout=task["layout"],
        context=task["context"],
        **{f"{name}_ms": value for name, value in ms.items()},
        **{f"{name}_mib": value for name, value in mib.items()},
        bytes_of_file=100 * mib["second_turn"] / mib["as_file"],
        time_of_file=100 * ms["second_turn"] / ms["as_file"],
        bytes_over_new=answer["bytes"]["second_turn"] / answer["turn_bytes"],
        shared_bytes_of_own=100 * mib["shared_session"] / mib["first"],
    )


# The catalogue as it fills


def work_catalogue(task: dict[str, Any]) -> dict[str, Any]:
    count, runs = task["snapshots"], task["runs"]
    folder = Path(task["folder"]) / "store"
    source = Source(subjects.SHIPPED, 4 * PROMPT_TOKENS, task["threads"])
    common = source.sequence(COMMON_TOKENS, seed=1)
    store = DirectoryStore(folder)
    saves = []
    prompts = []
    for number in range(count):
        with_prefix = common.fork()
        source.grow(with_prefix, OWN_TOKENS + TAIL_TOKENS, seed=2 + number)
        seconds, _ = timed(partial(save, store, f"session-{number}", with_prefix.freeze()))
        saves.append(seconds)
        prompts.append(with_prefix.tokens[: COMMON_TOKENS + OWN_TOKENS])
        with_prefix.close()
    generator = np.random.default_rng(0)

    def prompt(start: Any) -> Any:
        more = generator.integers(8, 1024, PROMPT_TOKENS - len(start), dtype=np.int32)
        return np.concatenate([start, more])

    core = source.pager.core
    known = prompt(prompts[count // 2])
    hashes = core.chain_hashes(known, "")
    unknown = core.chain_hashes(prompt(prompts[0][:0]), "")
    expected = (COMMON_TOKENS + OWN_TOKENS) // source.layout.chunk_tokens

    def hit(store: DirectoryStore) -> None:
        found = store.find_prefix(hashes)
        if found is None or found.chunks != expected:
            raise harness.MissingNumberError(f"look-up found {found}, expected {expected} chunks")

    def miss() -> None:
        if store.find_prefix(unknown) is not None:
            raise harness.MissingNumberError("look-up found what is not there")

    def ms(call: Callable[[], object]) -> float:
        return harness.measure(call, runs=4 * runs).median * 1e3

    held = sum(files_of(folder)) / 2**20
    answer = {
        "chunks": store.stats()["chunks"],
        "store_mib": held,
        "save_ms": Timing(tuple(saves[-min(50, count) :])).median * 1e3,
        "hit_ms": ms(lambda: hit(store)),
        "miss_ms": ms(miss),
        "cold_hit_ms": harness.measure(lambda: hit(DirectoryStore(folder)), runs=runs).median * 1e3,
        "hash_prompt_ms": ms(lambda: core.chain_hashes(known, "")),
        "list_files_ms": ms(lambda: files_of(folder)),
        "entries_ms": ms(store.entries),
        "open_ms": ms(lambda: store.open("session-0")),
        "gc_idle_ms": harness.measure(store.gc, runs=runs).median * 1e3,
    }
    for number in range(0, count, 2):
        store.delete(f"session-{number}")
    seconds, _ = timed(store.gc)
    freed = held - sum(files_of(folder)) / 2**20
    return {**answer, "gc_half_ms": seconds * 1e3, "gc_freed_mib": freed}


WORKERS = {"turns": work_turns, "catalogue": work_catalogue}


def files_of(folder: Path) -> list[int]:
    """Sizes of all files of a store: a look-up has to notice what other processes did."""
    return [
        entry.stat().st_size
        for inside in ("packs", "snapshots")
        for entry in os.scandir(folder / inside)
    ]


def judge(turns: Report, catalogue: Report) -> None:
    longest = max(turns.rows, key=lambda row: turns.number(row, "context"))
    share = [turns.number(row, "bytes_of_file") for row in turns.rows]
    over = [turns.number(row, "bytes_over_new") for row in turns.rows]
    turns.judge(
        f"a second turn of {TURN_TOKENS} tokens writes at most 5% of the bytes of a whole file",
        max(share) <= 5,
        ", ".join(f"{a:.1f}%, {b:.2f} times the new K/V" for a, b in zip(share, over)),
    )
    shared = [turns.number(row, "shared_bytes_of_own") for row in turns.rows]
    turns.judge(
        f"a session that shares {SHARED_PERCENT}% of its tokens writes at most "
        f"{105 - SHARED_PERCENT}% of its bytes",
        max(shared) <= 105 - SHARED_PERCENT,
        ", ".join(f"{value:.1f}%" for value in shared),
    )
    turns.judge(
        "the longest context's second turn is saved in a tenth of the time of a whole file",
        turns.number(longest, "time_of_file") <= 10,
        f"{turns.number(longest, 'time_of_file'):.1f}%",
    )
    full = catalogue.rows[-1]
    hit, listing = (catalogue.number(full, name) for name in ("hit_ms", "list_files_ms"))
    catalogue.judge(
        "in the fullest store a look-up takes at most 5 times as long as listing the store's files",
        hit <= 5 * listing,
        f"{hit:.2f} ms beside {listing:.2f} ms",
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--cells", type=harness.parse_list, help="LAYOUT:TOKENS,...")
    parser.add_argument("--snapshots", type=harness.parse_ints)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--folder", type=Path, help="where stores go; a temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(task["threads"])
        print(json.dumps(WORKERS[task["what"]](task)))
        return
    cells = arguments.cells or (
        ["shipped:2048"]
        if arguments.quick
        else ["shipped:16384", "shipped:65536", "shipped:262144", "gqa4-bf16:65536"]
    )
    counts = arguments.snapshots or ([8] if arguments.quick else [100, 400])
    arguments.runs = arguments.runs or (2 if arguments.quick else 5)
    record = harness.start(arguments)
    turns = Report(
        harness.report_name("store_turns", arguments),
        "Saving into a directory store: a second turn, and a session with a common prefix",
        TURN_COLUMNS,
        {"turn_tokens": TURN_TOKENS, "shared_percent": SHARED_PERCENT, "runs": arguments.runs},
        record,
    )
    catalogue = Report(
        harness.report_name("store_catalogue", arguments),
        f"A directory store as it fills: looking up a prompt of {PROMPT_TOKENS} tokens, gc",
        CATALOGUE_COLUMNS,
        {"tokens_per_snapshot": COMMON_TOKENS + OWN_TOKENS + TAIL_TOKENS, "runs": arguments.runs},
        record,
    )
    common = {"threads": arguments.threads, "runs": arguments.runs}
    for cell in cells:
        layout, _, tokens = cell.rpartition(":")
        task = {"layout": layout, "context": int(tokens), **common}
        add_turns(turns, task, _run("turns", task, arguments.folder))
        print(f"{cell}: second turn {turns.rows[-1]['second_turn_ms']:.1f} ms", flush=True)
    for count in counts:
        answer = _run("catalogue", {"snapshots": count, **common}, arguments.folder)
        catalogue.add(snapshots=count, **answer)
        print(f"{count} snapshots: look-up {answer['hit_ms']:.2f} ms", flush=True)
    judge(turns, catalogue)
    turns.finish()
    catalogue.finish()


def _run(what: str, task: dict[str, Any], parent: Path | None) -> dict[str, Any]:
    with scratch_folder(parent) as folder:
        return harness.run_worker(__spec__.name, {"what": what, "folder": str(folder), **task})


if __name__ == "__main__":
    main()
