"""kvpager's adapter behind LMCache's storage manager: chunks leave host memory and come back."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.stores import damage

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed; make test-lmcache-sglang", allow_module_level=True)

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

SHAPE = torch.Size([2, 4, 16, 64])
CHUNKS = 6


def layout(dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([SHAPE], [dtype])


def content(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (2 * SHAPE.numel(),), dtype=torch.uint8, generator=generator)


class Server:
    """A storage manager with host memory, and kvpager's adapter behind it."""

    def __init__(self, adapter: dict[str, Any], model: str) -> None:
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        options = ["--l1-size-gb", "0.0625", "--eviction-policy", "LRU"]
        options += ["--l2-adapter", json.dumps(adapter)]
        self.manager = StorageManager(parse_args_to_config(parser.parse_args(options)))
        self.keys = [ObjectKey(bytes([number]) * 32, model, 1) for number in range(CHUNKS)]

    def adapter(self) -> Any:
        return self.manager.l2_adapters()[0][1]

    def write(self) -> None:
        objects = self.manager.reserve_write(self.keys, layout())
        for number, key in enumerate(self.keys):
            objects[key].raw_data.view(torch.uint8)[: 2 * SHAPE.numel()] = content(number)
        self.manager.finish_write(self.keys)
        until(lambda: self.adapter().report_status()["chunks"]["stored"] == CHUNKS)
        until(lambda: bool(self.manager.clear() or self.manager.get_l1_usage()[0] == 0))

    def prefetch(self, desc: MemoryLayoutDesc | None = None) -> int:
        """How many chunks come back, each as it was."""
        row = GroupedObjectKeys(self.keys, 0, desc or layout())
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        found: list[Any] = []
        until(lambda: bool(found) or bool(add(found, self.manager.query_prefetch_status(handle))))
        count = int(found[0].l2_hit_count)
        hits = self.keys[:count]
        if hits:
            with self.manager.read_prefetched_results(hits) as objects:
                for number, one in enumerate(objects):
                    data = one.raw_data.view(torch.uint8)[: 2 * SHAPE.numel()]
                    assert torch.equal(data, content(number))
            self.manager.finish_read_prefetched(hits)
        return count


def add(found: list[Any], one: Any) -> bool:
    if one is not None:
        found.append(one)
    return one is not None


def until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never held")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def stop() -> None:
        while running:
            running.pop().manager.close()

    def new(**outer: Any) -> Server:
        """A server, in place of the one before."""
        stop()
        adapter = {
            "type": "plugin",
            "module_path": "kvpager.connectors.lmcache",
            "class_name": "KvpagerL2Adapter",
            "adapter_params": {
                "path": str(tmp_path / "store"),
                "byte_budget": "64MiB",
                "models": {str(model): {}},
            },
        }
        running.append(Server({**outer, "inner": adapter} if outer else adapter, str(model)))
        return running[-1]

    yield new
    stop()


def test_chunks_come_back_from_disk_as_they_were(start):
    server = start()
    server.write()
    assert server.prefetch() == CHUNKS


def test_a_server_that_is_started_again_finds_them(start):
    start().write()
    assert start().prefetch() == CHUNKS


def test_a_damaged_chunk_ends_the_prefix_that_comes_back(start, tmp_path):
    start().write()
    damage(tmp_path / "store")
    server = start()
    assert server.prefetch() == CHUNKS - 1
    assert server.adapter().report_status()["chunks"]["refused"] == 1


def test_another_dtype_of_the_same_size_finds_nothing(start):
    start().write()
    assert start().prefetch(layout(torch.float16)) == 0


def test_other_weights_under_the_same_name_find_nothing(start, model):
    start().write()
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 100)
    assert start().prefetch() == 0


def test_what_lmcache_drops_on_purpose_shortens_the_prefix_and_no_more(start):
    server = start(type="fault_inject", gap_indices=[3])
    server.write()
    assert server.prefetch() == 3
