"""LMCache's classes have what `kvpager.connectors.lmcache` uses, in every version that is here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvpager.connectors
from connectors import lmcache_stubs
from connectors.sources import fields, found, given, is_abstract, methods, module, names, parsed

OURS = Path(kvpager.connectors.__file__).parent / "lmcache.py"
ADAPTERS = "v1/distributed/l2_adapters"
LATER = {"get_memory_tags", "submit_touch"}  # from 0.5.7 on
TAGS = {"MemoryResidency", "MemorySegment", "MemoryTags"}


@pytest.fixture(params=found("lmcache") or [None], ids=str)
def lmcache(request: pytest.FixtureRequest) -> Path:
    return given(request, "lmcache", "test-lmcache-sglang")


def interface(lmcache: Path) -> dict[str, ast.FunctionDef]:
    return methods(lmcache / ADAPTERS / "base.py", "L2AdapterInterface")


@pytest.mark.parametrize("name", sorted(lmcache_stubs.MODULES))
def test_what_is_imported_is_there(lmcache, name):
    there = parsed(module(lmcache, name))
    missing = {one.__name__ for one in lmcache_stubs.MODULES[name]} - set(there)
    assert missing <= (set() if "get_memory_tags" in interface(lmcache) else TAGS)


def test_the_adapter_has_every_abstract_method_and_takes_their_arguments(lmcache):
    theirs, ours = interface(lmcache), methods(OURS, "KvpagerL2Adapter")
    assert [name for name, one in theirs.items() if is_abstract(one) and name not in ours] == []
    for name in (set(theirs) & set(ours)) - {"__init__"}:
        assert names(ours[name]) == names(theirs[name]), name
    public = {name for name in ours if not name.startswith("_")}
    assert public - set(theirs) <= LATER


def test_the_stubs_of_the_tests_are_as_the_real_class(lmcache):
    theirs = interface(lmcache)
    for name, stub in methods(Path(lmcache_stubs.__file__), "L2AdapterInterface").items():
        assert name in theirs or name in LATER, name
        if name in theirs:
            assert names(stub) == names(theirs[name]), name
            assert is_abstract(stub) == is_abstract(theirs[name]), name


def test_the_loader_passes_parameters_and_may_name_the_host_memory(lmcache):
    text = (lmcache / ADAPTERS / "plugin_l2_adapter.py").read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) == "adapter_cls"]
    assert "config.adapter_params" in {ast.unparse(call.args[0]) for call in made}
    assert 'kwargs["l1_memory_desc"] = l1_memory_desc' in text
    assert names(methods(OURS, "KvpagerL2Adapter")["__init__"]) == [
        *("self", "params", "l1_memory_desc")
    ]


def test_fields_that_are_read_are_there(lmcache):
    api = lmcache / "v1/distributed/api.py"
    assert {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"} == fields(
        api, "ObjectKey"
    )
    assert {"shapes", "dtypes"} == fields(api, "MemoryLayoutDesc")
    memory = lmcache / "v1/memory_management.py"
    assert {"shape", "dtype", "shapes", "dtypes"} <= fields(memory, "MemoryObjMetadata")
    assert {"byte_array", "metadata"} <= set(methods(memory, "MemoryObj"))
    assert fields(lmcache / ADAPTERS / "base.py", "AdapterUsage") >= {
        *("total_bytes_used", "total_capacity_bytes", "bytes_by_cache_salt")
    }
    assert names(
        methods(lmcache / "v1/distributed/internal_api.py", "L2StoreResult")["__new__"]
    ) == [*("cls", "success", "bytes_transferred")]
    assert "self._shared: bool" in (lmcache / ADAPTERS / "base.py").read_text()
    connector = (lmcache / "integration/vllm/lmcache_mp_connector.py").read_text()
    assert '_DCP_LAYOUT_NAMESPACE = "##' in connector
