"""As much of vLLM as `kvpager.connectors.vllm` imports, for environments without it.

`test_vllm_signatures.py` compares it with the real one.
"""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.data: dict[str, Any] = {"data": {}}

    def increase_counter(
        self, counter_name: str, counter_increase_value: float = 1, labelvalues: tuple = ()
    ) -> None:
        values = self.data["data"].setdefault(counter_name, {})
        values[labelvalues] = values.get(labelvalues, 0) + counter_increase_value

    def set_gauge(self, gauge_name: str, gauge_value: float, labelvalues: tuple = ()) -> None:
        self.data["data"].setdefault(gauge_name, {})[labelvalues] = gauge_value


class OffloadingConnector:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.config = vllm_config

    def on_new_request(self, request: Any) -> None: ...

    def reset_cache(self) -> bool | None: ...

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any: ...


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingGaugeMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class TransferJob:
    job_id: int
    keys: Collection[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        self._block_size_bytes = primary_kv_view.strides[0]  # type: ignore[index]
        self.tier_type = tier_type

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes

    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...  # type: ignore[empty-body]

    def submit_store(self, job_metadata: TransferJob) -> None: ...

    def submit_load(self, job_metadata: TransferJob) -> None: ...

    def get_finished_jobs(self) -> Any: ...

    def touch(self, keys: Collection[bytes], req_context: Any) -> None: ...

    def on_new_request(self, req_context: Any) -> Any: ...

    def on_request_finished(self, req_context: Any) -> None: ...

    def on_schedule_end(self, context: Any) -> None: ...

    def drain_jobs(self) -> None: ...

    def shutdown(self) -> None: ...

    def get_stats(self) -> Any: ...

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]: ...  # type: ignore[empty-body]


class SecondaryTierFactory:
    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None: ...


def get_offload_block_hash(key: bytes) -> bytes:
    return key[:-4]


def get_offload_group_idx(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big", signed=False)


def build_offloading_config(vllm_config: Any, kv_cache_config: Any) -> Any: ...


KV = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULES: dict[str, tuple[Any, ...]] = {
    KV: (KVConnectorRole,),
    f"{KV}.offloading.config": (build_offloading_config,),
    f"{KV}.offloading.metrics": (OffloadingConnectorStats,),
    f"{KV}.offloading_connector": (OffloadingConnector,),
    "vllm.v1.kv_offload.base": (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
        get_offload_block_hash,
        get_offload_group_idx,
    ),
    "vllm.v1.kv_offload.tiering.base": (JobResult, SecondaryTierManager, TransferJob),
    "vllm.v1.kv_offload.tiering.factory": (SecondaryTierFactory,),
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the modules where they are imported from, until the test ends."""
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(get_device_name=lambda: "cpu")  # type: ignore[attr-defined]
    found = {"vllm.platforms": platforms}
    for name, members in MODULES.items():
        found[name] = ModuleType(name)
        for member in members:
            setattr(found[name], member.__name__, member)
    for name in list(found):
        for end in (i for i, letter in enumerate(name) if letter == "."):
            found.setdefault(name[:end], ModuleType(name[:end]))
    found["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    for name, module in found.items():
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
