"""kvpager's tier beside vLLM's own `fs` tier, in real engines on a CPU. Prints a table.

Run by a Python that has vLLM and kvpager (`make test-vllm` makes build/vllm/venv), on a machine
that does nothing else:

    build/vllm/venv/bin/python bench/vllm_tiers.py [--conversations 50] [--spin]

Conversations share beginnings: each begins with one of five texts of 256 tokens, and goes on alone.
A chunk has 64 tokens and 1 MiB. A first engine computes and stores, others, restarted, load. Their
loop waits for a millisecond where nothing was computed, as that of vLLM's server; with --spin it
does not, as where VLLM_ENABLE_V1_MULTIPROCESSING is 0. What kvpager stores is durable when it is
reported: compare it with `dd oflag=dsync`.
"""

from __future__ import annotations

import argparse
import math
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from connectors.engines import Engines, Run, fs_tier, kvpager_tier, prompt, save_model

BEGINNINGS, BEGINNING_TOKENS, OWN_TOKENS = 5, 256, 400
CHUNK, CHUNKS, JOBS = 1 << 20, 9, 40  # of the stores alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spin", action="store_true", help="without the server's pauses")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        place = Path(folder)
        stores(place)
        with Engines(place) as engines:
            tiers(engines, place, options)


def stores(place: Path) -> None:
    """The stores alone, one thread, jobs of 9 chunks; what kvpager stores is durable."""
    from vllm.v1.kv_offload.tiering.fs.io import (
        batch_load_block,
        batch_store_block,
        probe_o_direct,
    )

    from kvpager.stores import ChunkStore

    # From the beginning of a page, which O_DIRECT needs.
    memory = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK), np.uint8).reshape(CHUNKS, CHUNK)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    rows = memoryview(memory)
    offsets = [number * CHUNK for number in range(CHUNKS)]
    (place / "files").mkdir()
    direct = probe_o_direct(str(place / "files"))

    def names(job: int) -> list[str]:
        return [str(place / "files" / f"{job}-{number}") for number in range(CHUNKS)]

    def keys(job: int) -> list[bytes]:
        return [f"{job}-{number}".encode() for number in range(CHUNKS)]

    with ChunkStore(place / "blocks", {}) as store:
        ways: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
            f"fs, O_DIRECT {direct}": (
                lambda job: batch_store_block(names(job), rows, offsets, CHUNK, direct),
                lambda job: batch_load_block(names(job), rows, offsets, CHUNK, direct),
            ),
            "kvpager": (
                lambda job: store.put(list(zip(keys(job), [0] * CHUNKS, memory))),
                lambda job: store.read(keys(job), 0, list(memory)),
            ),
        }
        for name, (save, load) in ways.items():
            rates = [rate(call) for call in (save, load)]
            print(f"{name:24} stores {rates[0]:7.2f} GB/s   loads {rates[1]:7.2f} GB/s", flush=True)


def rate(call: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    for job in range(JOBS):
        call(job)
    return JOBS * CHUNKS * CHUNK / (time.perf_counter() - start) / 1e9


def tiers(engines: Engines, place: Path, options: argparse.Namespace) -> None:
    model = save_model(place / "model", 1, heads=8, head_dim=128)
    texts = [
        prompt(number % BEGINNINGS, BEGINNING_TOKENS) + prompt(1000 + number, OWN_TOKENS)
        for number in range(options.conversations)
    ]
    steps = [{"prompts": [text]} for text in texts]

    def run(tier: dict[str, Any] | None) -> Run:
        return engines.run(model, tier, steps, pauses=not options.spin)

    budget = 64 << 20
    found: dict[str, dict[str, Any] | None] = {
        "no tier": None,
        "fs": fs_tier(place / "fs"),
        "kvpager": kvpager_tier(place / "kvpager", "unlimited"),
        f"kvpager, {budget >> 20} MiB": kvpager_tier(place / "small", budget),
    }
    for name, tier in found.items():
        if tier is not None:
            tier["extra"]["cpu_bytes_to_use"] = 256 << 20
            report(f"{name}, stores", [run(tier)], tier)
    # In turn, so that other work of the machine meets all of them.
    runs: dict[str, list[Run]] = {name: [] for name in found}
    for _ in range(options.rounds):
        for name, tier in found.items():
            runs[name].append(run(tier))
    for name, tier in found.items():
        report(f"{name}, restarted", runs[name], tier)


def report(name: str, runs: Sequence[Run], tier: dict[str, Any] | None) -> None:
    # An engine's first request compiles.
    answers = [answer for run in runs for (answer,) in run.answers[1:]]
    seconds = [answer.seconds for answer in answers]
    cached = sum(answer.cached for answer in answers) // len(runs)
    disk = 0.0 if tier is None else on_disk(place_of(tier)) / 2**20
    print(
        f"{name:28} request p50 {statistics.median(seconds) * 1e3:7.1f} ms   "
        f"p99 {quantile(seconds, 0.99) * 1e3:7.1f} ms   "
        f"cached tokens {cached:6}   disk {disk:7.1f} MiB",
        flush=True,
    )


def place_of(tier: dict[str, Any]) -> Path:
    extra = tier["extra"]
    return Path(extra["path"] if "path" in extra else extra["secondary_tiers"][0]["root_dir"])


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
