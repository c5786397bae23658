"""SGLang's classes have what `kvpager.connectors.sglang` uses, in every version that is here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvpager.connectors
from connectors import sglang_stubs
from connectors.sources import fields, found, given, is_abstract, methods, module, names, parsed

OURS = Path(kvpager.connectors.__file__).parent / "sglang.py"
STORAGE = "sglang.srt.mem_cache.hicache_storage"
POOLS = "sglang.srt.mem_cache.pool_host"


@pytest.fixture(params=found("sglang") or [None], ids=str)
def sglang(request: pytest.FixtureRequest) -> Path:
    return given(request, "sglang", "test-lmcache-sglang")


def constant(name: str) -> set[str]:
    """A tuple of names in the connector."""
    for node in ast.parse(OURS.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return set(re.findall(r"'([^']+)'", ast.unparse(node.value)))
    raise AssertionError(name)


@pytest.mark.parametrize("name", sorted(sglang_stubs.MODULES))
def test_what_is_imported_is_there(sglang, name):
    there = parsed(module(sglang, name))
    assert [one.__name__ for one in sglang_stubs.MODULES[name] if one.__name__ not in there] == []


def test_the_storage_has_every_abstract_method_and_takes_their_arguments(sglang):
    theirs = methods(module(sglang, STORAGE), "HiCacheStorage")
    ours = methods(OURS, "KvpagerHiCache")
    assert [name for name, one in theirs.items() if is_abstract(one) and name not in ours] == []
    assert [name for name in theirs if name not in ours] == ["on_host_pools_registered"]
    for name in set(theirs) & set(ours):
        assert names(ours[name]) == names(theirs[name]), name
    public = {name for name in ours if not name.startswith("_")}
    assert public - set(theirs) == {"close"}


def test_the_factory_makes_it_of_a_configuration_and_a_dictionary(sglang):
    text = module(sglang, "sglang.srt.mem_cache.storage.backend_factory").read_text()
    assert "return backend_class(storage_config, kwargs)" in text
    assert names(methods(OURS, "KvpagerHiCache")["__init__"]) == [
        "self",
        "storage_config",
        "kwargs",
    ]


def test_the_stubs_of_the_tests_are_as_the_real_classes(sglang):
    stubs, storage = Path(sglang_stubs.__file__), module(sglang, STORAGE)
    theirs = methods(storage, "HiCacheStorage")
    for name, stub in methods(stubs, "HiCacheStorage").items():
        assert names(stub) == names(theirs[name]), name
        assert is_abstract(stub) == is_abstract(theirs[name]), name
    for name in ("PoolTransfer", "PoolTransferResult"):
        assert fields(stubs, name) <= fields(storage, name), name
    pool = methods(module(sglang, f"{POOLS}.mha"), "MHATokenToKVPoolHost")
    for name, stub in methods(stubs, "HostPool").items():
        if name != "__init__":
            assert names(stub) == names(pool[name]), name


def test_every_pool_of_host_memory_has_pages(sglang):
    base = methods(module(sglang, f"{POOLS}.base"), "HostKVCache")
    assert {"get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"} <= {
        name for name, one in base.items() if "abstractmethod" in ast.unparse(one)
    }


def test_fields_of_the_configuration_of_pools_and_of_arguments_are_there(sglang):
    config = fields(module(sglang, STORAGE), "HiCacheStorageConfig")
    wanted = constant("_RANKS") | constant("_SPLIT")
    assert wanted | {"tp_rank", "model_name", "extra_config", "enable_storage_metrics"} <= config
    folder = sglang / "srt/mem_cache/pool_host"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    assert [name for name in constant("_POOL") if f"self.{name}" not in text] == [
        "storage_format_tag"
    ]
    assert "storage_format_tag" in text
    folder = sglang / "srt/arg_groups/fields"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    names = constant("_ARGUMENTS") | {"model_path", "speculative_draft_model_path"}
    assert [name for name in sorted(names) if f"    {name}: A[" not in text] == []


def test_states_of_recurrent_layers_are_the_only_pages_that_ranks_of_latent_attention_do_not_share(
    sglang,
):
    text = ast.unparse(methods(module(sglang, STORAGE), "HiCacheFile")["_get_suffixed_key"])
    assert "key.endswith(f'.{PoolName.MAMBA.value}')" in text


def test_the_controller_registers_the_pool_right_after_it_made_the_storage(sglang):
    text = module(sglang, "sglang.srt.managers.cache_controller").read_text()
    made = text.index("self.storage_backend = StorageBackendFactory.create_backend(")
    registered = text.index("self.storage_backend.register_mem_pool_host(self.storage_host_pool)")
    assert 0 < registered - made < 300
    assert 'self.storage_config.extra_config.get("interface_v1", 0)' in text
