"""kvpager's storage as SGLang's HiCache calls it, with stubs of SGLang."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from connectors import sglang_stubs
from connectors.sglang_stubs import (
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    ServerArguments,
)
from connectors.stores import damage, swap
from kvpager.errors import InvalidArgumentError
from kvpager.stores.chunks import ChunkStore

MODULE = "kvpager.connectors.sglang"
PAGE = 4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sglang_stubs.install(monkeypatch)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The served folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    return folder


def config(model: str, path: str, **fields: Any) -> SimpleNamespace:
    """A `HiCacheStorageConfig`."""
    extra = {"path": path, "byte_budget": "64MiB", "interface_v1": 1, **fields.pop("extra", {})}
    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dcp_rank": 0,
        "dcp_size": 1,
        "dp_rank": 0,
        "is_mla_model": False,
        "should_split_heads": False,
        "tp_lcm_size": None,
        "enable_storage_metrics": False,
        "model_name": model,
        **fields,
    }
    return SimpleNamespace(**given, extra_config=extra)


class Server:
    """A storage with a pool of host memory, as SGLang's controller drives it."""

    def __init__(self, module: ModuleType, config: SimpleNamespace, pool: HostPool) -> None:
        self.pool = pool
        self.storage = module.KvpagerHiCache(config, {})
        self.storage.register_mem_pool_host(pool)

    def fill(self, *pages: int) -> None:
        for page in pages:
            self.pool.set_from_flat_data_page(page * PAGE, content(self.pool, page))

    def page(self, page: int) -> torch.Tensor:
        return self.pool.get_data_page(page * PAGE)

    def save(self, keys: dict[str, int]) -> list[bool]:
        self.fill(*keys.values())
        found: list[bool] = self.storage.batch_set_v1(list(keys), indices(*keys.values()))
        return found

    def load(self, keys: dict[str, int]) -> list[bool]:
        found: list[bool] = self.storage.batch_get_v1(list(keys), indices(*keys.values()))
        return found


def content(pool: HostPool, seed: int) -> torch.Tensor:
    """A page's K/V."""
    page = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(seed)
    size = page.numel() * page.element_size()
    return torch.randint(0, 100, (size,), dtype=torch.uint8, generator=generator).view(page.dtype)


def indices(*pages: int) -> torch.Tensor:
    """Of all tokens of pages of host memory."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.fixture
def make(module: ModuleType, model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def new(pool: HostPool | None = None, **fields: Any) -> Server:
        given = config(str(model), str(tmp_path / "store"), **fields)
        made.append(Server(module, given, pool or HostPool()))
        return made[-1]

    yield new
    for server in made:
        server.storage.close()


@pytest.fixture
def server(make: Callable[..., Server]) -> Server:
    return make()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, model: Path) -> ServerArguments:
    """Those of a server in this process."""
    found = ServerArguments(
        model_path=str(model),
        revision=None,
        speculative_draft_model_path=None,
        json_model_override_args="{}",
        kv_cache_dtype="auto",
    )
    monkeypatch.setattr(ServerArguments, "current", found)
    return found


def test_pages_that_were_saved_are_found_and_loaded(server):
    assert server.save({"a": 1, "b": 2}) == [True, True]
    assert server.storage.batch_exists(["a", "b", "c"]) == 2
    assert server.storage.batch_exists(["c", "a"]) == 0
    assert server.load({"b": 5, "c": 6, "a": 7}) == [True, False, True]
    assert same(server.page(5), server.page(2))
    assert same(server.page(7), server.page(1))
    assert not server.page(6).any()


def test_a_server_that_is_started_again_finds_them(make):
    make().save({"a": 1})
    again = make()
    assert again.load({"a": 1}) == [True]
    assert same(again.page(1), content(again.pool, 1))


def test_tensors_can_be_set_and_got(server):
    pages = [content(server.pool, seed) for seed in (1, 2)]
    assert server.storage.batch_set(["a", "b"], pages)
    assert server.storage.set("c", content(server.pool, 3))
    into = [server.pool.get_dummy_flat_data_page() for _ in range(3)]
    found = server.storage.batch_get(["a", "x", "b"], into)
    assert found[0] is into[0]
    assert found[1] is None
    assert same(into[0], pages[0])
    assert not into[1].any()
    assert same(into[2], pages[1])
    assert same(server.storage.get("c"), content(server.pool, 3))
    assert server.storage.exists("c")
    assert not server.storage.exists("x")
    assert server.storage.get("x", into[1]) is None


def test_a_page_may_go_to_a_place_that_is_not_contiguous(server):
    server.storage.set("a", content(server.pool, 1))
    wide = torch.zeros(2, content(server.pool, 1).numel(), dtype=server.pool.dtype).t()
    assert server.storage.get("a", wide[:, 0]) is not None
    assert same(wide[:, 0].contiguous(), content(server.pool, 1))
    assert not wide[:, 1].any()


def test_a_damaged_page_is_refused_and_leaves_host_memory_as_it_was(server, tmp_path, caplog):
    server.save({"a": 1, "b": 2})
    damage(tmp_path / "store")
    assert server.load({"a": 5, "b": 6}) == [True, False]
    assert not server.page(6).any()
    assert "refused 1 of 2 pages" in caplog.text
    assert server.storage.batch_exists(["a", "b"]) == 1
    assert server.save({"b": 2}) == [True]
    assert server.load({"b": 6}) == [True]


def test_a_file_that_was_swapped_is_refused(server, tmp_path):
    server.save({"a": 1})
    server.save({"b": 2})
    swap(tmp_path / "store")
    assert server.load({"a": 5, "b": 6}) == [False, False]
    assert not server.page(5).any()


@pytest.mark.parametrize(
    "pool",
    [HostPool(torch.float16), HostPool(torch.float8_e4m3fn, heads=4), HostPool(heads=4)],
    ids=["dtype", "dtype-of-the-same-size", "heads"],
)
def test_pages_of_another_pool_are_not_found(make, pool, caplog):
    caplog.set_level(logging.INFO, "kvpager.connectors.sglang")
    make().save({"a": 1})
    other = make(pool)
    assert other.storage.batch_exists(["a"]) == 0
    assert other.load({"a": 1}) == [False]
    assert not other.page(1).view(torch.uint8).any()
    assert "pages there are not used" in caplog.text or "chunks there are not used" in caplog.text


def test_another_layout_of_the_same_size_is_not_found(make):
    make().save({"a": 1})
    pool = HostPool()
    pool.layout = "page_first"
    assert make(pool).storage.batch_exists(["a"]) == 0


@pytest.mark.parametrize(
    "fields",
    [{"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2}, {"attn_cp_size": 2}],
    ids=str,
)
def test_pages_of_another_rank_are_not_found(make, fields):
    make().save({"a": 1})
    assert make(**fields).storage.batch_exists(["a"]) == 0


def test_ranks_share_latent_attention_and_not_recurrent_states(make):
    first = make(is_mla_model=True, tp_size=2)
    first.storage.register_mem_host_pool_v2(HostPool(), PoolName.MAMBA)
    first.save({"a": 1})
    mamba = PoolTransfer(PoolName.MAMBA, indices(1), keys=["a"])
    assert first.storage.batch_set_v2([mamba]) == {"mamba": [True]}
    second = make(is_mla_model=True, tp_size=2, tp_rank=1)
    second.storage.register_mem_host_pool_v2(HostPool(), PoolName.MAMBA)
    assert second.load({"a": 1}) == [True]
    assert second.storage.batch_get_v2([mamba]) == {"mamba": [False]}


def test_other_weights_under_the_same_name_are_not_found(make, model, caplog):
    caplog.set_level(logging.INFO, "kvpager.connectors.sglang")
    make().save({"a": 1})
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 100)
    other = make()
    assert other.storage.batch_exists(["a"]) == 0
    assert other.load({"a": 1}) == [False]
    assert "model.weights.model.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json_model_override_args", '{"rope_theta": 500000}'),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("revision", "2"),
        ("attention_backend", "fa3"),
    ],
)
def test_arguments_of_the_server_count(make, arguments, name, value):
    make(model_name="served").save({"a": 1})
    again = make(model_name="another name")
    assert again.storage.batch_exists(["a"]) == 1
    setattr(arguments, name, value)
    assert make(model_name="served").storage.batch_exists(["a"]) == 0


def test_a_draft_model_counts(make, arguments, tmp_path):
    make().save({"a": 1})
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"1")
    arguments.speculative_draft_model_path = str(draft)
    assert make().storage.batch_exists(["a"]) == 0


def test_weights_without_files_are_refused_at_start_unless_named(make):
    with pytest.raises(InvalidArgumentError, match="nowhere/nothing"):
        make(model_name="nowhere/nothing")
    first = make(model_name="nowhere/nothing", extra={"weights": "revision 1"})
    first.save({"a": 1})
    assert make(extra={"weights": "revision 1"}).storage.batch_exists(["a"]) == 1
    assert make(extra={"weights": "revision 2"}).storage.batch_exists(["a"]) == 0


@pytest.mark.parametrize("name", ["path", "byte_budget"])
def test_a_missing_option_is_named(module, model, tmp_path, name):
    given = config(str(model), str(tmp_path / "store"))
    del given.extra_config[name]
    with pytest.raises(InvalidArgumentError, match=name):
        module.KvpagerHiCache(given, {})


def test_the_least_recently_used_pages_go_at_the_budget(make):
    server = make(extra={"byte_budget": 64 << 10})
    for number in range(20):
        assert server.save({str(number): 1}) == [True]
        assert server.load({"0": 2}) == [True]
        assert server.storage._pools["kv"].store.stats()["bytes"] <= 64 << 10
    found = [server.storage.exists(str(number)) for number in range(20)]
    assert found[0]
    assert found[19]
    assert not all(found)


def test_pages_larger_than_the_budget_are_not_saved_and_nothing_is_raised(make, caplog):
    server = make(extra={"byte_budget": 4 << 10})
    assert server.save({str(n): n for n in range(8)}) == [False] * 8
    assert "byte_budget" in caplog.text


def test_a_store_that_fails_is_a_miss(server, monkeypatch, caplog):
    server.save({"a": 1})

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        for name in ("has", "read", "put"):
            patch.setattr(ChunkStore, name, broken)
        assert server.storage.batch_exists(["a"]) == 0
        assert server.load({"a": 5}) == [False]
        assert server.save({"b": 2}) == [False]
    assert "the disk is gone" in caplog.text
    assert not server.page(5).any()
    assert server.load({"a": 5}) == [True]


def transfer(name: PoolName, policy: PoolHitPolicy, *keys: str) -> PoolTransfer:
    return PoolTransfer(name, keys=list(keys), hit_policy=policy)


def test_pools_beside_kv_shorten_what_is_usable(server):
    for name in (PoolName.SWA, PoolName.INDEXER, PoolName.MAMBA):
        server.storage.register_mem_host_pool_v2(HostPool(), name)
    server.save({key: n for n, key in enumerate("abcde", 1)})
    for name, keys in ((PoolName.INDEXER, "abce"), (PoolName.SWA, "bce"), (PoolName.MAMBA, "b")):
        page = PoolTransfer(name, indices(*range(len(keys))), keys=list(keys))
        assert server.storage.batch_set_v2([page]) == {name: [True] * len(keys)}
    exists = server.storage.batch_exists_v2
    keys = list("abcdef")
    found = exists(keys, [transfer(PoolName.INDEXER, PoolHitPolicy.ALL_PAGES)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {"kv": 5, "indexer": 3})
    found = exists(keys, [transfer(PoolName.SWA, PoolHitPolicy.TRAILING_PAGES, "x", "y")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    found = exists(keys, [transfer(PoolName.MAMBA, PoolHitPolicy.TRAILING_PAGES, "x")])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {"kv": 5, "mamba": 2})
    found = exists(keys, [transfer(PoolName.KV, PoolHitPolicy.BLOCK_GROUPS)])
    assert found.kv_hit_pages == 5
    assert exists(["x"], []).kv_hit_pages == 0
    assert exists(keys).restorable_prefix_pages == [1, 2, 3, 4, 5]


def test_pages_of_pools_are_told_apart(server):
    other = HostPool()
    server.storage.register_mem_host_pool_v2(other, PoolName.SWA)
    server.save({"a": 1})
    assert server.storage.batch_get_v2([PoolTransfer(PoolName.SWA, indices(1), keys=["a"])]) == {
        "swa": [False]
    }
    assert not other.kv_buffer.any()


def test_indices_that_do_not_fit_move_nothing(server):
    server.save({"a": 1})
    wrong = torch.arange(PAGE + 1)
    assert server.storage.batch_get_v1(["a"], wrong) == [False]
    assert server.storage.batch_set_v1(["b"], wrong) == [False]
    unknown = PoolTransfer(PoolName.SWA, indices(1), keys=["a"])
    assert server.storage.batch_get_v2([unknown]) == {"swa": [False]}
    assert server.storage.batch_set_v2([unknown]) == {"swa": [False]}


def test_a_pool_that_only_counts_has_pages_without_bytes(module, model, tmp_path):
    pool = HostPool()
    pool.get_data_page = lambda index, flat=True: torch.empty(0)  # type: ignore[method-assign]
    pool.set_from_flat_data_page = lambda index, page: None  # type: ignore[method-assign]
    server = Server(module, config(str(model), str(tmp_path / "store")), pool)
    assert server.storage.batch_set_v1(["a"], indices(1)) == [True]
    assert server.storage.batch_exists(["a", "b"]) == 1
    assert server.storage.batch_get_v1(["a", "b"], indices(1, 2)) == [True, False]
    server.storage.close()


def test_clear_removes_these_pages_and_no_other_identitys(make):
    first, other = make(), make(HostPool(torch.float16))
    first.save({"a": 1})
    other.save({"a": 1})
    first.storage.clear()
    assert not first.storage.exists("a")
    assert other.storage.exists("a")
    assert first.save({"a": 1}) == [True]


def test_sglangs_metrics_have_pages_and_bandwidth_since_they_were_asked_for(make):
    server = make(enable_storage_metrics=True)
    server.save({"a": 1, "b": 2})
    server.load({"a": 3, "x": 4})
    stats = server.storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [1])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert server.storage.get_stats().backup_pgs == []
    assert make().storage.get_stats() is None


def save_some(path: str, model: str, first: int) -> None:
    """In another process."""
    sglang_stubs.install(pytest.MonkeyPatch())
    server = Server(importlib.import_module(MODULE), config(model, path), HostPool())
    for number in range(first, first + 10):
        assert server.save({str(number): number % 8}) == [True]
    server.storage.close()


def test_two_processes_share_a_folder(server, model, tmp_path):
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=save_some, args=(str(tmp_path / "store"), str(model), first))
        for first in (0, 5)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    assert server.storage.batch_exists([str(n) for n in range(15)]) == 15
    for number in range(15):
        assert server.load({str(number): 9}) == [True]
        assert same(server.page(9), content(server.pool, number % 8))


def test_records_say_what_is_found(make, caplog):
    caplog.set_level(logging.INFO, "kvpager.connectors.sglang")
    make().save({"a": 1})
    make()
    assert "kvpager: identified the K/V in" in caplog.text
    assert "kvpager: 1 chunks of identity" in caplog.text
