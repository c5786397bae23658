"""kvpager's storage made by SGLang's own factory, whose sources are imported without a GPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not importable; make test-lmcache-sglang", allow_module_level=True)

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from connectors.sglang_stubs import HostPool
from connectors.stores import damage

INDICES = torch.arange(4, 12)  # of pages 1 and 2


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)

    def new(pool: HostPool) -> Any:
        """As `HiCacheController.attach_storage_backend` does."""
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=str(folder),
            extra_config={
                "backend_name": "kvpager",
                "module_path": "kvpager.connectors.sglang",
                "class_name": "KvpagerHiCache",
                "interface_v1": 1,
                "path": str(tmp_path / "store"),
                "byte_budget": "64MiB",
            },
        )
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield new
    for storage in made:
        storage.close()


def filled() -> HostPool:
    pool = HostPool()
    pool.kv_buffer[:] = torch.randn(pool.kv_buffer.shape)
    return pool


def test_the_factory_makes_a_storage_whose_pages_come_back(create):
    pool, other = filled(), HostPool()
    first = create(pool)
    assert isinstance(first, HiCacheStorage)
    assert first.batch_set_v1(["a", "b"], INDICES) == [True, True]
    second = create(other)
    assert second.batch_exists(["a", "b", "c"]) == 2
    assert second.batch_get_v1(["a", "b"], INDICES) == [True, True]
    assert torch.equal(other.kv_buffer[:, :, 4:12], pool.kv_buffer[:, :, 4:12])
    assert not other.kv_buffer[:, :, :4].any()
    assert first.get_stats() is None


def test_a_damaged_page_is_refused(create, tmp_path, caplog):
    storage = create(filled())
    storage.batch_set_v1(["a", "b"], INDICES)
    damage(tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        assert storage.batch_get_v1(["a", "b"], INDICES) == [True, False]
    assert "refused 1 of 2 pages" in caplog.text


def test_answers_about_several_pools_are_of_sglangs_own_file_storage(create, tmp_path):
    """The same pages in both; every policy that the file storage knows, every length."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    pool = filled()
    ours = create(pool)
    theirs = HiCacheFile(ours._config, str(tmp_path / "files"))
    theirs.register_mem_pool_host(pool)
    for storage in (ours, theirs):
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        for name in (PoolName.SWA, PoolName.INDEXER):
            storage.register_mem_host_pool_v2(pool, name)
        for name, keys in (
            (PoolName.KV, "abcde"),
            (PoolName.SWA, "bce"),
            (PoolName.INDEXER, "abd"),
        ):
            storage.batch_set_v2([PoolTransfer(name, torch.arange(4 * len(keys)), keys=list(keys))])
    for name in (PoolName.SWA, PoolName.INDEXER):
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            for tail in ("x", "xy"):
                for keys in ("abcdef", "a", "xa", "bcde"):
                    asked = list(keys), [PoolTransfer(name, keys=list(tail), hit_policy=policy)]
                    assert ours.batch_exists_v2(*asked) == theirs.batch_exists_v2(*asked)
