"""vLLM's classes have what `kvpager.connectors.vllm` uses, in every version that is here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvpager.connectors
from connectors import vllm_stubs
from connectors.sources import fields, found, given, is_abstract, methods, module, names, parsed

OURS = Path(kvpager.connectors.__file__).parent / "vllm.py"
V1 = "distributed/kv_transfer/kv_connector/v1"
TIERING = "v1/kv_offload/tiering"


@pytest.fixture(params=found("vllm") or [None], ids=str)
def vllm(request: pytest.FixtureRequest) -> Path:
    return given(request, "vllm", "test-vllm")


@pytest.mark.parametrize("name", sorted(vllm_stubs.MODULES))
def test_what_is_imported_is_there(vllm, name):
    there = parsed(module(vllm, name))
    assert [one.__name__ for one in vllm_stubs.MODULES[name] if one.__name__ not in there] == []


def test_the_tier_has_every_abstract_method_and_takes_their_arguments(vllm):
    theirs = methods(vllm / TIERING / "base.py", "SecondaryTierManager")
    ours = methods(OURS, "KvpagerTier")
    assert [name for name, one in theirs.items() if is_abstract(one) and name not in ours] == []
    for name in (set(theirs) & set(ours)) - {"__init__"}:
        assert names(ours[name]) == names(theirs[name]), name
    assert names(ours["__init__"]) == names(theirs["__init__"])
    assert ours["__init__"].args.kwarg is not None


def test_the_factory_passes_no_argument_that_the_tier_does_not_take(vllm):
    text = (vllm / TIERING / "factory.py").read_text()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "tier_cls"]
    passed = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    assert passed <= set(names(methods(OURS, "KvpagerTier")["__init__"]))
    assert call.args == []


def test_the_connector_overrides_what_is_there(vllm):
    theirs = methods(vllm / V1 / "offloading_connector.py", "OffloadingConnector")
    ours = methods(OURS, "KvpagerConnector")
    assert set(ours) - {"_tiers"} <= set(theirs)
    for name in ("__init__", "on_new_request", "reset_cache"):
        assert names(ours[name]) == names(theirs[name])
    assert "scheduler" in theirs
    manager = (vllm / TIERING / "manager.py").read_text()
    assert "self.secondary_tiers = secondary_tiers" in manager
    scheduler = (vllm / V1 / "offloading" / "scheduler.py").read_text()
    assert "self.manager: OffloadingManager = spec.get_manager()" in scheduler


def test_fields_that_are_read_or_passed_are_there(vllm):
    config = vllm / "v1/kv_offload/config.py"
    assert {"groups", "worker_kv_bytes_per_block", "model", "cache", "parallel"} | {
        "replicated_layout",
        "canonical_layout",
        "kv_cache_layout",
    } <= fields(config, "OffloadingConfig")
    assert {"tokens_per_block", "layer_names", "group_id"} <= fields(
        config, "OffloadingGroupConfig"
    )
    assert {"tokens_per_hash", "blocks_per_chunk"} <= fields(config, "OffloadingCacheConfig")
    assert {"world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "rank"} <= fields(
        config, "OffloadingParallelConfig"
    )
    base = vllm / TIERING / "base.py"
    assert {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"} == fields(
        base, "JobResult"
    )
    assert {"job_id", "keys", "chunk_ids", "req_context"} <= fields(base, "TransferJob")


def test_the_stubs_of_the_tests_are_as_the_real_classes(vllm):
    stubs = Path(vllm_stubs.__file__)
    for name in ("SecondaryTierManager", "OffloadingConnector"):
        path = f"{TIERING}/base.py" if name.startswith("S") else f"{V1}/offloading_connector.py"
        theirs = methods(vllm / path, name)
        for method, stub in methods(stubs, name).items():
            assert names(stub) == names(theirs[method]), f"{name}.{method}"
    assert fields(stubs, "JobResult") == fields(vllm / TIERING / "base.py", "JobResult")
    assert fields(stubs, "TransferJob") == fields(vllm / TIERING / "base.py", "TransferJob")
