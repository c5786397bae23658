"""Storing and loading objects through LMCache's adapters for files, as its own benchmark does it.

task: folder, adapters ("fs": Python, "fs_native": C++), object_bytes (a list of sizes),
total_bytes, runs, states ("cached", "dropped" from the page cache). Objects of one size are
submitted together, into memory that is there already. Loaded bytes are compared with the stored
ones. Answers {"rows": [{adapter, object_bytes, state, store_s: [per run], load_s: [per run]}]}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig

_CONFIGURATIONS = {"fs": FSL2AdapterConfig, "fs_native": FSNativeL2AdapterConfig}
_ALIGNMENT = 4096


def main(task: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for name in task["adapters"]:
        for size in task["object_bytes"]:
            stored, loads = measure(task, name, size)
            rows += [
                {"adapter": name, "object_bytes": size, "state": state, "store_s": stored}
                | {"load_s": seconds}
                for state, seconds in loads.items()
            ]
    return {"rows": rows}


def measure(
    task: dict[str, Any], name: str, size: int
) -> tuple[list[float], dict[str, list[float]]]:
    count = -(-task["total_bytes"] // size)
    buffer = data.make_aligned_tensor(2 * count * size, _ALIGNMENT)
    source = data.make_memory_objects(buffer, count, size, 0)
    target = data.make_memory_objects(buffer, count, size, count * size, fill_offset=1)
    keys = data.make_object_keys(count)
    folder = Path(task["folder"]) / f"{name}-{size}"
    folder.mkdir()
    adapter = _adapter(name, folder)
    stored: list[float] = []
    for _ in range(task["runs"] + 1):
        for path in folder.iterdir():  # what is there already is not stored again
            path.unlink()
        stored += _timed(runner.bench_store, adapter, keys, source, size)
    loads: dict[str, list[float]] = {}
    for state in task["states"]:
        seconds: list[float] = []
        for _ in range(task["runs"] + 1):
            if state == "dropped":
                _drop(folder)
            seconds += _timed(runner.bench_load, adapter, keys, target, size)
            if not data.verify_round_trip(keys, source, target, lambda line: None):
                raise RuntimeError(f"{name}, {size} bytes: other bytes were loaded than stored")
        loads[state] = seconds[1:]
    adapter.close()
    shutil.rmtree(folder)
    return stored[1:], loads


def _adapter(name: str, folder: Path) -> Any:
    return create_l2_adapter(_CONFIGURATIONS[name].from_dict({"base_path": str(folder)}))


def _timed(bench: Any, adapter: Any, keys: Any, objects: Any, size: int) -> list[float]:
    result = bench(
        adapter,
        in_flight=1,
        num_keys=len(keys),
        data_size=size,
        rounds=1,
        keys_for_round=lambda _: [keys],
        objs_for_round=lambda _: [objects],
        log=lambda line: None,
    )
    if result.timed_out_rounds or result.success_counts != [len(keys)]:
        raise RuntimeError(f"{bench.__name__}: {result.success_counts} of {len(keys)} objects")
    return list(result.round_durations)


def _drop(folder: Path) -> None:
    os.sync()  # once: an fsync of each of a thousand small files takes longer than all the rest
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
